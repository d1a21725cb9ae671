"""What a request that waits has sent so far, and whether its client is still there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable

from starlette.types import Message, Receive

READ_AHEAD_BYTES = 1024 * 1024
"""So much of a body is kept while its request waits. Of a longer one the rest stays in the socket,
and that its client has left is seen only when it goes on."""

_DISCONNECTS = frozenset({"http.disconnect", "websocket.disconnect"})


class PatientReceive:
    """An ASGI `receive` that is read ahead of the application, to see whether the client leaves."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read: deque[Message] = deque()

    async def __call__(self) -> Message:
        """The next message, first those that were read ahead."""
        return self._read.popleft() if self._read else await self._receive()

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
        kept_bytes = 0
        while kept_bytes < READ_AHEAD_BYTES:
            message = await self._receive()
            self._read.append(message)
            if message["type"] in _DISCONNECTS:
                return
            kept_bytes += len(message.get("body", b""))
        await asyncio.Event().wait()
