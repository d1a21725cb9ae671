"""A small application in the place of vLLM's, with answers that a test can hold back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from holdfast.lifecycle.states import State
from holdfast.lifecycle.supervisor import Supervisor
from holdfast.records import EngineFacts


@dataclass
class View(Supervisor):
    """A supervisor that supervises nothing: it stands where the test has it stand."""

    state: State = State.READY
    reason: str = "all is well"
    eta_seconds: float | None = None
    is_recovering: bool = False
    has_been_ready: bool = True
    proven_tokens: int = 0
    facts: EngineFacts | None = None

    def __post_init__(self) -> None:
        self._moved = asyncio.Event()

    async def until_moved(self) -> None:
        """Return when `move` is called."""
        await self._moved.wait()

    def move(self, state: State, *, is_recovering: bool = False) -> None:
        """Enter another state."""
        self.state, self.is_recovering = state, is_recovering
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


class InnerApp(Starlette):
    """Shows what reached it. `/v1/stream` goes on until `released` is set."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.released = asyncio.Event()
        paths = ("/health", "/ping", "/metrics", "/metrics/deeper", "/v1/whoami")
        super().__init__(
            routes=[
                *(Route(path, self._whoami, methods=["GET", "POST"]) for path in paths),
                Route("/v1/headers", self._headers),
                Route("/v1/stream", self._stream),
                Route("/v1/broken", self._broken),
                WebSocketRoute("/v1/realtime", self._realtime),
            ]
        )

    async def _whoami(self, request: Request) -> Response:
        self.entered.set()
        return PlainTextResponse(f"inner {request.scope['root_path']}{len(await request.body())}")

    async def _headers(self, request: Request) -> Response:
        return JSONResponse(dict(request.headers))

    async def _stream(self, _request: Request) -> Response:
        async def chunks() -> AsyncIterator[str]:
            while not self.released.is_set():
                yield "data: more\n\n"
                await asyncio.sleep(0)
            yield "data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    async def _broken(self, _request: Request) -> Response:
        raise RuntimeError("broken on purpose")

    async def _realtime(self, socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello")
        await socket.close()
