"""Messages of WebSockets have the limits of bodies: the shape of their JSON, and their memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from counter_values import counter_values
from holdfast.api.body_cost import FREE_BYTES
from holdfast.api.limits import Limits
from holdfast.api.request_log import RequestLog
from holdfast.request_context import current_request
from holdfast.settings import LimitSettings
from holdfast.telemetry.counters import Refusals
from listening import DEADLINE_SECONDS, Listening, listening

KIB = 1024
BUFFERED_BYTES = 512 * KIB


class Told:
    """Answers each message with its length, and a message `wait` for each release."""

    def __init__(self, limits: LimitSettings) -> None:
        self.refusals = Refusals()
        self.limits = Limits(self._answer, limits, self.refusals, is_probe=lambda _: False)
        self.received = 0
        self.released = asyncio.Semaphore(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Set the key, as the layer before the limits does."""
        current_request().key = dict(scope.get("headers", ())).get(b"x-key", b"").decode()
        await self.limits(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        try:
            while True:
                text = await websocket.receive_text()
                self.received += 1
                if text.startswith("wait"):
                    await self.released.acquire()
                await websocket.send_text(str(len(text)))
        except WebSocketDisconnect:
            pass

    @property
    def refused(self) -> dict[str, int]:
        """The reasons that closed something."""
        return {reason: count for reason, count in counter_values(self.refusals).items() if count}


@asynccontextmanager
async def told(**settings: int) -> AsyncIterator[tuple[Told, Listening]]:
    """The application behind our listener."""
    limits = LimitSettings(**settings)
    app = Told(limits)
    async with listening(RequestLog(app, is_on=False), limits, app.refusals) as server:
        yield app, server


def opened(server: Listening, key: str = "a") -> connect:
    """A WebSocket of a key."""
    return connect(
        f"ws://127.0.0.1:{server.port}/v1/realtime",
        open_timeout=DEADLINE_SECONDS,
        additional_headers={"x-key": key},
        max_size=None,
    )


async def close_code(websocket: ClientConnection) -> int:
    """The code with which the server closes it."""
    with pytest.raises(ConnectionClosed) as closed:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await websocket.recv()
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code


@pytest.mark.parametrize(
    ("text", "reason"),
    [("[" * 1000, "json_too_deep"), ('["",' + '"",' * 600_000 + "1]", "json_too_large")],
)
def test_a_message_has_the_shape_of_a_body(text: str, reason: str) -> None:
    """The application never sees another."""

    async def scene() -> None:
        async with told() as (app, server), opened(server) as websocket:
            await websocket.send("{}")
            assert await websocket.recv() == "2"
            await websocket.send(text)
            assert await close_code(websocket) == 1008
            assert (app.received, app.refused) == (1, {reason: 1})

    asyncio.run(scene())


def test_unfinished_messages_have_a_bound_together() -> None:
    """Of a key, which leaves memory to others; a small message needs none."""

    async def scene() -> None:
        async with told(max_buffered_bytes=BUFFERED_BYTES) as (app, server):
            async with AsyncExitStack() as stack:
                first, second = [await stack.enter_async_context(opened(server)) for _ in range(2)]
                stack.callback(asyncio.create_task(first.send(_endless())).cancel)
                await _until(lambda: app.limits.buffers.taken_bytes > 100 * KIB)
                stack.callback(asyncio.create_task(second.send(_endless())).cancel)
                assert await close_code(second) == 1013
                assert app.refused == {"buffers_full": 1}
                other = await stack.enter_async_context(opened(server, "b"))
                await other.send("x" * 100 * KIB)
                assert await other.recv() == str(100 * KIB)
            await _until(lambda: not app.limits.buffers.taken_bytes)

    asyncio.run(scene())


def test_a_message_takes_memory_until_the_application_is_done() -> None:
    """Then the next may take it."""

    async def scene() -> None:
        async with told(max_buffered_bytes=BUFFERED_BYTES) as (app, server):
            async with opened(server) as websocket:
                await websocket.send("wait" + "x" * 200 * KIB)
                await _until(lambda: app.received == 1)
                assert app.limits.buffers.taken_bytes > 100 * KIB
                app.released.release()
                assert await websocket.recv() == str(200 * KIB + 4)
                await _until(lambda: not app.limits.buffers.taken_bytes)
                for _ in range(4):
                    await websocket.send("x" * 200 * KIB)
                    assert await websocket.recv() == str(200 * KIB)
            await _until(lambda: not app.limits.buffers.taken_bytes)

    asyncio.run(scene())


def test_a_message_that_the_application_is_done_with_takes_no_memory() -> None:
    """Though the next one is there already, since the client is faster."""
    size_bytes = 100 * KIB

    async def scene() -> None:
        async with told(max_buffered_bytes=BUFFERED_BYTES) as (app, server):
            buffers = app.limits.buffers
            async with opened(server) as websocket:
                for _ in range(2):
                    await websocket.send("wait".ljust(size_bytes))
                await _until(lambda: buffers.taken_bytes == 2 * size_bytes - FREE_BYTES)
                app.released.release()
                await _until(lambda: app.received == 2)
                assert buffers.taken_bytes == size_bytes - FREE_BYTES
                app.released.release()

    asyncio.run(scene())


async def _endless() -> AsyncIterator[str]:
    """Fragments of a message that is never complete."""
    for _ in range(25):
        yield "x" * 8 * KIB
    await asyncio.Event().wait()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the loop is all there is
            await asyncio.sleep(0.01)
