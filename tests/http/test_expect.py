"""Clients that wait for `100 Continue`: their connection goes on, unless a body may still come."""

from __future__ import annotations

from echo_app import GET, POST, run_scene
from listening import Listening, Wire

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
EXPECT = b"Expect: 100-continue\r\n"
SIZED = EXPECT + b"Content-Length: 4\r\n\r\n"
DEAF = b"POST /v1/deaf HTTP/1.1\r\nHost: x\r\n"


async def statuses(wire: Wire, count: int) -> list[int]:
    """The statuses of the next answers."""
    return [(await wire.answer()).status for _ in range(count)]


def test_a_connection_goes_on_once_the_body_was_read() -> None:
    """curl waits for leave with each large body, such as one with an image."""

    async def scene(server: Listening) -> None:
        async with server.wire() as wire:
            for _ in range(2):
                await wire.send(POST + SIZED)
                assert await wire.reader.readuntil(b"\r\n\r\n") == CONTINUE
                await wire.send(b"body")
                answer = await wire.answer()
                assert (answer.status, answer.headers.get("connection")) == (200, None)
            assert server.connections == 1

    run_scene(scene)


def test_what_follows_a_body_that_needed_no_leave_is_answered() -> None:
    """The whole body came with the headers, and the next request behind it."""

    async def scene(server: Listening) -> None:
        async with server.wire() as wire:
            await wire.send(DEAF + SIZED + b"body" + GET + b"\r\n")
            assert await statuses(wire, 2) == [200, 200]

    run_scene(scene)


def test_a_request_without_a_body_keeps_its_connection() -> None:
    """There is nothing to wait for."""

    async def scene(server: Listening) -> None:
        async with server.wire() as wire:
            await wire.send(b"GET /v1/deaf HTTP/1.1\r\nHost: x\r\n" + EXPECT + b"\r\n")
            assert await statuses(wire, 1) == [200]
            await wire.send(GET + b"\r\n")
            assert await statuses(wire, 1) == [200]

    run_scene(scene)


def test_an_answer_before_the_body_is_the_last() -> None:
    """Its client may send the body or not: what comes next could be either."""

    async def scene(server: Listening) -> None:
        async with server.wire() as wire:
            await wire.send(DEAF + SIZED)
            answer = await wire.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await wire.rest() == b""

    run_scene(scene)


def test_a_request_that_waits_behind_another_is_judged_when_it_is_answered() -> None:
    """Its body has come by then, or not."""

    async def scene(server: Listening) -> None:
        async with server.wire() as wire:
            await wire.send(GET + b"\r\n" + DEAF + SIZED + b"body" + DEAF + SIZED)
            assert await statuses(wire, 2) == [200, 200]
            last = await wire.answer()
            assert (last.status, last.headers["connection"]) == (200, "close")
            assert await wire.rest() == b""

    run_scene(scene)
