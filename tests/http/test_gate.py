from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from asgi_server import DEADLINE_SECONDS, serving
from counter_values import counter_values
from holdfast.api.admission import (
    PROBE_HEADER,
    Admission,
    retry_after_seconds,
)
from holdfast.api.gate import PIECE_BYTES, Gate
from holdfast.api.router import OwnRoutes
from holdfast.errors import RETRY_AFTER_SECONDS
from holdfast.lifecycle.states import SERVING, State
from holdfast.request_context import REQUEST
from holdfast.telemetry.counters import Refusals
from inner_app import InnerApp, View

PROBE = "the-word-of-this-start"
LONG_BYTES = 3 * 1024 * 1024
CLOSED_STATES = [state for state in State if state not in SERVING]


class Gated:
    """A gate before a small application, and the handles to both."""

    def __init__(
        self,
        view: View | None = None,
        *,
        probe_token: str = PROBE,
        behind: ASGIApp | None = None,
    ) -> None:
        self.view = view or View()
        self.refusals = Refusals()
        self.admission = Admission(self.view, probe_token=probe_token, refusals=self.refusals)
        self.inner = InnerApp()
        self.app = OwnRoutes([], Gate(behind or self.inner, self.admission))


def _answer(gated: Gated, path: str, method: str = "GET", **request: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with serving(gated.app) as client:
            return await client.request(method, path, **request)

    return asyncio.run(ask())


def test_an_open_gate_lets_requests_in() -> None:
    """In READY the answer is the application's own."""
    answer = _answer(Gated(), "/v1/whoami", "POST", content=b"four")
    assert (answer.status_code, answer.text) == (200, "inner 4")


def test_a_suspended_key_is_told_how_long_it_has_to_wait() -> None:
    """The whole of it, and that trying again before is in vain."""
    gated = Gated()
    gated.admission.suspended_seconds = lambda _: 1234.5
    answer = _answer(gated, "/v1/whoami", "POST", json={})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1235"
    assert answer.headers["x-should-retry"] == "false"
    assert counter_values(gated.refusals)["key_suspended"] == 1


@pytest.mark.parametrize("state", CLOSED_STATES)
def test_a_closed_gate_answers_503_with_an_openai_error(state: State) -> None:
    """Outside READY the answer says when to come back, as OpenAI's clients read it."""
    answer = _answer(Gated(View(state, "the engine loads", 17.2)), "/v1/whoami", "POST", json={})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "18"
    assert answer.headers["x-should-retry"] == "true"
    assert answer.headers["x-holdfast-state"] == state
    assert answer.json() == {
        "type": "error",
        "error": {
            "message": f"The server is {state}: the engine loads",
            "type": "service_unavailable",
            "param": None,
            "code": 503,
        },
    }


@pytest.mark.parametrize("path", ["/no/such/path", "/", "/v1/whoami/"])
def test_a_closed_gate_knows_no_paths(path: str) -> None:
    """Before READY, no answer reveals which paths exist."""
    assert _answer(Gated(View(State.STARTING)), path).status_code == 503


def test_an_open_gate_passes_on_unknown_paths() -> None:
    """In READY an unknown path is the application's 404."""
    assert _answer(Gated(), "/no/such/path").status_code == 404


def test_a_refused_head_has_headers_and_no_body() -> None:
    """A HEAD request learns the state without a body."""
    answer = _answer(Gated(View(State.STARTING)), "/v1/whoami", "HEAD")
    assert (answer.status_code, answer.content) == (503, b"")
    assert answer.headers["x-holdfast-state"] == "STARTING"


def test_a_connection_survives_a_refused_upload() -> None:
    """A body that was never read does not spoil the next request of the same client."""
    gated = Gated(View(State.STARTING))

    async def ask() -> list[int]:
        async with serving(gated.app) as client:
            refused = await client.post("/v1/whoami", content=b"x" * 2_000_000)
            gated.view.state = State.READY
            return [refused.status_code, (await client.get("/v1/whoami")).status_code]

    assert asyncio.run(ask()) == [503, 200]


@given(eta=st.none() | st.floats())
def test_retry_after_is_between_1_and_120(eta: float | None) -> None:
    """Whatever is estimated, clients are told a number they obey."""
    assert 1 <= retry_after_seconds(eta) <= 120


@pytest.mark.parametrize(
    ("eta", "seconds"),
    [(None, RETRY_AFTER_SECONDS), (0.0, 1), (3.01, 4), (60.0, 60), (500.0, 120)],
)
def test_retry_after_is_the_estimate_rounded_up(eta: float | None, seconds: int) -> None:
    """The client comes back when the server is expected to be ready, not before."""
    assert retry_after_seconds(eta) == seconds


def test_the_probe_enters_while_probing() -> None:
    """The token of this start opens the gate, and the application never sees it."""
    answer = _answer(Gated(View(State.PROBING)), "/v1/headers", headers={PROBE_HEADER: PROBE})
    assert answer.status_code == 200
    assert PROBE_HEADER not in answer.json()


@pytest.mark.parametrize(
    "state", [s for s in CLOSED_STATES if s not in {State.PROBING, State.DRAINING}]
)
def test_the_probe_enters_in_no_other_closed_state(state: State) -> None:
    """The token opens nothing before the engine is there, nor after it is given up."""
    answer = _answer(Gated(View(state)), "/v1/headers", headers={PROBE_HEADER: PROBE})
    assert answer.status_code == 503


@pytest.mark.parametrize("token", ["", "wrong", PROBE + "x", PROBE[:-1], "\xe4"])
def test_a_wrong_token_opens_nothing(token: str) -> None:
    """A request with another token is a request like any other."""
    headers = {PROBE_HEADER.encode(): token.encode("latin-1")}
    answer = _answer(Gated(View(State.PROBING)), "/v1/headers", headers=headers)
    assert answer.status_code == 503


def test_a_wrong_token_is_stripped_when_the_gate_is_open() -> None:
    """The header of the probe never reaches the application, even from a client."""
    answer = _answer(Gated(), "/v1/headers", headers={PROBE_HEADER: "wrong", "x-other": "kept"})
    assert PROBE_HEADER not in answer.json()
    assert answer.json()["x-other"] == "kept"


def test_no_token_set_means_no_probe() -> None:
    """An empty token does not let in a request with an empty header."""
    gated = Gated(View(State.PROBING), probe_token="")
    assert _answer(gated, "/v1/headers", headers={PROBE_HEADER: ""}).status_code == 503


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (State.STARTING, "not_ready"),
        (State.PROBING, "not_ready"),
        (State.RECOVERING, "not_ready"),
        (State.SLEEPING, "not_ready"),
        (State.DRAINING, "draining"),
        (State.STOPPED, "draining"),
        (State.FAILED, "failed"),
    ],
)
def test_refusals_are_counted_by_reason(state: State, reason: str) -> None:
    """Each request turned away counts once, under why."""
    gated = Gated(View(state))
    _answer(gated, "/v1/whoami")
    assert {name: count for name, count in counter_values(gated.refusals).items() if count} == {
        reason: 1
    }


