"""WebSockets: what a client may send, and leave unread."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

import pytest
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import connect

from echo_app import GET, HOUR_SECONDS, KIB, UNREACHED_SECONDS, App, run_scene
from holdfast.api.errors import close_websocket
from holdfast.listener import connection_table
from holdfast.listener.websocket_connection import MAX_FRAGMENTS
from holdfast.settings import LimitSettings, ListenSettings
from listening import DEADLINE_SECONDS, Listening, Wire, until_set

HANDSHAKE = (
    b"GET /v1/%b HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
MASK = b"\0\0\0\0"
PING = b"\x89\xfd" + MASK + b"x" * 125
BEGUN = b"\x01\x80" + MASK
FRAGMENT = b"\x00\x80" + MASK
IMPATIENT = LimitSettings(send_timeout_seconds=0.3, header_timeout_seconds=HOUR_SECONDS)


async def accepted(wire: Wire, path: bytes = b"realtime") -> None:
    """A WebSocket on which the test writes every byte."""
    await wire.send(HANDSHAKE % path)
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert b" 101 " in await wire.reader.readuntil(b"\r\n\r\n")


def close_code(rest: bytes) -> int:
    """Why it was closed, as the last frame says."""
    frame = rest[rest.index(b"\x88") :]
    return int.from_bytes(frame[2:4], "big")


@pytest.mark.parametrize("frame", [b"\x81\x80" + MASK, PING, b"\xff\xff"])
def test_a_frame_before_the_answer_is_refused(frame: bytes) -> None:
    """Nobody reads what comes while a handshake is held, so it would fill the memory."""
    app = App()

    async def scene(server: Listening) -> tuple[int, bytes, dict[str, int]]:
        async with server.wire() as wire:
            await wire.send(HANDSHAKE % b"unanswered")
            await until_set(app.entered)
            await wire.send(frame)
            answer, rest = await wire.answer(), await wire.rest()
            app.released.set()
            return answer.status, rest, server.refused

    assert run_scene(scene, app=app) == (400, b"", {"malformed": 1})


def test_frames_that_nobody_reads_are_cut_off() -> None:
    """So that the application is told."""
    app = App()

    async def scene(server: Listening) -> dict[str, int]:
        async with server.wire() as wire:
            await wire.send(HANDSHAKE % b"frames")
            await until_set(app.left)
            return server.refused

    assert run_scene(scene, IMPATIENT, app) == {"slow_reader": 1}


def test_a_client_that_does_not_read_the_pongs_is_not_read_from() -> None:
    """Each ping has an answer, which would be kept until the connection ends."""

    async def scene(server: Listening) -> dict[str, int]:
        async with server.wire() as wire:
            await accepted(wire)
            wire.reader._transport.pause_reading()  # type: ignore[attr-defined]
            try:
                async with asyncio.timeout(DEADLINE_SECONDS):
                    while True:
                        await wire.send(PING * 4 * KIB)
            except ConnectionError:
                return server.refused

    assert run_scene(scene, IMPATIENT) == {"slow_reader": 1}


def test_a_client_that_reads_the_pongs_is_answered() -> None:
    """Each of thousands."""
    count = 50_000

    async def scene(server: Listening) -> int:
        async with server.wire() as wire:
            await accepted(wire)
            sending = asyncio.create_task(wire.send(*[PING * 500] * (count // 500)))
            pongs = await wire.reader.readexactly(127 * count)
            await sending
            return pongs.count(b"\x8a\x7d")

    assert run_scene(scene) == count


def test_a_message_has_so_many_fragments() -> None:
    """An empty one counts for no limit of bytes."""

    async def scene(server: Listening) -> int:
        async with server.wire() as wire:
            await accepted(wire)
            await wire.send(BEGUN + FRAGMENT * (MAX_FRAGMENTS + 1))
            return close_code(await wire.rest())

    assert run_scene(scene) == 1009


def test_a_message_is_no_larger_than_a_body() -> None:
    """By what its frame announces."""
    limits = LimitSettings(max_body_bytes=64 * KIB)

    async def scene(server: Listening) -> int:
        async with connect(f"ws://127.0.0.1:{server.port}/v1/realtime") as one:
            await one.send("x" * (64 * KIB + 1))
            await one.wait_closed()
            return int(one.close_code or 0)

    assert run_scene(scene, limits) == 1009


@pytest.mark.parametrize("size", [1, 100, 10_000, 60_000])
def test_messages_of_any_size_arrive_in_order(size: int) -> None:
    """However many come at once."""
    count = 2_000_000 // (size + 100)

    async def scene(server: Listening) -> str | bytes:
        async with connect(f"ws://127.0.0.1:{server.port}/v1/counted") as one:
            for _ in range(count):
                await one.send("x" * size)
            await one.send("")
            return await one.recv()

    assert run_scene(scene) == str(size * count)


def test_no_message_is_larger_than_what_came() -> None:
    """Nothing is inflated, though clients offer it."""

    async def scene(server: Listening) -> str | None:
        async with connect(f"ws://127.0.0.1:{server.port}/v1/realtime") as one:
            assert one.request is not None
            assert "permessage-deflate" in one.request.headers["Sec-WebSocket-Extensions"]
            assert one.response is not None
            return one.response.headers.get("Sec-WebSocket-Extensions")

    assert run_scene(scene) is None


def test_a_frame_that_never_ends_keeps_nothing_from_a_stop() -> None:
    """It is closed with the listener."""

    async def scene(server: Listening) -> bytes:
        async with server.wire() as wire:
            await accepted(wire)
            await wire.send(b"\x82\xff" + (32 * KIB).to_bytes(8, "big") + MASK + b"x")
            server.server.should_exit = True
            return await wire.rest()

    assert close_code(run_scene(scene)) == 1012


def test_a_websocket_whose_client_sends_no_more_is_closed() -> None:
    """Half a connection is none."""

    async def scene(server: Listening) -> None:
        async with server.wire() as wire:
            await accepted(wire)
            wire.writer.write_eof()
            await wire.rest()
            await server.until_connections(0)

    run_scene(scene)


def test_a_websocket_on_which_nothing_is_said_is_closed() -> None:
    """Accepted as it is; a client answers pings by itself, which says nothing."""
    limits = LimitSettings(websocket_idle_timeout_seconds=0.3)
    app = App()

    async def scene(server: Listening) -> tuple[int | None, dict[str, int]]:
        async with connect(f"ws://127.0.0.1:{server.port}/v1/counted", ping_interval=0.05) as one:
            await one.wait_closed()
            return one.close_code, server.refused

    assert run_scene(scene, limits, app) == (1001, {"idle_connection": 1})


def test_the_time_of_a_websocket_begins_anew_with_each_message() -> None:
    """Of two the one that was opened later is closed first, if the other has talked since."""
    limits = LimitSettings(websocket_idle_timeout_seconds=UNREACHED_SECONDS)

    async def scene(server: Listening) -> bool:
        url = f"ws://127.0.0.1:{server.port}/v1/counted"
        async with connect(url) as one, connect(url) as two:
            await asyncio.sleep(0.5)
            await one.send("x")
            closing = [asyncio.create_task(each.wait_closed()) for each in (one, two)]
            done, _ = await asyncio.wait(closing, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(closing)
            return closing[1] in done

    assert run_scene(scene, limits)


def test_a_silent_websocket_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that say nothing cannot shut anybody out, and are told to come again."""
    monkeypatch.setattr(connection_table, "SILENT_SECONDS", 0.05)
    limits = LimitSettings(max_connections=1, websocket_idle_timeout_seconds=HOUR_SECONDS)

    async def scene(server: Listening) -> tuple[int, int | None]:
        async with connect(f"ws://127.0.0.1:{server.port}/v1/counted") as one:
            status = 0
            async with asyncio.timeout(DEADLINE_SECONDS):
                while status != 200:
                    async with server.wire() as wire:
                        await wire.send(GET + b"\r\n")
                        status = (await wire.answer()).status
            await one.wait_closed()
            return status, one.close_code

    assert run_scene(scene, limits) == (200, 1013)


