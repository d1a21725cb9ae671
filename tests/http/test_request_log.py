"""One line per request: its fields, the requests it omits, and the id in every answer."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import websockets
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from asgi_server import DEADLINE_SECONDS, serving
from holdfast.api.admission import PROBE_HEADER, Admission
from holdfast.api.gate import Gate
from holdfast.api.request_log import RequestLog
from holdfast.api.router import LateApp, OwnRoutes
from holdfast.engine.replay import ReplayManager
from holdfast.lifecycle.states import State
from holdfast.telemetry.counters import Refusals
from holdfast.telemetry.logs import JSONLines
from inner_app import InnerApp, View
from scripted_llm import PlainOutputs, ScriptedLLM

Lines = list[dict[str, Any]]
Ask = Callable[[httpx.AsyncClient], Awaitable[Any]]


class _Collector(logging.Handler):
    """Keeps every record."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def lines(self) -> Lines:
        """The fields of each line."""
        return [record.__dict__["fields"] for record in self.records]

    @property
    def texts(self) -> list[str]:
        """Each line as people read it."""
        return [record.getMessage() for record in self.records]

    async def until(self, count: int) -> None:
        """Return when this many lines are there: each is written after its answer."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len(self.records) < count:  # noqa: ASYNC110 - a logger tells nobody
                await asyncio.sleep(0.001)


@pytest.fixture
def log() -> Iterator[_Collector]:
    """What the request log writes."""
    logger = logging.getLogger("holdfast.requests")
    collector = _Collector()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(collector)
    yield collector
    logger.removeHandler(collector)
    logger.setLevel(level)


def _front(inner: Any, *, state: State = State.READY, **options: Any) -> RequestLog:
    async def healthz(_request: Request) -> Response:
        return JSONResponse({}, 200 if state is State.READY else 503)

    engine_app = LateApp()
    engine_app.attach(inner)
    admission = Admission(View(state), probe_token="a-token", refusals=Refusals())  # noqa: S106 - a test's
    gate = Gate(engine_app, admission)
    door = OwnRoutes([Route("/readyz", healthz)], gate, root_path="/prefix")
    return RequestLog(door, quiet_paths={"/readyz"}, **options)


def _asked(front: RequestLog, ask: Ask) -> Any:
    async def run() -> Any:
        async with serving(front) as client:
            return await ask(client)

    return asyncio.run(run())


def test_the_line_says_what_was_asked_and_answered(log: _Collector) -> None:
    """Method, route, status, size and times stand in one line; the query does not."""
    _asked(_front(InnerApp()), lambda client: client.post("/v1/whoami?secret=1", content=b"four"))
    [line] = log.lines
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/whoami", 200)
    assert line["body_bytes"] == len("inner 4")
    assert 0 <= line["wait_seconds"] <= line["first_byte_seconds"] <= line["duration_seconds"]
    assert not line["is_stream"]
    assert line["error"] is None
    assert line["client"] == "127.0.0.1"
    assert "secret" not in log.texts[0]


def test_every_field_is_documented(log: _Collector) -> None:
    """The operating guide explains the fields that there are, and no others."""
    _asked(_front(InnerApp()), lambda client: client.get("/v1/whoami"))
    guide = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    table = guide.partition("\n## The request log\n")[2].partition("\n## ")[0]
    names = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(names))) == set(log.lines[0])


def test_the_line_is_one_json_object(log: _Collector) -> None:
    """In the JSON form every field stands beside the message."""
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JSONLines())
    logger = logging.getLogger("holdfast.requests")
    logger.addHandler(handler)
    try:
        _asked(_front(InnerApp()), lambda client: client.get("/v1/whoami"))
    finally:
        logger.removeHandler(handler)
    record = json.loads(stream.getvalue())
    assert record.items() >= log.lines[0].items()
    assert re.match(r"GET /v1/whoami 200 in \d", record["message"])


def test_the_answer_carries_the_name_that_the_client_gave(log: _Collector) -> None:
    """The id comes back, stands in the line, and reaches vLLM's routes."""
    headers = {"X-Request-Id": "client-7"}
    answer = _asked(_front(InnerApp()), lambda client: client.get("/v1/headers", headers=headers))
    assert answer.headers.get_list("x-request-id") == ["client-7"]
    assert answer.json()["x-request-id"] == "client-7"
    assert log.lines[0]["request_id"] == "client-7"