def test_the_probe_is_not_counted() -> None:
    """Neither what the probe runs nor what it is refused shows in the counts of the users."""
    gated = Gated(View(State.PROBING))
    headers = {PROBE_HEADER: PROBE}

    async def ask() -> list[int]:
        async with (
            serving(gated.app) as client,
            client.stream("GET", "/v1/stream", headers=headers),
        ):
            running = gated.admission.in_flight
            gated.inner.released.set()
            gated.view.state = State.STARTING
            await client.get("/v1/whoami", headers=headers)
            return [running, sum(counter_values(gated.refusals).values())]

    assert asyncio.run(ask()) == [0, 0]


def test_a_stream_is_in_flight_until_it_ends() -> None:
    """A request counts from its first byte to its last."""
    gated = Gated()

    async def ask() -> list[int]:
        async with serving(gated.app) as client:
            async with client.stream("GET", "/v1/stream") as stream:
                running = gated.admission.in_flight
                gated.inner.released.set()
                await stream.aread()
            assert await gated.admission.until_idle(DEADLINE_SECONDS)
            return [running, gated.admission.in_flight]

    assert asyncio.run(ask()) == [1, 0]


def test_a_client_that_leaves_is_not_in_flight() -> None:
    """A stream stops counting when its client is gone, though it was never finished."""
    gated = Gated()

    async def ask() -> None:
        async with serving(gated.app) as client:
            async with client.stream("GET", "/v1/stream") as stream:
                await anext(stream.aiter_bytes())
                assert gated.admission.in_flight == 1
            assert await gated.admission.until_idle(DEADLINE_SECONDS)

    asyncio.run(ask())


