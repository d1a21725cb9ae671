"""The door itself: takes connections off the listening socket, each to a seat or not at all."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Callable
from functools import partial

from holdfast.listener.connection_table import Book, Seat

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 8
"""Thousands that come together are taken in turns with everything else: a new connection is closed
for another only after what it sent has been read, if it sent something."""
REST_SECONDS = 0.1
"""Before the next accept, when this process can open nothing more."""
SHED_AT_ONCE = 16
"""Connections closed then, so that those who ask after the health find a descriptor."""
WARNING_INTERVAL_SECONDS = 60.0
LONGEST_GOODBYE_SECONDS = 3600.0
"""Of TLS; `BoundedTransport` ends it sooner, and looks whether the client reads."""
KEEPALIVE_IDLE_SECONDS = 60
KEEPALIVE_INTERVAL_SECONDS = 15
KEEPALIVE_PROBES = 4


class Acceptor:
    """Accepts for as long as it is open, whatever the state of the machine.

    The event loops' own servers give up here: uvloop's ends for good when no descriptor is left
    (`UVStreamServer._fatal_error`), and neither it nor asyncio's counts a connection of TLS before
    its handshake is over. As `asyncio.Server`, so that uvicorn ends it.
    """

    def __init__(
        self,
        sock: socket.socket,
        book: Book,
        protocol: Callable[[Seat], asyncio.Protocol],
        context: ssl.SSLContext | None,
        backlog: int,
    ) -> None:
        self._sock = sock
        self._book = book
        self._protocol = protocol
        self._context = context
        self._arrivals: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._rest: asyncio.TimerHandle | None = None
        self._warned_seconds = -math.inf
        _prepare(sock)
        sock.listen(backlog)
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._accept)

    def close(self) -> None:
        """Take no more, and drop those who are not through the handshake of TLS."""
        if self._rest is not None:
            self._rest.cancel()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
        for arrival in self._arrivals:
            arrival.cancel()

    async def wait_closed(self) -> None:
        """Return when nobody is on the way in."""
        if self._arrivals:
            await asyncio.wait(self._arrivals)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # it left while it waited
                continue
            except OSError as error:
                self._rest_from(error)
                return
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        seat = self._book.seat()
        if seat is None:
            self._book.refusals.count("too_many_connections")
            sock.close()
            return
        sock.setblocking(False)
        task = self._loop.create_task(self._arrive(sock, seat), name="arrival of a connection")
        self._arrivals.add(task)
        task.add_done_callback(self._arrivals.discard)
        if self._context is not None:
            seat.offer(partial(self._drop, task))

    async def _arrive(self, sock: socket.socket, seat: Seat) -> None:
        connect = partial(self._loop.connect_accepted_socket, partial(self._protocol, seat), sock)
        has_arrived = False
        try:
            if self._context is None:
                await connect()
            else:
                await connect(
                    ssl=self._context,
                    ssl_handshake_timeout=self._book.limits.header_timeout_seconds or None,
                    ssl_shutdown_timeout=LONGEST_GOODBYE_SECONDS,
                )
            has_arrived = True
        except (OSError, asyncio.CancelledError) as error:
            if isinstance(error, TimeoutError | ConnectionAbortedError):
                self._book.refusals.count("idle_connection")
        finally:
            if not has_arrived:
                seat.release()

    def _drop(self, arrival: asyncio.Task[None]) -> None:
        """Close a connection in the handshake of TLS for another."""
        if not arrival.done():
            self._book.refusals.count("idle_connection")
            arrival.cancel()

    def _rest_from(self, error: OSError) -> None:
        """Out of descriptors, or of memory: it passes, and the door has to be there then."""
        shed = self._book.shed(SHED_AT_ONCE)
        now = self._loop.time()
        if now - self._warned_seconds > WARNING_INTERVAL_SECONDS:
            self._warned_seconds = now
            logger.warning(
                "cannot accept connections: %s; closed %d idle connections, and trying again "
                "every %g s",
                error.strerror or error,
                shed,
                REST_SECONDS,
            )
        self._loop.remove_reader(self._sock.fileno())
        self._rest = self._loop.call_later(REST_SECONDS, self._go_on)

    def _go_on(self) -> None:
        self._rest = None
        self._loop.add_reader(self._sock.fileno(), self._accept)


def _prepare(sock: socket.socket) -> None:
    """Send small parts at once, and find out about clients whose machine is gone.

    On Linux what is accepted has the options of the socket that listens.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