def test_a_request_without_a_name_gets_one(log: _Collector) -> None:
    """Each its own; vLLM is left to choose its names, for which a body may ask."""

    async def twice(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await client.get("/v1/headers") for _ in range(2)]

    answers = _asked(_front(InnerApp()), twice)
    names = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(names)) == 2
    assert [line["request_id"] for line in log.lines] == names
    assert all("x-request-id" not in answer.json() for answer in answers)


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "caf\xe9", "tab\tbed"])
def test_a_name_that_no_line_should_hold_is_replaced(log: _Collector, name: str) -> None:
    """Blanks, other characters and length: neither the log nor vLLM sees them."""
    headers = [(b"x-request-id", name.encode("latin-1"))]
    answer = _asked(_front(InnerApp()), lambda client: client.get("/v1/headers", headers=headers))
    given = answer.headers["x-request-id"]
    assert given not in {name, ""}
    assert answer.json()["x-request-id"] == given
    assert log.lines[0]["request_id"] == given


def test_the_first_of_several_names_counts(log: _Collector) -> None:
    """What is logged is what vLLM gets, and nothing else."""
    headers = [("x-request-id", "one"), ("x-request-id", "two")]
    answer = _asked(_front(InnerApp()), lambda client: client.get("/v1/headers", headers=headers))
    assert answer.headers.get_list("x-request-id") == ["one"]
    assert answer.json()["x-request-id"] == "one"
    assert log.lines[0]["request_id"] == "one"


def test_two_at_once_with_one_name_have_two_within() -> None:
    """Both answers carry the name; vLLM can tell the requests apart, and reuse the name later."""
    seen: list[str] = []
    both = asyncio.Event()

    async def meet(request: Request) -> Response:
        seen.append(request.headers["x-request-id"])
        if len(seen) == 2:
            both.set()
        await asyncio.wait_for(both.wait(), DEADLINE_SECONDS)
        return Response()

    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        headers = {"x-request-id": "same"}
        pair = [client.get("/v1/meet", headers=headers) for _ in range(2)]
        return [*await asyncio.gather(*pair), await client.get("/v1/meet", headers=headers)]

    answers = _asked(_front(Starlette(routes=[Route("/v1/meet", meet)])), ask)
    assert [answer.headers["x-request-id"] for answer in answers] == ["same"] * 3
    assert sorted(seen)[:2] == ["same", "same"]
    assert seen[2] == "same"
    assert len(set(seen[:2])) == 2
    assert all(name.startswith("same") for name in seen)


def test_the_name_of_the_application_gives_way_to_ours(log: _Collector) -> None:
    """With `--enable-request-id-headers` vLLM would add one of its own."""

    async def named(_request: Request) -> Response:
        return Response(headers={"X-Request-Id": "of vLLM"})

    front = _front(Starlette(routes=[Route("/v1/named", named)]))
    answer = _asked(front, lambda client: client.get("/v1/named"))
    assert answer.headers.get_list("x-request-id") == [log.lines[0]["request_id"]]


def test_a_refusal_has_a_name_and_a_reason(log: _Collector) -> None:
    """What the gate turns away is answered and written down like the rest."""
    front = _front(InnerApp(), state=State.STARTING)
    answer = _asked(front, lambda client: client.get("/v1/whoami"))
    [line] = log.lines
    assert answer.status_code == line["status"] == 503
    assert answer.headers["x-request-id"] == line["request_id"]
    assert line["error"] == "service_unavailable"
    assert line["wait_seconds"] is None


def test_a_failure_is_answered_with_its_name(log: _Collector) -> None:
    """An exception that nobody caught is an OpenAI error with the id that the log has."""

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        del scope, receive, send
        raise RuntimeError("on purpose")

    answer = _asked(_front(fails), lambda client: client.get("/v1/whoami"))
    [line] = log.lines
    assert answer.status_code == line["status"] == 500
    assert answer.headers["x-request-id"] == line["request_id"]
    assert answer.json()["error"]["type"] == line["error"] == "server_error"
    assert "purpose" not in answer.text


@pytest.mark.parametrize("state", [State.READY, State.STARTING])
def test_expected_answers_of_health_checks_are_not_logged(log: _Collector, state: State) -> None:
    """200 and 503 are what a probe asks for every few seconds."""
    front = _front(InnerApp(), state=state)
    _asked(front, lambda client: client.get("/prefix/readyz/"))
    assert log.lines == []


