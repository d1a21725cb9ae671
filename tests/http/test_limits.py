"""What a whole request may ask, and the form of every error."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from itertools import pairwise
from typing import Any

import anthropic
import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect

from asgi_server import DEADLINE_SECONDS, serving
from counter_values import counter_values
from holdfast.api.admission import PROBE_HEADER, Admission
from holdfast.api.body_cost import FREE_BYTES, LOOK_BYTES, PACE_BYTES
from holdfast.api.errors import SHAPED_BYTES, UNSUPPORTED_MEDIA_TYPE
from holdfast.api.gate import Gate
from holdfast.api.limits import Limits
from holdfast.api.router import OwnRoutes
from holdfast.request_context import current_request
from holdfast.settings import LimitSettings
from holdfast.telemetry.counters import Refusals
from inner_app import View

PROBE = "the-word-of-this-start"
DEEP = b"[" * 100_000
KEEPS = {"error": {"message": "as it is", "type": "Theirs", "param": "x", "code": 400}}


class App(Starlette):
    """Errors of every form, and answers that take their time."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.reached = 0
        super().__init__(
            routes=[
                Route("/v1/echo", self._echo, methods=["POST"]),
                Route("/v1/form", self._form, methods=["POST"]),
                Route("/v1/error", self._error, methods=["POST"]),
                Route("/v1/broken", self._broken),
                Route("/v1/never", self._never),
                Route("/v1/later", self._later),
                Route("/v1/swallows", self._swallows),
                Route("/v1/apart", self._apart),
                Route("/v1/stream", self._stream),
                Route("/v1/chat/completions", self._stream, methods=["POST"]),
                Route("/v1/messages", self._stream, methods=["POST"]),
                Route("/v1/file", self._file),
                Route("/v1/large", self._large),
                WebSocketRoute("/v1/realtime", self._realtime),
            ]
        )

    async def _echo(self, request: Request) -> Response:
        size = len(await request.body())
        self.reached += 1
        return JSONResponse({"bytes": size})

    async def _form(self, request: Request) -> Response:
        self.reached += 1
        async with request.form() as form:
            return JSONResponse(dict(form))

    async def _error(self, request: Request) -> Response:
        given = await request.json()
        if "raise" in given:
            raise HTTPException(given["raise"], given.get("detail"))
        if "text" in given:
            return PlainTextResponse(given["text"], given["status"])
        return JSONResponse(given["body"], given["status"], headers={"x-theirs": "kept"})

    async def _broken(self, _request: Request) -> Response:
        raise RuntimeError("broken on purpose")

    async def _never(self, _request: Request) -> Response:
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()
        return Response()

    async def _later(self, _request: Request) -> Response:
        await asyncio.sleep(0.3)
        return PlainTextResponse("later")

    async def _swallows(self, _request: Request) -> Response:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return JSONResponse({"error": {"message": "Client disconnected"}}, 400)
        return Response()

    async def _apart(self, request: Request) -> Response:
        """As vLLM's routes do: the work is cancelled where the client leaves, and only there."""
        await request.body()
        working = asyncio.create_task(self._never(request))
        leaving = asyncio.ensure_future(request.receive())
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        return Response()

    async def _stream(self, _request: Request) -> Response:
        return StreamingResponse(self._chunks(b"data: {}\n\n"), media_type="text/event-stream")

    async def _file(self, _request: Request) -> Response:
        return StreamingResponse(self._chunks(b"more"), media_type="application/octet-stream")

    async def _chunks(self, first: bytes) -> AsyncIterator[bytes]:
        yield first
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()
            yield b"data: [DONE]\n\n"

    async def _large(self, _request: Request) -> Response:
        return PlainTextResponse("x" * 2 * SHAPED_BYTES, 418)

    async def _realtime(self, websocket: WebSocket) -> None:
        await websocket.accept()
        await asyncio.sleep(0.2)
        await websocket.send_text("still here")
        await websocket.close()