def test_a_broken_request_is_not_in_flight() -> None:
    """An exception in the application is counted out."""
    gated = Gated()
    assert _answer(gated, "/v1/broken").status_code == 500
    assert gated.admission.in_flight == 0


def test_draining_lets_streams_finish_and_nobody_in() -> None:
    """What runs goes on to its end, what comes is sent away, and the drain ends with the last."""
    gated = Gated()

    async def ask() -> tuple[int, str]:
        async with (
            serving(gated.app) as client,
            client.stream("GET", "/v1/stream") as stream,
            asyncio.TaskGroup() as tasks,
        ):
            gated.view.state = State.DRAINING
            drain = tasks.create_task(gated.admission.until_idle(DEADLINE_SECONDS))
            refused = await client.get("/v1/whoami")
            assert not drain.done()
            gated.inner.released.set()
            text = (await stream.aread()).decode()
            assert await drain
            return refused.status_code, text

    code, text = asyncio.run(ask())
    assert code == 503
    assert text.endswith("[DONE]\n\n")


def test_a_drain_ends_at_its_deadline() -> None:
    """A stream that never ends does not hold the drain longer than it may take."""
    gated = Gated()

    async def ask() -> bool:
        async with serving(gated.app) as client, client.stream("GET", "/v1/stream"):
            return await gated.admission.until_idle(0.05)

    assert asyncio.run(ask()) is False


def test_an_idle_server_drains_at_once() -> None:
    """With nothing in flight there is nothing to wait for."""
    assert asyncio.run(Gated().admission.until_idle(0.0)) is True


async def _websocket(gated: Gated) -> str | int:
    """What the server says first, or the code it closes with."""
    async with serving(gated.app) as client:
        url = f"{str(client.base_url).replace('http', 'ws')}/v1/realtime"
        async with connect(url, open_timeout=DEADLINE_SECONDS) as connection:
            try:
                return str(await connection.recv())
            except ConnectionClosed as closed:
                return closed.rcvd.code if closed.rcvd else "no code"


def test_an_open_gate_lets_websockets_in() -> None:
    """In READY a WebSocket is the application's."""
    gated = Gated()
    assert asyncio.run(_websocket(gated)) == "hello"
    assert gated.admission.in_flight == 0


@pytest.mark.parametrize("state", CLOSED_STATES)
def test_a_closed_gate_closes_websockets_with_1013(state: State) -> None:
    """Outside READY a WebSocket is closed with 'try again later', and counted."""
    gated = Gated(View(state))
    assert asyncio.run(_websocket(gated)) == 1013
    assert sum(counter_values(gated.refusals).values()) == 1


def test_a_request_cut_off_while_it_is_sent_was_never_let_in() -> None:
    """A client that goes away in the middle of its body, which nobody waits for."""
    gated = Gated()

    async def ask() -> None:
        async with serving(gated.app) as client:
            address = (client.base_url.host, client.base_url.port or 0)
            head = b"POST /v1/whoami HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf"
            with socket.create_connection(address, timeout=DEADLINE_SECONDS) as connection:
                connection.sendall(head)
                assert (await client.post("/v1/whoami", content=b"whole")).status_code == 200
                assert await gated.admission.until_idle(DEADLINE_SECONDS)
                gated.inner.entered.clear()
            assert (await client.get("/v1/headers")).status_code == 200
            assert not gated.inner.entered.is_set()

    asyncio.run(ask())


