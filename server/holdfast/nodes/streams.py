"""Bytes between a socket and a channel, with a limit on what waits in each direction."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress

from holdfast.nodes.channel import HANDSHAKE_SECONDS
from holdfast.nodes.frames import MAX_FRAME_BYTES

READ_BYTES = 64 * 1024
MAX_UNSENT_BYTES = 4 * MAX_FRAME_BYTES
"""What may wait for a peer that does not read."""
TLS_GRACE_SECONDS = 1.0
"""The head's own deadline comes first: it counts a peer that is too slow."""
NEXT_ADDRESS_SECONDS = 0.25
"""The time after which a name's next address is tried too: the first may drop every packet."""
CLOSE_SECONDS = 2.0
"""The time to send what waits when a connection is closed."""


class ByteStream:
    """One connection, which ends instead of raising."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer  # kept, since its end would close the connection
        self._transport = writer.transport

    async def read(self) -> bytes:
        """Return what has arrived, once there is something; nothing means that it has ended."""
        try:
            return await self._reader.read(READ_BYTES)
        except OSError:  # ssl.SSLError is one
            return b""

    def write(self, data: bytes) -> None:
        """Send without waiting; a peer that does not read loses its connection."""
        if self._transport.is_closing():
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._transport.abort()

    def close(self) -> None:
        """Close when everything has been sent, or after `CLOSE_SECONDS`; `read` ends then."""
        self._transport.close()
        asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._transport.abort)

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()


async def accepted_stream(sock: socket.socket, context: ssl.SSLContext | None) -> ByteStream:
    """Return the stream of a connection that the listening socket has accepted.

    Raises:
        OSError: the TLS handshake failed, or took too long.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=READ_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol,
        sock,
        ssl=context,
        ssl_handshake_timeout=None if context is None else HANDSHAKE_SECONDS + TLS_GRACE_SECONDS,
    )
    return ByteStream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


async def connected_stream(
    host: str, port: int, context: ssl.SSLContext | None, deadline_seconds: float
) -> ByteStream:
    """Connect, with the TLS handshake if there is a context. The event loop must be asyncio's own.

    Raises:
        OSError: it failed, or the deadline passed.
    """
    async with asyncio.timeout(deadline_seconds):
        reader, writer = await asyncio.open_connection(
            host,
            port,
            limit=READ_BYTES,
            ssl=context,
            happy_eyeballs_delay=NEXT_ADDRESS_SECONDS,
        )
    return ByteStream(reader, writer)


async def ended(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has ended."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