class Limited:
    """An application behind our own routes, the limits and the gate."""

    def __init__(self, **settings: Any) -> None:
        self.refusals = Refusals()
        self.inner = App()
        admission = Admission(View(), probe_token=PROBE, refusals=self.refusals)
        gate = Gate(self.inner, admission)
        self.limits = Limits(
            gate, LimitSettings(**settings), self.refusals, is_probe=admission.is_probe
        )
        self.app = OwnRoutes([Route("/livez", self._livez)], self.limits)

    async def _livez(self, _request: Request) -> Response:
        return PlainTextResponse("alive")

    @property
    def refused(self) -> dict[str, int]:
        """The reasons that turned something away."""
        return {reason: count for reason, count in counter_values(self.refusals).items() if count}

    def asked(self, method: str, path: str, **request: Any) -> httpx.Response:
        """The answer to one request."""

        async def ask() -> httpx.Response:
            async with serving(self.app) as client:
                return await client.request(method, path, **request)

        return asyncio.run(ask())


@pytest.mark.parametrize("content_type", [None, "application/json", "APPLICATION/JSON; x=y"])
def test_deep_json_is_refused(content_type: str | None) -> None:
    """Before anything parses it, and in OpenAI's form."""
    limited = Limited()
    headers = {"content-type": content_type} if content_type else {}
    answer = limited.asked("POST", "/v1/echo", content=DEEP, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (limited.refused, limited.inner.reached) == ({"json_too_deep": 1}, 0)


def test_what_is_no_json_may_be_as_deep_as_it_likes() -> None:
    """A file that is uploaded is not looked at."""
    limited = Limited()
    headers = {"content-type": "application/octet-stream"}
    answer = limited.asked("POST", "/v1/echo", content=DEEP, headers=headers)
    assert (answer.json(), limited.refused) == ({"bytes": 100_000}, {})


FORM = b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nhello\r\n--b--\r\n'


@pytest.mark.parametrize(
    "parameters",
    [
        "charset=punycode",
        "charset=utf-7",
        "charset=utf-8; charset=punycode",
        'Charset = "punycode"',
        'charset="puny\\code"',
        "charset=utf-8-sig",
        "charset=no-such-charset",
        "charset=",
        'x="; charset=utf-8"; charset=idna',
    ],
)
@pytest.mark.parametrize("kind", ["multipart/form-data", "Multipart/Form-Data "])
def test_forms_in_most_charsets_are_refused(kind: str, parameters: str) -> None:
    """Python decodes a field by the charset that its client names, and some take half a minute."""
    limited = Limited()
    headers = {"content-type": f"{kind}; boundary=b; {parameters}"}
    answer = limited.asked("POST", "/v1/form", content=FORM, headers=headers)
    assert answer.status_code == 400
    assert "charset=utf-8" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert (limited.refused, limited.inner.reached) == ({"malformed": 1}, 0)


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data; boundary=b",
        "multipart/form-data; boundary=b; charset=UTF-8",
        'multipart/form-data; charset="utf8"; boundary="b"',
        "multipart/form-data; charset=punycode; boundary=b; charset=utf_8",
        "multipart/form-data; boundary=b; charset*=utf-8''punycode",
        "multipart/form-data; boundary=b; charset=US-ASCII",
        "multipart/form-data; boundary=b; charset=ISO-8859-1",
        "multipart/form-data; boundary=b; charset=latin1",
    ],
)
def test_forms_in_the_usual_charsets_are_read(content_type: str) -> None:
    """The charset that counts is the one that the parser uses."""
    limited = Limited()
    headers = {"content-type": content_type}
    answer = limited.asked("POST", "/v1/form", content=FORM, headers=headers)
    assert (answer.json(), limited.refused) == ({"prompt": "hello"}, {})