class Held(Gated):
    """A gate of a server that has lost its engine."""

    def __init__(self, eta_seconds: float | None = None, *, behind: ASGIApp | None = None) -> None:
        view = View(State.RECOVERING, "the engine died", eta_seconds, is_recovering=True)
        super().__init__(view)
        self.admission = Admission(
            view, probe_token=PROBE, refusals=self.refusals, hold_timeout_seconds=DEADLINE_SECONDS
        )
        self.app = OwnRoutes([], Gate(behind or self.inner, self.admission))

    async def until_held(self, count: int) -> None:
        """Return when this many requests wait."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while self.admission.held != count:  # noqa: ASYNC110 - the loop is all there is
                await asyncio.sleep(0.01)


def test_a_request_is_held_until_the_engine_is_back() -> None:
    """Over every state on the way; then it is answered as ever, with its body."""

    async def scene() -> None:
        gated = Held()
        async with serving(gated.app) as client:
            asking = asyncio.create_task(client.post("/v1/whoami", content=b"four"))
            await gated.until_held(1)
            gated.view.move(State.PROBING, is_recovering=True)
            await gated.until_held(1)
            gated.view.move(State.READY)
            answer = await asking
        assert (answer.status_code, answer.text) == (200, "inner 4")
        assert gated.admission.held == 0

    asyncio.run(scene())


def test_a_wait_that_is_promised_to_be_longer_is_refused() -> None:
    """At once, with the promise as Retry-After."""
    answer = _answer(Held(DEADLINE_SECONDS + 30.0), "/v1/whoami")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == str(DEADLINE_SECONDS + 30)


@pytest.mark.parametrize("state", [State.DRAINING, State.FAILED])
def test_a_held_request_is_refused_when_no_engine_comes(state: State) -> None:
    """Another server may take the request."""

    async def scene() -> httpx.Response:
        gated = Held()
        async with serving(gated.app) as client:
            asking = asyncio.create_task(client.post("/v1/whoami", content=b"four"))
            await gated.until_held(1)
            gated.view.move(state)
            return await asking

    answer = asyncio.run(scene())
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")


def test_a_client_that_leaves_while_held_is_dropped() -> None:
    """Its request never reaches the application, nor is it counted as refused."""

    async def scene() -> None:
        gated = Held()
        async with serving(gated.app) as client:
            asking = asyncio.create_task(client.post("/v1/whoami", content=b"four"))
            await gated.until_held(1)
            asking.cancel()
            await asyncio.wait({asking})
            await gated.until_held(0)
            gated.view.move(State.READY)
        assert not gated.inner.entered.is_set()
        assert set(counter_values(gated.refusals).values()) == {0}

    asyncio.run(scene())


def test_a_long_body_is_held_too() -> None:
    """It is taken in while it waits, and arrives whole."""

    async def scene() -> httpx.Response:
        gated = Held()
        async with serving(gated.app) as client:
            body = b"x" * LONG_BYTES
            asking = asyncio.create_task(client.post("/v1/whoami", content=body))
            await gated.until_held(1)
            gated.view.move(State.READY)
            return await asking

    assert asyncio.run(scene()).text == f"inner {LONG_BYTES}"


def measuring(sizes: list[int]) -> Any:
    """Return an application that notes the size of each part of a body."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        has_more = True
        while has_more:
            message = await receive()
            sizes.append(len(message["body"]))
            has_more = message["more_body"]
        await JSONResponse({})(scope, receive, send)

    return app


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/whoami"), ("POST", "/pause")])
def test_a_body_that_needs_no_engine_is_held_as_one(method: str, path: str) -> None:
    """Its parts would take many times its size."""
    sizes: list[int] = []

    async def scene() -> None:
        gated = Held(behind=measuring(sizes))
        async with serving(gated.app) as client:
            asking = asyncio.create_task(client.request(method, path, content=b"x" * LONG_BYTES))
            await gated.until_held(1)
            gated.view.move(State.READY)
            await asking

    asyncio.run(scene())
    assert sizes == [LONG_BYTES]


