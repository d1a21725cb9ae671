"""Offers of another protocol: a WebSocket is taken up or refused, everything else is ignored."""

from __future__ import annotations

import pytest

from echo_app import GET, HOUR_SECONDS, App, exchange, run_scene
from holdfast.settings import LimitSettings
from listening import Listening, until_set

OFFER = (
    b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)
"""As Java's HTTP client has it in the first request of a connection."""
BODY = b'GET /v1/deaf HTTP/1.1\r\nHost: x\r\n\r\n{"model": "m"}'
"""Which could be taken for a request of its own."""
SIZED = OFFER + b"Content-Length: %d\r\n\r\n" % len(BODY)
IN_CHUNKS = OFFER + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SOCKET = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)

SENT = {
    "in one segment": (SIZED + BODY,),
    "in two": (SIZED, BODY),
    "byte by byte": tuple(bytes([byte]) for byte in SIZED + BODY),
    "in chunks": (IN_CHUNKS + CHUNKS,),
    "in chunks, later": (IN_CHUNKS, CHUNKS),
    "in chunks, byte by byte": tuple(bytes([byte]) for byte in IN_CHUNKS + CHUNKS),
}


@pytest.mark.parametrize("case", SENT)
def test_an_offer_that_is_not_taken_up_is_ignored(case: str) -> None:
    """The body arrives whole, is not taken for a request, and the connection goes on."""

    async def scene(server: Listening) -> tuple[int, int, int, dict[str, int]]:
        async with server.wire() as wire:
            await wire.send(*SENT[case])
            first = await wire.answer()
            await wire.send(GET + b"\r\n")
            second = await wire.answer()
            size = int(first.body.split(b":")[1].split(b",")[0])
            assert b"upgrade" not in first.body
            assert b"http2-settings" not in first.body
            return first.status, size, second.status, server.refused

    assert run_scene(scene) == (200, len(BODY), 200, {})


def test_an_offer_that_waits_for_leave_gets_it() -> None:
    """`Expect: 100-continue` works beside it."""

    async def scene(server: Listening) -> tuple[bytes, int]:
        async with server.wire() as wire:
            await wire.send(SIZED.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
            leave = await wire.reader.readuntil(b"\r\n\r\n")
            await wire.send(BODY)
            return leave, (await wire.answer()).status

    assert run_scene(scene) == (b"HTTP/1.1 100 Continue\r\n\r\n", 200)


def test_offers_one_behind_the_other_are_answered_in_order() -> None:
    """Each is read as a request of HTTP/1.1."""

    async def scene(server: Listening) -> list[int]:
        async with server.wire() as wire:
            await wire.send((SIZED + BODY) * 20)
            return [(await wire.answer()).status for _ in range(20)]

    assert run_scene(scene) == [200] * 20


def test_what_an_offer_announces_is_bounded() -> None:
    """It does not come around a limit."""
    answer, refused, _ = exchange(OFFER + b"Content-Length: 65537\r\n\r\n")
    assert (answer.status, refused) == (413, {"body_too_large": 1})


def test_a_tunnel_is_refused() -> None:
    """What follows is not read as a request."""
    answer, refused, rest = exchange(b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n" + GET + b"\r\n")
    assert (answer.status, refused, rest) == (400, {"malformed": 1}, b"")


REFUSED = {
    "a body": SOCKET + b"Content-Length: 5\r\n\r\n",
    "a body in chunks": SOCKET + b"Transfer-Encoding: chunked\r\n\r\n",
    "a header longer than WebSockets have": SOCKET + b"a: " + b"b" * 20_000 + b"\r\n\r\n",
    "frames before the answer": SOCKET + b"\r\n\x81\x85\0\0\0\0hello",
}
FOREVER = LimitSettings(
    max_connections=1, header_timeout_seconds=HOUR_SECONDS, keep_alive_timeout_seconds=HOUR_SECONDS
)


@pytest.mark.parametrize("case", REFUSED)
def test_a_handshake_that_nobody_can_answer_is_refused(case: str) -> None:
    """At once, and the connection is closed."""
    answer, refused, rest = exchange(REFUSED[case], limits=FOREVER)
    assert (answer.status, refused, rest) == (400, {"malformed": 1}, b"")


def test_a_handshake_behind_an_unfinished_answer_is_refused() -> None:
    """The answer comes whole, and its request is told if the client leaves."""
    app = App()

    async def scene(server: Listening) -> tuple[bytes, bytes, dict[str, int]]:
        async with server.wire() as wire:
            await wire.send(GET.replace(b"echo", b"held") + b"\r\n" + SOCKET + b"\r\n")
            await server.until_refused("malformed")
            app.released.set()
            return (await wire.answer()).body, await wire.rest(), server.refused

    assert run_scene(scene, app=app) == (b"held", b"", {"malformed": 1})


def test_a_handshake_that_the_application_does_not_answer_makes_room() -> None:
    """Until then nothing is lost that the client could not start again."""
    app = App()

    async def scene(server: Listening) -> tuple[int, int, dict[str, int]]:
        async with server.wire() as one:
            await one.send(SOCKET.replace(b"realtime", b"unanswered") + b"\r\n")
            await until_set(app.entered)
            async with server.wire() as two:
                await two.send(GET + b"\r\n")
                return (await one.answer()).status, (await two.answer()).status, server.refused

    assert run_scene(scene, FOREVER, app) == (503, 200, {"too_many_connections": 1})