@pytest.mark.parametrize(
    ("value", "count"), [(b"1,", 5 << 20), (b"[],", 600_000), (b'"":1,', 600_000)]
)
def test_json_of_too_many_values_is_refused(value: bytes, count: int) -> None:
    """Nothing else is answered while a parser makes millions of them."""
    limited = Limited()
    answer = limited.asked("POST", "/v1/echo", content=value * count)
    assert answer.status_code == 400
    assert (limited.refused, limited.inner.reached) == ({"json_too_large": 1}, 0)


def test_larger_bodies_may_have_more_values() -> None:
    """A larger --max-body-size raises the limit of values, too."""
    limited = Limited(max_body_bytes=128 << 20)
    content = b"100000, " * (5 << 20)
    answer = limited.asked("POST", "/v1/echo", content=content)
    assert (answer.json(), limited.refused) == ({"bytes": len(content)}, {})


def test_json_in_another_encoding_is_refused() -> None:
    """Its depth could not be known."""
    limited = Limited()
    answer = limited.asked("POST", "/v1/echo", content='{"a": 1}'.encode("utf-16"))
    assert (answer.status_code, limited.refused) == (400, {"malformed": 1})


def test_a_connection_survives_a_refused_body() -> None:
    """What is left of the body is read and thrown away, and taken for no request."""
    limited = Limited()

    async def ask() -> list[int]:
        async with serving(limited.app) as client:
            refused = await client.post("/v1/echo", content=DEEP * 20)
            return [refused.status_code, (await client.post("/v1/echo", content=b"[]")).status_code]

    assert asyncio.run(ask()) == [400, 200]


@pytest.mark.parametrize("path", ["/v1/never", "/v1/swallows"])
def test_a_request_that_takes_too_long_is_aborted_with_504(path: str) -> None:
    """Also where the application answers its own end, as vLLM does."""
    limited = Limited(request_timeout_seconds=0.5)
    answer = limited.asked("GET", path)
    assert answer.status_code == 504
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["type"] == "timeout_error"
    assert limited.refused == {"timed_out": 1}
    assert limited.inner.left.is_set() == (path == "/v1/never")


def test_work_in_a_task_of_its_own_ends_with_its_request() -> None:
    """As vLLM has it; a cancellation of the request alone would leave it."""
    limited = Limited(request_timeout_seconds=0.5)

    async def ask() -> int:
        async with serving(limited.app) as client:
            answer = await client.get("/v1/apart")
            await asyncio.wait_for(limited.inner.left.wait(), DEADLINE_SECONDS)
            return answer.status_code

    assert asyncio.run(ask()) == 504


def test_a_stream_that_takes_too_long_ends_with_an_error_event() -> None:
    """And without `[DONE]`, by which clients know a whole answer."""
    limited = Limited(request_timeout_seconds=1.0)
    answer = limited.asked("GET", "/v1/stream")
    first, last, end = answer.text.split("\n\n")
    assert (answer.status_code, first, end) == (200, "data: {}", "")
    name, _, data = last.partition("\ndata: ")
    event = json.loads(data)
    assert (name, event["type"], event["error"]["code"]) == ("event: error", "error", 504)
    top = {key: event[key] for key in ("code", "message", "param")}
    message = event["error"]["message"]
    assert top == {"code": "timeout_error", "message": message, "param": None}
    assert limited.refused == {"timed_out": 1}
    assert limited.inner.left.is_set()


