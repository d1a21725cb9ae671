"""What may a message of a WebSocket ask for? As much as a body: depth and values of its JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Message, Receive, Send

from holdfast.api.body_cost import LOOK_BYTES, PACE_BYTES, JsonShape, json_fault
from holdfast.api.errors import send_nothing
from holdfast.errors import RefusedError
from holdfast.telemetry.counters import Refusals

_POLICY_VIOLATION = 1008


class LimitedMessages:
    """The messages of one WebSocket, which is closed at the first that exceeds a limit."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        new_shape: Callable[[], JsonShape],
        turn: Callable[[], Awaitable[None]],
        refusals: Refusals,
    ) -> None:
        self._receive = receive
        self._send = send
        self._new_shape = new_shape
        self._turn = turn
        """Waits until more may be read after `PACE_BYTES`."""
        self._unpaced_bytes = 0
        self._refusals = refusals
        self._is_over = False

    async def receive(self) -> Message:
        """Return the next event; after a refused message, that the client has left."""
        if not self._is_over:
            message = await self._receive()
            if message["type"] != "websocket.receive":
                return message
            text = (message.get("text") or "").encode()
            self._unpaced_bytes += len(text or message.get("bytes") or b"")
            if self._unpaced_bytes >= PACE_BYTES:
                # After `receive`, which returns the memory of the last message.
                self._unpaced_bytes = 0
                await self._turn()
            error = await self._fault(text)
            if error is None:
                return message
            self._is_over = True
            self._refusals.count(error.reason)
            close = {"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": error.cause}
            await self._send(close)
        return {"type": "websocket.disconnect", "code": _POLICY_VIOLATION}

    def send(self, message: Message) -> Awaitable[None]:
        """Pass an event on, unless the WebSocket was closed here."""
        return send_nothing() if self._is_over else self._send(message)

    async def _fault(self, text: bytes) -> RefusedError | None:
        """Return why a message is refused, looking at it in turns with other requests."""
        shape = self._new_shape()
        for at in range(0, len(text), LOOK_BYTES):
            if at:
                await asyncio.sleep(0)
            is_whole = len(text) <= LOOK_BYTES
            error = json_fault(shape, text[at : at + LOOK_BYTES], is_whole=is_whole)
            if error is not None:
                return error
        return None
