"""A gate with little capacity before an application whose answers a test releases."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress

import httpx
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from asgi_server import DEADLINE_SECONDS, serving
from holdfast.api.admission import Admission
from holdfast.api.gate import Gate
from holdfast.engine.requests.sequence_queue import Capacity
from holdfast.errors import NotReadyError, OverloadedError
from holdfast.request_context import RequestContext, current_request
from holdfast.settings import OverloadSettings
from holdfast.telemetry.counters import Refusals
from inner_app import View


class SmallServer:
    """A gate with little capacity before an application whose answers the test releases.

    A request names its key in `x-key`, since there is no layer that knows keys.
    """

    def __init__(
        self,
        *,
        capacity: float = 1,
        waiting: int = 100,
        per_key: int = 0,
        keys: int = 0,
        connections: float = math.inf,
        around: Callable[[ASGIApp], ASGIApp] = lambda gate: gate,
    ) -> None:
        """Take `around`, which returns the layer between the keys and the gate."""
        self.view = View()
        self.served: list[str] = []
        self.at_work: list[RequestContext] = []
        self.refusals = Refusals()
        self.suspended: dict[str, float] = {}
        """For how long a key is suspended."""
        self.admission = Admission(
            self.view,
            refusals=self.refusals,
            probe_token="",
            hold_timeout_seconds=DEADLINE_SECONDS,
            overload=OverloadSettings(waiting, per_key),
            capacity=lambda: Capacity(capacity, capacity),
            count_keys=lambda: keys,
            suspended_seconds=lambda key: self.suspended.get(key, 0.0),
            max_connections=connections,
        )
        self._gate = around(Gate(self._answer, self.admission))
        self._released = asyncio.Semaphore(0)
        self.is_elsewhere = False
        """Whether a request that comes now waits for `elsewhere` before its work."""
        self.elsewhere = asyncio.Event()
        self.has_gone_elsewhere = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Set the key, as the layer before the gate does."""
        headers = dict(scope.get("headers", ()))
        current_request().key = headers.get(b"x-key", b"").decode()
        await self._gate(scope, receive, send)

    def serving(self) -> AbstractAsyncContextManager[httpx.AsyncClient]:
        """Yield a client of the gate."""
        return serving(self)

    def release(self, answers: int = 1) -> None:
        """Have this many requests answered."""
        for _ in range(answers):
            self._released.release()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when the condition holds."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not condition():  # noqa: ASYNC110 - the loop is all there is
                await asyncio.sleep(0.01)

    async def until_there(self, *, admitted: int, waiting: int) -> None:
        """Return when this many requests are admitted and wait."""
        admission = self.admission
        await self.until(lambda: (admission.in_flight, admission.held) == (admitted, waiting))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["type"] == "websocket":
            await self._talk(WebSocket(scope, receive, send))
            return
        if scope["method"] == "POST":
            context = current_request()
            if self.is_elsewhere:
                try:
                    async with context.away():
                        self.has_gone_elsewhere = True
                        await self.elsewhere.wait()
                except (NotReadyError, OverloadedError) as error:
                    await PlainTextResponse(type(error).__name__)(scope, receive, send)
                    return
            self.at_work.append(context)
            await self._released.acquire()
        self.served.append(current_request().key)
        body = (await receive()).get("body", b"")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def _talk(self, websocket: WebSocket) -> None:
        """Make a call for each message."""
        session = current_request().session
        assert session is not None
        await websocket.accept()
        with suppress(WebSocketDisconnect):
            while True:
                await websocket.receive_text()
                try:
                    async with session.call():
                        self.at_work.append(current_request())
                        await self._released.acquire()
                except OverloadedError as error:
                    await websocket.send_text(type(error).__name__)
                else:
                    await websocket.send_text("done")


def ask(
    client: httpx.AsyncClient, key: str = "", body: bytes = b"", path: str = "/work"
) -> asyncio.Task[httpx.Response]:
    """Send a request, and return its task."""
    return asyncio.create_task(client.post(path, content=body, headers={"x-key": key}))