async def _chat(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chunks = await client.chat.completions.create(model="m", messages=[], stream=True)
        _ = [chunk async for chunk in chunks]


async def _message(url: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        events = await client.messages.create(model="m", max_tokens=9, messages=[], stream=True)
        _ = [event async for event in events]


@pytest.mark.parametrize(
    ("ask", "error"), [(_chat, openai.APIError), (_message, anthropic.APIStatusError)]
)
def test_clients_raise_the_error_of_a_stream_that_takes_too_long(
    ask: Callable[[str], Awaitable[None]], error: type[Exception]
) -> None:
    """Each on its own route, rather than taking half an answer for the whole."""
    limited = Limited(request_timeout_seconds=1.0)

    async def scene() -> None:
        async with serving(limited.app) as client:
            await ask(str(client.base_url))

    with pytest.raises(error, match="took longer"):
        asyncio.run(scene())


def test_another_answer_that_takes_too_long_is_cut() -> None:
    """It has no clean end, so that nobody takes it for whole."""
    limited = Limited(request_timeout_seconds=1.0)
    with pytest.raises(httpx.RemoteProtocolError):
        limited.asked("GET", "/v1/file")
    assert limited.refused == {"timed_out": 1}


def test_a_request_in_time_is_left_alone() -> None:
    """The timeout ends with the answer."""
    limited = Limited(request_timeout_seconds=DEADLINE_SECONDS)
    assert limited.asked("POST", "/v1/echo", content=b"[]").json() == {"bytes": 2}
    assert limited.refused == {}


def test_the_probe_has_its_own_deadline() -> None:
    """A request of the probe that takes longer than users may is not aborted."""
    limited = Limited(request_timeout_seconds=0.1)

    answer = limited.asked("GET", "/v1/later", headers={PROBE_HEADER: PROBE})
    assert (answer.text, limited.refused) == ("later", {})


def test_a_websocket_has_no_time_limit() -> None:
    """A WebSocket passes unchanged."""
    limited = Limited(request_timeout_seconds=0.05)

    async def ask() -> str:
        async with serving(limited.app) as client:
            url = str(client.base_url).replace("http", "ws", 1) + "/v1/realtime"
            async with connect(url) as socket:
                return str(await socket.recv())

    assert asyncio.run(ask()) == "still here"


ERRORS: dict[str, tuple[dict[str, Any], int, str]] = {
    "a detail": ({"raise": 404, "detail": "Not here"}, 404, "Not here"),
    "no detail": ({"raise": 404}, 404, "Not Found"),
    "a structured detail": ({"body": {"detail": [{"a": 1}]}, "status": 422}, 422, '[{"a": 1}]'),
    "text": ({"text": "Internal Server Error", "status": 500}, 500, "Internal Server Error"),
    "nothing": ({"text": "", "status": 502}, 502, "Bad Gateway"),
    "an error of one word": (
        {"body": {"error": "Unauthorized"}, "status": 401},
        401,
        "Unauthorized",
    ),
    "a message": ({"body": {"message": "so"}, "status": 400}, 400, "so"),
    "a list": ({"body": [1], "status": 400}, 400, "Bad Request"),
    "a status of their own": ({"body": {}, "status": 599}, 599, "Error"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_is_given_openais_form(case: str) -> None:
    """What the application says is kept as the message."""
    given, status, message = ERRORS[case]
    answer = Limited().asked("POST", "/v1/error", json=given)
    kind = "invalid_request_error" if status < 500 else "server_error"
    expected = {"message": message, "type": kind, "param": None, "code": status}
    assert (answer.status_code, answer.json()) == (status, {"type": "error", "error": expected})
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(422, "invalid_request_error"), (429, "rate_limit_error"), (503, "service_unavailable")],
)
def test_what_is_refused_within_has_the_type_of_what_is_refused_before(
    status: int, kind: str
) -> None:
    """vLLM calls our refusals by the phrase of their status; a type of its own stays."""
    told = {"message": "Not now.", "type": HTTPStatus(status).phrase, "param": None, "code": status}
    answer = Limited().asked("POST", "/v1/error", json={"body": {"error": told}, "status": status})
    expected = {"type": "error", "error": {**told, "type": kind}}
    assert (answer.status_code, answer.json()) == (status, expected)
    named = {"error": {**told, "type": "ServiceUnavailableError"}}
    answer = Limited().asked("POST", "/v1/error", json={"body": named, "status": status})
    assert answer.json() == named


def test_an_error_in_openais_form_is_left_as_it_is() -> None:
    """Its bytes and its headers are the application's."""
    answer = Limited().asked("POST", "/v1/error", json={"body": KEEPS, "status": 400})
    assert (answer.status_code, answer.json(), answer.headers["x-theirs"]) == (400, KEEPS, "kept")


def test_a_wrong_content_type_is_415() -> None:
    """vLLM says so with a status of 400."""
    limited = Limited()
    said = {"error": {"message": UNSUPPORTED_MEDIA_TYPE}}
    answer = limited.asked("POST", "/v1/error", json={"body": said, "status": 400})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, 415)
    assert limited.refused == {"unsupported_media_type": 1}


def test_an_error_that_quotes_a_wrong_content_type_is_no_other() -> None:
    """The words are those of the client."""
    limited = Limited()
    message = f"1 validation error:\n  {{'input': {UNSUPPORTED_MEDIA_TYPE!r}}}"
    quoting = {"error": {"message": message}}
    answer = limited.asked("POST", "/v1/error", json={"body": quoting, "status": 400})
    assert (answer.status_code, answer.json()) == (400, quoting)
    assert limited.refused == {}


@pytest.mark.parametrize(("path", "allowed"), [("/v1/echo", "POST"), ("/livez", "GET, HEAD")])
def test_a_wrong_method_is_405_with_what_is_allowed(path: str, allowed: str) -> None:
    """On routes of the application and on ours."""
    answer = Limited().asked("DELETE", path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.json()["error"]["code"] == 405


def test_an_unknown_path_is_404() -> None:
    """In OpenAI's form too."""
    answer = Limited().asked("GET", "/v1/no/such")
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "Not Found")


def held(size: int, port: int, key: str) -> socket.socket:
    """A connection that has sent `size` bytes of a longer body, and sends no more."""
    wire = socket.create_connection(("127.0.0.1", port), DEADLINE_SECONDS)
    head = (
        f"POST /v1/echo HTTP/1.1\r\nHost: x\r\nX-Key: {key}\r\nContent-Length: {size + 1}\r\n\r\n"
    )
    wire.sendall(head.encode() + b"1" * size)
    return wire


def test_all_bodies_together_are_bounded() -> None:
    """A request for more gets 429 until there is room; others and short requests are served."""
    limited = Limited(max_buffered_bytes=FREE_BYTES * 10)
    large = b"1" * FREE_BYTES * 4

    async def named(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            current_request().key = dict(scope["headers"]).get(b"x-key", b"").decode()
        await limited.app(scope, receive, send)

    async def scene() -> list[Any]:
        async with serving(named) as client:
            port = client.base_url.port or 0

            async def send(key: str, body: bytes) -> httpx.Response:
                return await client.post("/v1/echo", content=body, headers={"x-key": key})

            async def until_kept(size: int) -> None:
                async with asyncio.timeout(DEADLINE_SECONDS):
                    while limited.limits.buffers.taken_bytes != size:  # noqa: ASYNC110 - the loop is all there is
                        await asyncio.sleep(0.01)

            with held(FREE_BYTES * 4, port, "a"):
                await until_kept(FREE_BYTES * 3)
                refused, short = await send("a", large), await send("a", b"[]")
                other = await send("b", large)
            await until_kept(0)
            later = await send("a", large)
            assert refused.headers["x-should-retry"] == "true"
            codes = [answer.status_code for answer in (refused, short, other, later)]
            return [*codes, refused.headers["retry-after"]]

    assert asyncio.run(scene()) == [429, 200, 200, 200, "5"]
    assert limited.refused == {"buffers_full": 1}


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ("2001:db8::5", "2001:db8::6", 429),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::", 429),
        ("2001:db8::5", "2001:db8:0:1::5", 200),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", 200),
        ("192.0.2.1", "192.0.2.2", 200),
    ],
)
def test_one_network_of_ipv6_has_the_share_of_one_client(
    first: str, second: str, status: int
) -> None:
    """However its addresses are written; two clients of IPv4 have a share each."""
    limited = Limited(max_buffered_bytes=FREE_BYTES * 10)

    async def placed(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope["client"] = (dict(scope["headers"])[b"x-key"].decode(), 1)
        await limited.app(scope, receive, send)

    async def scene() -> int:
        async with serving(placed) as client:
            with held(FREE_BYTES * 4, client.base_url.port or 0, first):
                async with asyncio.timeout(DEADLINE_SECONDS):
                    while not limited.limits.buffers.taken_bytes:  # noqa: ASYNC110 - as above
                        await asyncio.sleep(0.01)
                body = b"1" * FREE_BYTES * 4
                answer = await client.post("/v1/echo", content=body, headers={"x-key": second})
                return answer.status_code

    assert asyncio.run(scene()) == status


def test_others_have_their_turn_while_a_body_floods_in() -> None:
    """A body that is always ready does not block the loop between two reads of it."""
    (turns,) = asyncio.run(turns_at_reads("http", 1))
    assert len(turns) == 8
    assert all(later > earlier for earlier, later in pairwise(turns))


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_others_have_their_turn_between_any_two_of_many_bodies(kind: str) -> None:
    """However much floods in, bodies and messages are read one after the other."""
    later = [turn for turns in asyncio.run(turns_at_reads(kind, 4)) for turn in turns[1:]]
    assert len(later) == len(set(later)) == 28


def test_others_have_their_turn_while_one_part_is_looked_at() -> None:
    """Others have their turn after each `LOOK_BYTES` of it, however much comes in one part."""
    assert asyncio.run(turns_in_one_part(8 * LOOK_BYTES)) >= 7


async def turns_in_one_part(size_bytes: int) -> int:
    """How many turns another task has while a body of one part is received."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"]" * size_bytes, "more_body": False}

    async def app(scope: Any, receive: Any, _send: Any) -> None:
        await Request(scope, receive).body()

    async def send(_message: Any) -> None:
        return

    task = asyncio.create_task(others())
    await asyncio.sleep(0)
    limits, before = Limits(app, LimitSettings(), Refusals(), is_probe=lambda _: False), turns
    await limits({"type": "http", "headers": []}, receive, send)
    task.cancel()
    return turns - before


async def turns_at_reads(kind: str, count: int) -> list[list[int]]:
    """How many turns another task has had at each read of `count` bodies that come at once."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def turns_of_one() -> list[int]:
        found: list[int] = []

        async def receive() -> dict[str, Any]:
            found.append(turns)
            has_more = len(found) < 8
            if kind == "websocket" and has_more:
                return {"type": "websocket.receive", "text": "x" * PACE_BYTES}
            if kind == "websocket":
                return {"type": "websocket.disconnect"}
            return {"type": "http.request", "body": b"x" * PACE_BYTES, "more_body": has_more}

        headers = [(b"content-length", b"%d" % (8 * PACE_BYTES))]
        await limits({"type": kind, "headers": headers}, receive, send)
        return found

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        message = await receive()
        while message.get("more_body") or message["type"] == "websocket.receive":
            message = await receive()

    async def send(_message: Any) -> None:
        return

    task = asyncio.create_task(others())
    limits = Limits(app, LimitSettings(), Refusals(), is_probe=lambda _: False)
    found = await asyncio.gather(*(turns_of_one() for _ in range(count)))
    task.cancel()
    return list(found)


def test_a_head_of_an_error_has_no_body() -> None:
    """It is given the form all the same, for the headers."""
    answer = Limited().asked("HEAD", "/v1/no/such")
    assert (answer.status_code, answer.content) == (404, b"")
    assert answer.headers["content-type"] == "application/json"


def test_a_large_error_is_passed_on() -> None:
    """What is not kept in memory cannot be given another form."""
    answer = Limited().asked("GET", "/v1/large")
    assert (answer.status_code, len(answer.content)) == (418, 2 * SHAPED_BYTES)
