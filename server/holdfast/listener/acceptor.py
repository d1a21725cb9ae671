"""Accepts connections from a listening socket, and closes those for which there is no slot."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Callable
from functools import partial

from holdfast.listener.connection_table import ConnectionSlot, ConnectionTable

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 8
"""Thousands that arrive together are accepted in turns with all other work: a new connection is
evicted only after what it sent, if anything, has been read."""
PAUSE_SECONDS = 0.1
"""The pause before the next accept when this process cannot open more files."""
EVICTED_AT_ONCE = 16
"""Connections evicted then, so that health checks find a descriptor."""
WARNING_INTERVAL_SECONDS = 60.0
MAX_TLS_CLOSE_SECONDS = 3600.0
"""The limit of a TLS shutdown; `BoundedTransport` ends one sooner if the client does not read."""
KEEPALIVE_IDLE_SECONDS = 60
KEEPALIVE_INTERVAL_SECONDS = 15
KEEPALIVE_PROBES = 4


class Acceptor:
    """Accepts connections while it is open, whatever the state of the machine.

    The event loops' own servers fail at this: uvloop's ends for good when no descriptor is left
    (`UVStreamServer._fatal_error`), and neither it nor asyncio's counts a TLS connection before its
    handshake is over. The interface is that of `asyncio.Server`, so that uvicorn can close it.
    """

    def __init__(
        self,
        sock: socket.socket,
        table: ConnectionTable,
        protocol: Callable[[ConnectionSlot], asyncio.Protocol],
        context: Callable[[], ssl.SSLContext | None],
        backlog: int,
    ) -> None:
        """`context` returns the one for the next handshake; None without TLS."""
        self._sock = sock
        self._table = table
        self._protocol = protocol
        self._context = context
        self._arrivals: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._warned_seconds = -math.inf
        _prepare(sock)
        sock.listen(backlog)
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more connections, and drop those that have not finished the TLS handshake."""
        if self._pause is not None:
            self._pause.cancel()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
        for arrival in self._arrivals:
            arrival.cancel()

    async def wait_closed(self) -> None:
        """Return when no connection is being set up."""
        if self._arrivals:
            await asyncio.wait(self._arrivals)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # the client left before it was accepted
                continue
            except OSError as error:
                self._pause_after(error)
                return
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        slot = self._take_slot()
        if slot is None:
            self._table.refusals.count("too_many_connections")
            sock.close()
            return
        sock.setblocking(False)
        task = self._loop.create_task(self._arrive(sock, slot), name="arrival of a connection")
        self._arrivals.add(task)
        task.add_done_callback(self._arrivals.discard)
        if self._context() is not None:
            slot.allow_eviction(partial(self._drop, task))

    def _take_slot(self) -> ConnectionSlot | None:
        return self._table.take_slot()

    async def _arrive(self, sock: socket.socket, slot: ConnectionSlot) -> None:
        connect = partial(self._loop.connect_accepted_socket, partial(self._protocol, slot), sock)
        context = self._context()
        has_arrived = False
        try:
            if context is None:
                await connect()
            else:
                await connect(
                    ssl=context,
                    ssl_handshake_timeout=self._table.limits.header_timeout_seconds or None,
                    ssl_shutdown_timeout=MAX_TLS_CLOSE_SECONDS,
                )
            has_arrived = True
        except (OSError, asyncio.CancelledError) as error:
            if isinstance(error, TimeoutError | ConnectionAbortedError):
                self._table.refusals.count("idle_connection")
        finally:
            if not has_arrived:
                slot.release()

    def _drop(self, arrival: asyncio.Task[None]) -> None:
        """Close a connection that is in the TLS handshake, to make room for another."""
        if not arrival.done():
            self._table.refusals.count("idle_connection")
            arrival.cancel()

    def _pause_after(self, error: OSError) -> None:
        """Pause, since there are no descriptors or no memory; accepting must resume after that."""
        evicted = self._table.evict_up_to(EVICTED_AT_ONCE)
        now = self._loop.time()
        if now - self._warned_seconds > WARNING_INTERVAL_SECONDS:
            self._warned_seconds = now
            logger.warning(
                "cannot accept connections: %s; closed %d idle connections, and trying again "
                "every %g s",
                error.strerror or error,
                evicted,
                PAUSE_SECONDS,
            )
        self._loop.remove_reader(self._sock.fileno())
        self._pause = self._loop.call_later(PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock.fileno(), self._accept)


def _prepare(sock: socket.socket) -> None:
    """Send small parts immediately, and detect clients on a machine that is gone.

    On Linux an accepted socket inherits the options of the listening one.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
