"""What a connection may ask: bytes, time and number, refused as OpenAI's clients read it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from echo_app import (
    CHUNKED,
    GET,
    HOUR_SECONDS,
    KIB,
    POST,
    UNREACHED_SECONDS,
    App,
    exchange,
    run_scene,
)
from holdfast.errors import UsageError
from holdfast.listener import bounded_connection, connection_table
from holdfast.listener.connection_table import SPARE_CONNECTIONS
from holdfast.settings import LimitSettings
from listening import DEADLINE_SECONDS, LOCAL, Answer, Listening, Wire, until_set


def chunk(content: bytes) -> bytes:
    """A chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(content), content)


REFUSED = {
    "a long URL": (b"GET /" + b"x" * KIB + b" HTTP/1.1\r\n", 414, "url_too_long"),
    "a URL without end": (b"GET /" + b"x" * 300 * KIB, 414, "url_too_long"),
    "many headers": (GET + b"a: b\r\n" * 10 + b"\r\n", 431, "too_many_headers"),
    "a large header": (GET + b"a: " + b"b" * 2 * KIB + b"\r\n\r\n", 431, "headers_too_large"),
    "large headers": (GET + (b"a: " + b"b" * KIB + b"\r\n") * 3, 431, "headers_too_large"),
    "a header without end": (GET + b"a: " + b"b" * 600 * KIB, 431, "headers_too_large"),
    "a declared body": (POST + b"Content-Length: 65537\r\n\r\n", 413, "body_too_large"),
    "a huge declared body": (POST + b"Content-Length: 1073741824\r\n\r\nx", 413, "body_too_large"),
    "a body in chunks": (CHUNKED + chunk(b"x" * 8000) * 9, 413, "body_too_large"),
    "one large chunk": (CHUNKED + b"40000000\r\n" + b"x" * 65537, 413, "body_too_large"),
    "a chunk extension without end": (
        CHUNKED + b"1;" + b"x" * 600 * KIB,
        431,
        "headers_too_large",
    ),
    "a trailer without end": (
        CHUNKED + b"0\r\na: " + b"x" * 600 * KIB,
        431,
        "headers_too_large",
    ),
    "no HTTP": (b"\x16\x03\x01 hello\r\n\r\n", 400, "malformed"),
    "another protocol": (b"GET / HTTP/7.3\r\n\r\n", 400, "malformed"),
    "a negative length": (POST + b"Content-Length: -1\r\n\r\n", 400, "malformed"),
    "a length of words": (POST + b"Content-Length: five\r\n\r\n", 400, "malformed"),
    "a length beyond numbers": (
        POST + b"Content-Length: 9" + b"9" * 40 + b"\r\n\r\n",
        400,
        "malformed",
    ),
    "two lengths": (
        POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        400,
        "malformed",
    ),
    "a length and chunks": (
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
        "malformed",
    ),
    "a bad chunk": (CHUNKED + b"zz\r\n", 400, "malformed"),
    "a bad header": (GET + b"no colon\r\n\r\n", 400, "malformed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_over_a_limit_is_answered_and_the_connection_closed(case: str) -> None:
    """One answer, in OpenAI's form, with the status of the limit; it is counted once."""
    sent, status, reason = REFUSED[case]
    answer, refused, rest = exchange(sent)
    assert answer.status == status
    assert answer.headers["connection"] == "close"
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert len(answer.headers["x-request-id"]) == 32
    assert (answer.error["type"], answer.error["code"]) == ("invalid_request_error", status)
    assert (refused, rest) == ({reason: 1}, b"")


@pytest.mark.parametrize(
    ("name", "is_kept"), [(b"client-7", True), (b"a b", False), (b"x" * 129, False)]
)
def test_a_refusal_carries_the_name_that_the_client_gave(name: bytes, *, is_kept: bool) -> None:
    """If it was read, and a line of the log may hold it; otherwise a new one."""
    named = POST + b"X-Request-Id: " + name + b"\r\nContent-Length: 65537\r\n\r\n"
    answer, _, _ = exchange(named)
    assert (answer.headers["x-request-id"] == name.decode()) is is_kept


@pytest.mark.parametrize("case", REFUSED)
def test_the_same_byte_by_byte(case: str) -> None:
    """However the bytes are cut, the limit is the same."""
    sent, status, reason = REFUSED[case]
    head, tail = sent[:400], sent[400:]
    answer, refused, _ = exchange(*(bytes([byte]) for byte in head), tail)
    assert (answer.status, refused) == (status, {reason: 1})


ALLOWED = {
    "a URL": GET.replace(b"/v1/echo", b"/v1/echo?" + b"x" * (KIB - 9)) + b"\r\n",
    "headers": GET + b"a: b\r\n" * 9 + b"\r\n",
    "header bytes": GET + b"a: " + b"b" * (2 * KIB - 6) + b"\r\n\r\n",
    "a declared body": POST + b"Content-Length: 65536\r\n\r\n" + b"x" * 65536,
    "a body in chunks": CHUNKED + chunk(b"x" * 8192) * 8 + b"0\r\n\r\n",
    "a body in the smallest chunks": CHUNKED + chunk(b"x") * 20_000 + b"0\r\n\r\n",
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_is_at_a_limit_is_let_in(case: str) -> None:
    """A limit is the largest that is allowed, and the connection goes on."""

    async def scene(server: Listening) -> list[int]:
        async with server.wire() as wire:
            statuses = []
            for _ in range(2):
                await wire.send(ALLOWED[case])
                statuses.append((await wire.answer()).status)
            return statuses

    assert run_scene(scene) == [200, 200]


def test_a_refused_head_has_no_body() -> None:
    """HEAD is answered with headers alone."""

    async def scene(server: Listening) -> bytes:
        async with server.wire() as wire:
            await wire.send(b"HEAD /" + b"x" * KIB + b" HTTP/1.1\r\n\r\n")
            return await wire.rest()

    answer: bytes = run_scene(scene)
    assert answer.startswith(b"HTTP/1.1 414 ")
    assert answer.endswith(b"\r\n\r\n")


def test_a_request_in_the_application_is_told_that_its_client_is_gone() -> None:
    """A body that turns out too large leaves nothing at work."""
    app = App()

    async def scene(server: Listening) -> int:
        async with server.wire() as wire:
            await wire.send(CHUNKED, chunk(b"x"))
            await until_set(app.entered)
            await wire.send(chunk(b"x" * 8000) * 9)
            status = (await wire.answer()).status
            await until_set(app.left)
            return status

    assert run_scene(scene, app=app) == 413


def test_an_answer_that_has_begun_is_cut() -> None:
    """What is refused in the middle of its answer does not get a second one, nor a clean end."""
    app = App()

    async def scene(server: Listening) -> tuple[bytes, dict[str, int]]:
        async with server.wire() as wire:
            await wire.send(CHUNKED.replace(b"echo", b"stream"), chunk(b"x"))
            begun = await wire.reader.readuntil(b"begun\r\n")
            await wire.send(chunk(b"x" * 8000) * 9)
            return begun + await wire.rest(), server.refused

    answer, refused = run_scene(scene, app=app)
    assert answer.count(b"HTTP/1.1") == 1
    assert not answer.endswith(b"0\r\n\r\n")
    assert refused == {"body_too_large": 1}


@pytest.mark.parametrize(("when", "status"), [("before", 500), ("after", 200)])
def test_a_connection_lasts_though_the_application_raises(when: str, status: int) -> None:
    """The answer is complete, and has not announced that the connection would be closed."""

    async def scene(server: Listening) -> tuple[Answer, Answer]:
        async with server.wire() as wire:
            broken = b"/v1/broken?when=" + when.encode()
            await wire.send(GET.replace(b"/v1/echo", broken) + b"\r\n")
            first = await wire.answer()
            await wire.send(GET + b"\r\n")
            return first, await wire.answer()

    first, second = run_scene(scene)
    assert (first.status, second.status) == (status, 200)
    assert "connection" not in first.headers


def test_an_answer_in_which_the_application_raises_is_cut() -> None:
    """Its client must not take it for complete."""

    async def scene(server: Listening) -> bytes:
        async with server.wire() as wire:
            await wire.send(GET.replace(b"/v1/echo", b"/v1/broken?when=during") + b"\r\n")
            return await wire.rest()

    answer: bytes = run_scene(scene)
    assert answer.endswith(b"begun\r\n")


def test_a_body_that_nobody_reads_is_bounded_too() -> None:
    """A client that got its answer and sends on without end is disconnected without a word."""

    async def scene(server: Listening) -> tuple[Answer, bytes, dict[str, int]]:
        async with server.wire() as wire:
            await wire.send(CHUNKED.replace(b"echo", b"deaf"), chunk(b"x"))
            answer = await wire.answer()
            await wire.send(chunk(b"x" * 8000) * 9)
            return answer, await wire.rest(), server.refused

    answer, rest, refused = run_scene(scene)
    assert (answer.body, rest, refused) == (b"deaf", b"", {"body_too_large": 1})


def test_an_earlier_request_has_its_answer_first() -> None:
    """What is refused behind it in the same connection closes that, and mixes nothing up."""
    app = App()

    async def scene(server: Listening) -> tuple[Answer, bytes, dict[str, int]]:
        async with server.wire() as wire:
            await wire.send(GET.replace(b"echo", b"held") + b"\r\n")
            await until_set(app.entered)
            await wire.send(GET + b"\r\n" + b"\0garbage\r\n\r\n")
            await server.until_refused("malformed")
            app.released.set()
            return await wire.answer(), await wire.rest(), server.refused

    answer, rest, refused = run_scene(scene, app=app)
    assert (answer.body, answer.headers["connection"]) == (b"held", "close")
    assert (rest, refused) == (b"", {"malformed": 1})


def test_requests_sent_at_once_are_answered_in_order() -> None:
    """Pipelining works as it does without limits."""

    async def scene(server: Listening) -> list[int]:
        async with server.wire() as wire:
            await wire.send((GET + b"\r\n") * 20)
            return [(await wire.answer()).status for _ in range(20)]

    assert run_scene(scene) == [200] * 20


def test_a_trailer_is_no_header() -> None:
    """What comes after the body was looked at by nobody, and is not taken for what was."""

    async def scene(server: Listening) -> Answer:
        async with server.wire() as wire:
            await wire.send(CHUNKED + b"0\r\nX-Late: yes\r\n\r\n")
            return await wire.answer()

    assert b"x-late" not in run_scene(scene).body


def test_a_client_that_sends_it_all_first_gets_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it still sends when it is refused does not cost it the answer."""
    monkeypatch.setattr(bounded_connection, "MAX_LINGER_SECONDS", DEADLINE_SECONDS)

    async def scene(server: Listening) -> list[int]:
        url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_SECONDS) as client:
            parts = (b"x" * KIB for _ in range(20_000))
            declared = await client.post("/v1/echo", content=b"x" * 20_000_000)
            streamed = await client.post("/v1/echo", content=_each(parts))
            return [declared.status_code, streamed.status_code]

    assert run_scene(scene) == [413, 413]


def test_a_blocked_loop_does_not_cost_a_client_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came while nobody could read it shows that the client is still sending."""
    monkeypatch.setattr(connection_table, "LINGER_SECONDS", 0.5)

    async def scene(server: Listening) -> int:
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(POST + b"Content-Length: 1073741824\r\n\r\nx")
            await server.until_refused("body_too_large")
            (connection,) = server.server.server_state.connections
            sock.sendall(b"x")
            async with asyncio.timeout(DEADLINE_SECONDS):
                while not connection.flow.read_paused:  # noqa: ASYNC110 - nobody is told of it
                    await asyncio.sleep(0)
            sock.sendall(b"x")
            _block(1.0)
            for _ in range(10):
                await asyncio.sleep(0)
            return server.connections

    assert run_scene(scene) == 1


def _block(seconds: float) -> None:
    time.sleep(seconds)


async def _each(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def test_a_client_that_expects_100_continue_is_refused_without_it() -> None:
    """`Expect: 100-continue` saves the body that is too large."""
    announced = POST + b"Expect: 100-continue\r\nContent-Length: 65537\r\n\r\n"
    answer, refused, _ = exchange(announced)
    assert (answer.status, refused) == (413, {"body_too_large": 1})


def test_slow_headers_are_cut_off() -> None:
    """A client whose headers do not end in time gets 408, however often a byte comes."""

    async def scene(server: Listening) -> tuple[int, dict[str, int]]:
        async with server.wire() as wire:
            await wire.send(GET)
            dripping = asyncio.create_task(_drip(wire, b"a: b\r\n"))
            answer = await wire.answer()
            dripping.cancel()
            return answer.status, server.refused

    limits = LimitSettings(header_timeout_seconds=0.2, max_headers=100_000)
    assert run_scene(scene, limits) == (408, {"slow_headers": 1})


def test_slow_headers_after_an_answer_are_cut_off() -> None:
    """A connection that is kept alive has no more time than a new one."""

    async def scene(server: Listening) -> tuple[int, dict[str, int]]:
        async with server.wire() as wire:
            await wire.send(GET + b"\r\n" + GET)
            await wire.answer()
            dripping = asyncio.create_task(_drip(wire, b"a: b\r\n"))
            answer = await wire.answer()
            dripping.cancel()
            return answer.status, server.refused

    limits = LimitSettings(header_timeout_seconds=0.2, max_headers=100_000)
    assert run_scene(scene, limits) == (408, {"slow_headers": 1})


def test_a_connection_that_says_nothing_is_closed() -> None:
    """Without an answer, since nothing was asked."""

    async def scene(server: Listening) -> tuple[bytes, dict[str, int]]:
        async with server.wire() as wire:
            return await wire.rest(), server.refused

    limits = LimitSettings(header_timeout_seconds=0.1)
    assert run_scene(scene, limits) == (b"", {"idle_connection": 1})


def test_a_connection_is_kept_alive_so_long_and_no_longer() -> None:
    """The timeout between requests is the flag's, and its end is not a refusal."""

    async def scene(server: Listening) -> tuple[int, bytes, dict[str, int]]:
        async with server.wire() as wire:
            await wire.send(GET + b"\r\n")
            return (await wire.answer()).status, await wire.rest(), server.refused

    assert run_scene(scene, LimitSettings(keep_alive_timeout_seconds=0.1)) == (200, b"", {})


async def _drip(wire: Wire, content: bytes) -> None:
    while True:
        await wire.send(content)
        await asyncio.sleep(0.01)


def test_a_slow_body_is_cut_off() -> None:
    """A body that arrives byte by byte gets 408, however often a byte comes."""

    async def scene(server: Listening) -> tuple[int, dict[str, int]]:
        async with server.wire() as wire:
            await wire.send(CHUNKED)
            dripping = asyncio.create_task(_drip(wire, chunk(b"x")))
            answer = await wire.answer()
            dripping.cancel()
            return answer.status, server.refused

    assert run_scene(scene, LimitSettings(body_timeout_seconds=0.3)) == (408, {"slow_body": 1})


def test_a_long_body_that_comes_well_is_let_in() -> None:
    """The timeout is of a rate, not of the whole body."""

    async def scene(server: Listening) -> tuple[int, dict[str, int]]:
        async with server.wire() as wire:
            await wire.send(CHUNKED)
            for _ in range(60):
                await wire.send(chunk(b"x" * KIB))
                await asyncio.sleep(0.05)
            await wire.send(b"0\r\n\r\n")
            return (await wire.answer()).status, server.refused

    assert run_scene(scene, LimitSettings(body_timeout_seconds=UNREACHED_SECONDS)) == (200, {})


def test_a_body_that_the_application_does_not_read_is_not_slow() -> None:
    """Who waits to be let in is not blamed for it."""
    app = App()

    async def scene(server: Listening) -> tuple[bytes, dict[str, int]]:
        async with server.wire() as wire:
            body = b"x" * 4_000_000
            wire.writer.write(
                POST.replace(b"echo", b"held") + b"Content-Length: 4000000\r\n\r\n" + body
            )
            await until_set(app.entered)
            await asyncio.sleep(1.5)
            app.released.set()
            return (await wire.answer()).body, server.refused

    assert run_scene(scene, LimitSettings(body_timeout_seconds=1.0), app) == (b"held", {})


def test_a_client_that_does_not_read_is_cut_off() -> None:
    """So that the application is told, which may hold a place in the engine for the answer."""
    app = App()

    async def scene(server: Listening) -> dict[str, int]:
        async with server.wire() as wire:
            await wire.send(GET.replace(b"echo", b"flood") + b"\r\n")
            await until_set(app.left)
            return server.refused

    assert run_scene(scene, LimitSettings(send_timeout_seconds=0.2), app) == {"slow_reader": 1}


def test_a_client_that_reads_slowly_but_steadily_is_not_cut_off() -> None:
    """The time starts again whenever the ready bytes have been read."""
    app = App()

    async def scene(server: Listening) -> dict[str, int]:
        async with server.wire() as wire:
            await wire.send(GET.replace(b"echo", b"flood") + b"\r\n")
            for _ in range(60):
                await wire.reader.readexactly(1024 * KIB)
                await asyncio.sleep(0.05)
            return server.refused

    assert run_scene(scene, LimitSettings(send_timeout_seconds=UNREACHED_SECONDS), app) == {}


def test_times_of_zero_are_no_limits() -> None:
    """Without a timeout no client is cut off."""

    async def scene(server: Listening) -> tuple[int, dict[str, int]]:
        async with server.wire() as wire:
            await wire.send(POST)
            await asyncio.sleep(0.1)
            await wire.send(b"Content-Length: 1\r\n\r\n")
            await asyncio.sleep(0.1)
            await wire.send(b"x")
            return (await wire.answer()).status, server.refused

    limits = LimitSettings(header_timeout_seconds=0, body_timeout_seconds=0)
    assert run_scene(scene, limits) == (200, {})


FEW = LimitSettings(
    max_connections=2, header_timeout_seconds=HOUR_SECONDS, keep_alive_timeout_seconds=HOUR_SECONDS
)


async def _busy(app: App, wire: Wire) -> None:
    app.entered.clear()
    await wire.send(GET.replace(b"echo", b"held") + b"\r\n")
    await until_set(app.entered)


def test_a_connection_too_many_is_answered_503() -> None:
    """When all are at work a further one is told when to come back."""
    app = App()

    async def scene(server: Listening) -> tuple[Answer, dict[str, int]]:
        async with server.wire() as one, server.wire() as two:
            await _busy(app, one)
            await _busy(app, two)
            async with server.wire() as three:
                await three.send(GET + b"\r\n")
                answer = await three.answer()
            app.released.set()
            assert [(await wire.answer()).body for wire in (one, two)] == [b"held", b"held"]
            return answer, server.refused

    answer, refused = run_scene(scene, FEW, app)
    assert (answer.status, refused) == (503, {"too_many_connections": 1})
    assert answer.error["type"] == "service_unavailable"
    assert (answer.headers["retry-after"], answer.headers["x-should-retry"]) == ("5", "true")


ROOTED = replace(LOCAL, root_path="/under/a/root")


@pytest.mark.parametrize(
    "path",
    [
        *(b"/livez", b"/livez/", b"/livez?x", b"http://localhost/livez"),
        *(b"/under/a/root/livez", b"/under/a/root/metrics/routing/?x"),
    ],
)
@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_health_is_answered_over_the_limit(method: bytes, path: bytes) -> None:
    """An orchestrator that asks when all connections are at work gets its answer."""
    answer, refused = _over_the_limit(method + b" " + path + b" HTTP/1.1\r\n\r\n")
    assert answer.status in ({404} if b"root" in path else {200, 307})
    assert (answer.headers["connection"], refused) == ("close", {})


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/chat/livez HTTP/1.1\r\n\r\n",
        b"GET /under/a/livez HTTP/1.1\r\n\r\n",
        b"GET /under/a/root/v1/livez HTTP/1.1\r\n\r\n",
        b"GET /routing HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /livez HTTP/1.1\r\n\r\n",
        b"POST /v1/chat/livez HTTP/1.1\r\nContent-Length: 65000\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nContent-Length: 65000\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_nothing_else_is_answered_over_the_limit(head: bytes) -> None:
    """Neither a path that only ends like one for health, nor a body that may drip for hours."""
    answer, refused = _over_the_limit(head)
    assert (answer.status, refused) == (503, {"too_many_connections": 1})


def _over_the_limit(head: bytes) -> tuple[Answer, dict[str, int]]:
    """The answer to a request when all connections are at work, and what was refused."""
    app = App()

    async def scene(server: Listening) -> tuple[Answer, dict[str, int]]:
        async with server.wire() as one, server.wire() as two:
            await _busy(app, one)
            await _busy(app, two)
            async with server.wire() as three:
                await three.send(head)
                answer = await three.answer(has_body=not head.startswith(b"HEAD"))
            app.released.set()
            return answer, server.refused

    answered: tuple[Answer, dict[str, int]] = run_scene(scene, FEW, app, ROOTED)
    return answered


def test_a_connection_over_those_for_health_is_closed() -> None:
    """However many come, each costs little and none stays."""
    app = App()

    async def scene(server: Listening) -> tuple[int, dict[str, int]]:
        async with server.wire() as one, server.wire() as two:
            await _busy(app, one)
            await _busy(app, two)
            others = [
                await asyncio.open_connection("127.0.0.1", server.port)
                for _ in range(2 * SPARE_CONNECTIONS)
            ]
            await server.until_refused("idle_connection")
            for _, writer in others:
                writer.transport.abort()
            await server.until_connections(2)
            app.released.set()
            return (await one.answer()).status, server.refused

    status, refused = run_scene(scene, FEW, app)
    assert status == 200
    assert set(refused) <= {"idle_connection", "too_many_connections"}


def test_an_idle_connection_makes_room() -> None:
    """The connection that has been without a request for the longest is closed for a new one."""

    async def scene(server: Listening) -> tuple[bytes, list[int], dict[str, int]]:
        async with server.wire() as one, server.wire() as two:
            for wire in (one, two, one):
                await wire.send(GET + b"\r\n")
                await wire.answer()
            async with server.wire() as three:
                gone = await two.rest()
                statuses = []
                for wire in (one, three):
                    await wire.send(GET + b"\r\n")
                    statuses.append((await wire.answer()).status)
                return gone, statuses, server.refused

    assert run_scene(scene, FEW) == (b"", [200, 200], {})


def test_a_connection_that_says_nothing_makes_room() -> None:
    """Silent connections cannot shut anybody out."""

    async def scene(server: Listening) -> tuple[int, dict[str, int]]:
        async with server.wire() as one, server.wire(), server.wire() as three:
            await three.send(GET + b"\r\n")
            status = (await three.answer()).status
            await one.rest()
            return status, server.refused

    assert run_scene(scene, FEW) == (200, {"idle_connection": 1})


def test_a_slow_connection_makes_room() -> None:
    """Nor can connections that never finish their headers, which are told so."""

    async def scene(server: Listening) -> tuple[int, int, dict[str, int]]:
        async with server.wire() as one, server.wire() as two:
            await one.send(GET)
            await two.send(GET)
            await server.until_connections(2)
            async with server.wire() as three:
                await three.send(GET + b"\r\n")
                return (await three.answer()).status, (await one.answer()).status, server.refused

    assert run_scene(scene, FEW) == (200, 503, {"too_many_connections": 1})


def test_a_websocket_is_a_connection() -> None:
    """It counts as long as it is open, and is refused like any other."""
    app = App()

    async def scene(server: Listening) -> tuple[int, dict[str, int]]:
        url = f"ws://127.0.0.1:{server.port}/v1/realtime"
        async with connect(url) as one, connect(url):
            with pytest.raises(InvalidStatus) as refused:
                await connect(url)
            await one.send("leave")
            await one.wait_closed()
            await server.until_connections(1)
            async with connect(url):
                return refused.value.response.status_code, server.refused

    assert run_scene(scene, FEW, app) == (503, {"too_many_connections": 1})


def test_a_websocket_is_not_cut_for_being_silent() -> None:
    """The timeouts of headers and bodies end with its handshake."""
    app = App()

    async def scene(server: Listening) -> dict[str, int]:
        async with connect(f"ws://127.0.0.1:{server.port}/v1/realtime") as one:
            await asyncio.sleep(1.5)
            await one.send("leave")
            await one.wait_closed()
            assert one.close_code == 1000
            return server.refused

    limits = LimitSettings(header_timeout_seconds=1.0, body_timeout_seconds=1.0)
    assert run_scene(scene, limits, app) == {}


def test_a_client_that_leaves_is_told_to_the_request_that_runs() -> None:
    """Also when the connection has sent a further request already."""
    app = App()

    async def scene(server: Listening) -> bool:
        async with server.wire() as wire:
            await wire.send(GET.replace(b"echo", b"abandoned") + b"\r\n", GET + b"\r\n")
            await until_set(app.entered)
            was_told_early = app.left.is_set()
        await until_set(app.left)
        await server.until_connections(0)
        return was_told_early

    assert not run_scene(scene, app=app)


def test_more_connections_than_open_files_are_refused_at_once() -> None:
    """The error names the limit and how to raise it."""
    with pytest.raises(UsageError, match="may open") as caught:
        connection_table.connection_limit(900_000_000)
    assert "ulimit" in caught.value.remedy


def test_without_a_number_there_is_room_for_many() -> None:
    """As many as this process may open, with some left for the rest."""
    assert 0 < connection_table.connection_limit(None) <= connection_table.DEFAULT_MAX_CONNECTIONS