def test_a_websocket_that_was_closed_makes_room() -> None:
    """Its client need not confirm the close, and may never do so."""
    limits = LimitSettings(max_connections=1, websocket_idle_timeout_seconds=HOUR_SECONDS)

    async def refuse(_scope: Scope, receive: Receive, send: Send) -> None:
        await close_websocket(receive, send, code=1013, reason="later")

    async def scene(server: Listening) -> list[int]:
        codes = []
        async with AsyncExitStack() as stack:
            for _ in range(2):
                wire = await stack.enter_async_context(server.wire())
                await accepted(wire)
                codes.append(close_code(await wire.reader.readexactly(4)))
        return codes

    assert run_scene(scene, limits, refuse) == [1013, 1013]


@pytest.mark.parametrize("level", ["debug", "info"])
def test_no_line_holds_the_query_of_a_websocket(
    caplog: pytest.LogCaptureFixture, level: str
) -> None:
    """Browsers put keys there; nor a header, at any level."""
    settings = ListenSettings(host="127.0.0.1", port=0, uvicorn_log_level=level)

    async def scene(server: Listening) -> None:
        # uvicorn's own handlers are beside those of the test.
        for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
            logging.getLogger(name).propagate = True
        url = f"ws://127.0.0.1:{server.port}/v1/realtime?api_key=SECRET"
        async with connect(url, additional_headers={"x-key": "SECRET"}) as one:
            await one.send("leave")
            await one.wait_closed()
        async with server.wire() as wire:
            await wire.send(b"GET /v1/echo?api_key=SECRET HTTP/1.1\r\nHost: x\r\n\r\n")
            await wire.answer()
            await wire.send(b"GET /v1/echo?api_key=SECRET HTTP/1.1\r\nContent-Length: x\r\n\r\n")
            await wire.answer()

    caplog.set_level(logging.DEBUG)
    run_scene(scene, settings=settings)
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("uvicorn")]
    assert any('"WebSocket /v1/realtime" [accepted]' in line for line in lines)
    assert any("GET /v1/echo HTTP/1.1" in line for line in lines)
    assert not any("SECRET" in line for line in lines)