def test_unexpected_answers_of_health_checks_are_logged(log: _Collector) -> None:
    """A wrong method is a mistake of the operator."""
    _asked(_front(InnerApp()), lambda client: client.delete("/readyz"))
    assert [line["status"] for line in log.lines] == [405]


def test_the_probe_is_not_logged(log: _Collector) -> None:
    """What it asks is in its report."""
    headers = {PROBE_HEADER: "a-token"}
    front = _front(InnerApp(), state=State.PROBING)
    answer = _asked(front, lambda client: client.get("/v1/whoami", headers=headers))
    assert answer.status_code == 200
    assert log.lines == []


@pytest.mark.parametrize("options", [{"is_on": False}, {"silent_paths": ["/v1/whoami"]}])
def test_nothing_is_logged_where_nobody_wants_it(log: _Collector, options: Any) -> None:
    """The answer has its name all the same."""
    answer = _asked(_front(InnerApp(), **options), lambda client: client.get("/v1/whoami"))
    assert answer.headers["x-request-id"]
    assert log.lines == []


def test_a_route_is_logged_without_its_parameters(log: _Collector) -> None:
    """All requests of a route count as one."""

    async def one(_request: Request) -> Response:
        return Response()

    front = _front(Starlette(routes=[Route("/v1/responses/{response_id}", one)]))
    _asked(front, lambda client: client.get("/v1/responses/resp_123"))
    assert log.lines[0]["route"] == "/v1/responses/{response_id}"


def test_a_path_cannot_forge_a_line(log: _Collector) -> None:
    """An unknown path is logged shortened and quoted, so that no terminal obeys it."""
    path = "/no%0AGET%20/admin%20200%1B[31m" + "x" * 300
    _asked(_front(InnerApp()), lambda client: client.get(path))
    [text] = log.texts
    assert text.startswith("GET /no%0AGET%20/admin%20200%1B%5B31mxxx")
    assert "xxx... 404 " in text
    assert len(text) < 300


def test_a_stream_is_logged_when_it_ends(log: _Collector) -> None:
    """It is known as a stream, with the time of its first byte apart from that of its end."""

    async def stream(_request: Request) -> Response:
        async def chunks() -> AsyncIterator[str]:
            yield "data: 1\n\n"
            await asyncio.sleep(0.02)
            yield "data: 2\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    front = _front(Starlette(routes=[Route("/v1/stream", stream)]))
    _asked(front, lambda client: client.get("/v1/stream"))
    [line] = log.lines
    assert line["is_stream"]
    assert line["body_bytes"] == len("data: 1\n\ndata: 2\n\n")
    assert line["duration_seconds"] > line["first_byte_seconds"]


def test_an_answer_that_fails_in_the_middle_is_broken(log: _Collector) -> None:
    """The status has gone out already; the line says that the rest did not."""

    async def fail(_request: Request) -> Response:
        async def chunks() -> AsyncIterator[str]:
            yield "data: 1\n\n"
            raise RuntimeError("on purpose")

        return StreamingResponse(chunks(), media_type="text/event-stream")

    async def ask(client: httpx.AsyncClient) -> None:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/v1/fail")

    _asked(_front(Starlette(routes=[Route("/v1/fail", fail)])), ask)
    [line] = log.lines
    assert (line["status"], line["is_broken"]) == (200, True)


def test_a_client_that_leaves_is_noted(log: _Collector) -> None:
    """In the middle of a stream, which keeps the status that it began with."""
    inner = InnerApp()

    async def leave(client: httpx.AsyncClient) -> None:
        async with client.stream("GET", "/v1/stream") as response:
            async for _ in response.aiter_bytes():
                break
        await log.until(1)

    _asked(_front(inner), leave)
    [line] = log.lines
    assert line["has_client_left"]
    assert line["status"] == 200