@pytest.mark.parametrize(
    ("content_type", "most_bytes"),
    [
        ("application/json", LONG_BYTES),
        ("Application/JSON; charset=utf-8", LONG_BYTES),
        (None, LONG_BYTES),
        ("multipart/form-data; boundary=json", PIECE_BYTES),
        ("multipart/form-data=json", PIECE_BYTES),
        ("application/x-www-form-urlencoded", PIECE_BYTES),
        ("application/octet-stream", PIECE_BYTES),
    ],
)
def test_only_json_reaches_the_application_at_once(
    content_type: str | None, most_bytes: int
) -> None:
    """The parsers of forms would go through megabytes in one turn of the event loop."""
    sizes: list[int] = []
    headers = {} if content_type is None else {"content-type": content_type}
    content = b"x" * LONG_BYTES
    _answer(Gated(behind=measuring(sizes)), "/v1/whoami", "POST", content=content, headers=headers)
    assert (sum(sizes), max(sizes)) == (LONG_BYTES, most_bytes)


def test_a_form_is_read_from_its_pieces() -> None:
    """Its file is the one that was sent."""
    sent = bytes(at % 251 for at in range(LONG_BYTES))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async with Request(scope, receive).form() as form:
            file: Any = form["file"]
            is_same = await file.read() == sent
            await PlainTextResponse(f"{form['model']} {is_same}")(scope, receive, send)

    form = {"data": {"model": "m"}, "files": {"file": ("a.wav", sent)}}
    assert _answer(Gated(behind=app), "/v1/whoami", "POST", **form).text == "m True"


def test_a_websocket_is_held_too() -> None:
    """It is accepted when the engine is back."""

    async def scene() -> str:
        gated = Held()
        async with serving(gated.app) as client:
            url = str(client.base_url).replace("http", "ws")
            connecting = asyncio.create_task(_first_word(f"{url}/v1/realtime"))
            await gated.until_held(1)
            gated.view.move(State.READY)
            return await connecting

    assert asyncio.run(scene()) == "hello"


async def _first_word(url: str) -> str:
    async with connect(url) as socket:
        return str(await socket.recv())


@pytest.mark.parametrize(
    ("may_be_retried", "seconds", "status", "headers"),
    [
        (True, None, 500, ("true", str(RETRY_AFTER_SECONDS))),
        (True, 17, 429, ("true", "17")),
        (False, None, 500, ("false", None)),
        (False, 1234, 429, ("false", "1234")),
        (None, None, 500, (None, None)),
        (None, None, 429, ("true", str(RETRY_AFTER_SECONDS))),
        (None, None, 503, ("true", str(RETRY_AFTER_SECONDS))),
    ],
    ids=["lost", "queue full", "suspect", "suspended", "vLLM's error", "vLLM's queue full", "busy"],
)
def test_an_answer_says_whether_and_when_to_ask_again(
    may_be_retried: bool | None,
    seconds: int | None,
    status: int,
    headers: tuple[str | None, str | None],
) -> None:
    """When the engine's fate has decided it; OpenAI's clients obey."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        context = REQUEST.get()
        assert context is not None
        context.may_be_retried, context.retry_after_seconds = may_be_retried, seconds
        await JSONResponse({}, status)(scope, receive, send)

    answer = _answer(Gated(behind=app), "/v1/whoami")
    assert tuple(map(answer.headers.get, ("x-should-retry", "retry-after"))) == headers


def test_a_broken_stream_has_no_clean_end() -> None:
    """vLLM sends `[DONE]` after an error too; without it clients know."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def events() -> AsyncIterator[str]:
            yield "data: one\n\n"
            context = REQUEST.get()
            assert context is not None
            context.is_broken = True
            yield 'data: {"error": {}}\n\n'
            yield "data: [DONE]\n\n"

        await StreamingResponse(events())(scope, receive, send)

    assert _answer(Gated(behind=app), "/v1/whoami").text == 'data: one\n\ndata: {"error": {}}\n\n'
