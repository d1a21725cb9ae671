"""An application that says what reached it, served behind our own connections, and its scenes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvloop
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket, WebSocketDisconnect

from holdfast.settings import LimitSettings, ListenSettings
from listening import LOCAL, Answer, Listening, listening

KIB = 1024
SMALL = LimitSettings(
    max_body_bytes=64 * KIB,
    max_url_bytes=1 * KIB,
    max_headers=10,
    max_header_bytes=2 * KIB,
)
GET = b"GET /v1/echo HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/echo HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
HOUR_SECONDS = 3600.0
UNREACHED_SECONDS = 2.0
"""A timeout that a client stays below, even if the machine stands still for a second."""

Scene = Callable[[Listening], Awaitable[Any]]


class App(Starlette):
    """Says what reached it. `/v1/held` answers when `released` is set, `/v1/stream` goes on.

    `/v1/abandoned` answers when its client is gone. `/v1/flood` sends as much as is read, and more,
    and `/v1/frames` does over a WebSocket. `/v1/broken` raises before, during or after its answer.
    """

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.released = asyncio.Event()
        self.left = asyncio.Event()
        self.scheme = ""
        """That by which `/v1/echo` was reached last."""
        methods = ["GET", "POST", "HEAD"]
        super().__init__(
            routes=[
                Route("/v1/echo", self._echo, methods=methods),
                Route("/v1/deaf", self._deaf, methods=methods),
                Route("/v1/held", self._held, methods=methods),
                Route("/v1/abandoned", self._abandoned, methods=methods),
                Route("/v1/stream", self._stream, methods=methods),
                Route("/v1/flood", self._flood, methods=methods),
                Route("/livez", self._deaf, methods=methods),
                Route("/v1/large", self._large, methods=methods),
                Route("/v1/broken", self._broken, methods=methods),
                WebSocketRoute("/v1/realtime", self._realtime),
                WebSocketRoute("/v1/unanswered", self._unanswered),
                WebSocketRoute("/v1/frames", self._frames),
                WebSocketRoute("/v1/counted", self._counted),
            ]
        )

    async def _echo(self, request: Request) -> Response:
        self.scheme = request.url.scheme
        self.entered.set()
        try:
            size = len(await request.body())
        except ClientDisconnect:
            self.left.set()
            raise
        return JSONResponse({"bytes": size, "headers": dict(request.headers)})

    async def _deaf(self, _request: Request) -> Response:
        return PlainTextResponse("deaf")

    async def _held(self, _request: Request) -> Response:
        self.entered.set()
        await self.released.wait()
        return PlainTextResponse("held")

    async def _abandoned(self, request: Request) -> Response:
        await request.body()
        self.entered.set()
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.left.set()
        return PlainTextResponse("too late")

    async def _stream(self, request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"begun"
            try:
                async for _ in request.stream():
                    pass
            except ClientDisconnect:
                self.left.set()

        return StreamingResponse(chunks())

    async def _flood(self, request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            while not await request.is_disconnected():
                yield b"x" * 64 * KIB
            self.left.set()

        return StreamingResponse(chunks())

    async def _large(self, request: Request) -> Response:
        return PlainTextResponse("x" * int(request.query_params["bytes"]))

    async def _broken(self, request: Request) -> Response:
        async def fail() -> None:
            raise RuntimeError("the application is broken")

        async def chunks() -> AsyncIterator[bytes]:
            yield b"begun"
            await fail()

        match request.query_params["when"]:
            case "during":
                return StreamingResponse(chunks())
            case "after":
                return PlainTextResponse("whole", background=BackgroundTask(fail))
            case _:
                raise RuntimeError("the application is broken")

    async def _unanswered(self, _websocket: WebSocket) -> None:
        self.entered.set()
        await self.released.wait()

    async def _counted(self, websocket: WebSocket) -> None:
        await websocket.accept()
        size = 0
        while text := await websocket.receive_text():
            size += len(text)
        await websocket.send_text(str(size))
        await websocket.close()

    async def _frames(self, websocket: WebSocket) -> None:
        await websocket.accept()
        self.entered.set()
        try:
            while True:
                await websocket.send_bytes(b"x" * 64 * KIB)
        except WebSocketDisconnect:
            self.left.set()

    async def _realtime(self, websocket: WebSocket) -> None:
        await websocket.accept()
        self.entered.set()
        await websocket.receive_text()
        await websocket.close()


def run_scene(
    scene: Scene,
    limits: LimitSettings = SMALL,
    app: ASGIApp | None = None,
    settings: ListenSettings = LOCAL,
    own: socket.socket | None = None,
) -> Any:
    """What `scene` returns, with a listener."""

    async def play() -> Any:
        async with listening(app or App(), limits, settings=settings, own=own) as server:
            return await scene(server)

    # On the loop that serves.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(play())


def exchange(*parts: bytes, limits: LimitSettings = SMALL) -> tuple[Answer, dict[str, int], bytes]:
    """The answer to these bytes, what was refused, and what came after until the close."""

    async def scene(server: Listening) -> tuple[Answer, dict[str, int], bytes]:
        async with server.wire() as wire:
            await wire.send(*parts)
            answer = await wire.answer()
            return answer, server.refused, await wire.rest()

    answered: tuple[Answer, dict[str, int], bytes] = run_scene(scene, limits)
    return answered
