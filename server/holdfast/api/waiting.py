"""What a request that is not at work yet has sent so far, and whether its client is still there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable

from starlette.types import Message, Receive

_DISCONNECTS = frozenset({"http.disconnect", "websocket.disconnect"})


class PatientReceive:
    """An ASGI `receive` that is read ahead of the application, to see whether the client leaves."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read: deque[Message] = deque()

    async def __call__(self) -> Message:
        """The next message, first those that were read ahead."""
        return self._read.popleft() if self._read else await self._receive()

    async def has_whole_body(self) -> bool:
        """Wait for the last part of the body; False if the client leaves before.

        What came is kept as one part: a body that comes byte by byte would take hundreds of times
        its size.
        """
        message = await self._receive()
        if message["type"] == "http.request" and message.get("more_body", False):
            body = bytearray(message.get("body", b""))
            while message["type"] == "http.request" and message.get("more_body", False):
                message = await self._receive()
                body += message.get("body", b"")
            if message["type"] == "http.request":
                message = {**message, "body": bytes(body)}
        self._read.append(message)
        return bool(message["type"] == "http.request")

    async def while_here(self, answer: Awaitable[bool]) -> bool | None:
        """`answer`, or None if the client leaves before it is known."""
        answering = asyncio.ensure_future(answer)
        leaving = asyncio.create_task(self._until_gone(), name="client leaves")
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return answering.result() if answering.done() else None
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.wait({answering, leaving})

    async def _until_gone(self) -> None:
        message: Message = {"type": ""}
        while message["type"] not in _DISCONNECTS:
            message = await self._receive()
            self._read.append(message)