def test_a_client_that_leaves_before_the_answer_has_the_status_499(log: _Collector) -> None:
    """It has seen no status."""
    entered = asyncio.Event()

    async def wait(request: Request) -> Response:
        entered.set()
        while (await request.receive())["type"] != "http.disconnect":
            pass
        return Response()

    async def leave(client: httpx.AsyncClient) -> None:
        address = urlsplit(str(client.base_url))
        with socket.create_connection((address.hostname, address.port)) as sock:
            sock.sendall(b"GET /v1/wait HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.wait_for(entered.wait(), DEADLINE_SECONDS)
        await log.until(1)

    _asked(_front(Starlette(routes=[Route("/v1/wait", wait)])), leave)
    [line] = log.lines
    assert line["has_client_left"]
    assert line["status"] == 499


def test_a_websocket_has_one_line_too(log: _Collector) -> None:
    """With the name in the handshake and the code that it was closed with."""

    async def talk(client: httpx.AsyncClient) -> Any:
        url = str(client.base_url).replace("http", "ws") + "/v1/realtime"
        async with websockets.connect(url, additional_headers={"x-request-id": "ws-1"}) as sock:
            assert await sock.recv() == "hello"
            headers = sock.response.headers if sock.response else {}
        await log.until(1)
        return headers

    headers = _asked(_front(InnerApp()), talk)
    [line] = log.lines
    assert headers["x-request-id"] == line["request_id"] == "ws-1"
    assert (line["method"], line["status"], line["close_code"]) == ("WEBSOCKET", 101, 1000)


def test_a_refused_websocket_is_logged_with_its_code(log: _Collector) -> None:
    """The gate accepts it only to close it with 1013."""

    async def knock(client: httpx.AsyncClient) -> None:
        url = str(client.base_url).replace("http", "ws") + "/v1/realtime"
        async with websockets.connect(url) as sock:
            with pytest.raises(websockets.ConnectionClosed):
                await sock.recv()
        await log.until(1)

    _asked(_front(InnerApp(), state=State.STARTING), knock)
    assert log.lines[0]["close_code"] == 1013


def test_the_line_has_what_the_engine_did(log: _Collector) -> None:
    """It has the tokens, the generation that answered, the wait for it and the replays."""
    requests = ReplayManager(PlainOutputs())
    dying, living = ScriptedLLM(), ScriptedLLM(answers=3)
    dying.hold()

    async def ask_engine(_request: Request) -> Response:
        arguments = {"prompt": "hold", "request_id": "cmpl-1"}
        made = [output async for output in requests.run("generate", arguments)]
        return Response(str(len(made)))

    async def ask(client: httpx.AsyncClient) -> None:
        requests.engine_started(dying, 1)
        requests.open()
        answer = asyncio.create_task(client.get("/v1/ask"))
        await dying.until_received(1)
        requests.engine_ended()
        dying.die()
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not requests.held:  # noqa: ASYNC110 - the loop is all there is
                await asyncio.sleep(0)
        requests.engine_started(living, 2)
        requests.open()
        assert (await answer).text == "3"

    _asked(_front(Starlette(routes=[Route("/v1/ask", ask_engine)])), ask)
    [line] = log.lines
    assert (line["prompt_tokens"], line["output_tokens"]) == (1, 3)
    assert (line["generation"], line["replays"]) == (2, 1)
    assert line["continued_at_tokens"] is None
    assert line["engine_request_id"] == "cmpl-1"
    assert line["wait_seconds"] > 0
    assert "tokens=1+3 generation=2 replays=1" in log.texts[0]


def test_the_line_says_where_a_stream_went_on(log: _Collector) -> None:
    """After how many tokens, for each time; it is not a replay."""
    requests = ReplayManager(PlainOutputs())
    engines = [ScriptedLLM(answers=4) for _ in range(3)]

    async def ask_engine(_request: Request) -> Response:
        arguments = {"prompt": "hold", "request_id": "cmpl-1", "is_continuable": True}
        requests.engine_started(engines[0], 1)
        requests.open()
        made = []
        async for output in requests.run("generate", arguments):
            made.append(output.tokens)
            if len(made) < len(engines):  # it dies before the next token
                requests.engine_ended()
                engines[len(made) - 1].die()
                requests.engine_started(engines[len(made)], len(made) + 1)
                requests.open()
        return Response(str(made))

    async def ask(client: httpx.AsyncClient) -> None:
        assert (await client.get("/v1/ask")).text == "[1, 2, 3, 4]"

    _asked(_front(Starlette(routes=[Route("/v1/ask", ask_engine)])), ask)
    [line] = log.lines
    assert (line["generation"], line["replays"], line["output_tokens"]) == (3, 0, 4)
    assert line["continued_at_tokens"] == [1, 2]
    assert "generation=3 continued_at_tokens=1,2 " in log.texts[0]
