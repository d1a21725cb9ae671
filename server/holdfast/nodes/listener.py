"""The head's port for followers: sockets, deadlines and limits around the `Head`."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial

from holdfast.errors import AddressInUseError, UsageError
from holdfast.labels import NodeRefusalReason
from holdfast.nodes.actions import Drop, HeadAction, HeadReport, PeerRefused, SendTo
from holdfast.nodes.addresses import HeadAddress, family_of
from holdfast.nodes.head import Head
from holdfast.nodes.messages import NONCE_BYTES
from holdfast.nodes.streams import ByteStream, accepted_stream, ended

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25
PAUSE_SECONDS = 0.1
"""The pause before the next accept when this process cannot open more files."""
WARNING_INTERVAL_SECONDS = 60.0
_TOLD_ONCE: frozenset[NodeRefusalReason] = frozenset({"not_needed"})
"""A spare is refused for as long as it waits, and nothing is wrong."""
BACKLOG = 128
CLOSE_DEADLINE_SECONDS = 5.0


class NodeListener:
    """Carries out the actions of a `Head` on the connections to its port.

    The caller of a method of the head passes the actions that it returns to `do`.
    """

    def __init__(
        self,
        head: Head,
        sock: socket.socket,
        *,
        on_report: Callable[[HeadReport], None],
        context: ssl.SSLContext | None,
    ) -> None:
        self._head = head
        self._sock = sock
        self._on_report = on_report
        self._context = context
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """The connections, from their acceptance to their end."""
        self._sockets: dict[int, socket.socket] = {}
        """The sockets of connections whose task has not begun."""
        self._streams: dict[int, ByteStream] = {}
        """The streams of connections that are set up."""
        self._warned_seconds: dict[NodeRefusalReason, float] = {}
        self._last_peer = 0

    def do(self, actions: Iterable[HeadAction]) -> None:
        """Carry out actions of the head, in their order."""
        for action in actions:
            match action:
                case SendTo(peer, data):
                    if (stream := self._streams.get(peer)) is not None:
                        stream.write(data)
                case Drop(peer):
                    self._drop(peer)
                case report:
                    if isinstance(report, PeerRefused):
                        self._warn(report)
                    self._on_report(report)

    async def accept(self) -> None:
        """Accept connections until it is cancelled, whatever the state of this machine."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._sock)
            except ConnectionError:  # the peer left before it was accepted
                continue
            except OSError:
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            self._last_peer += 1
            peer = self._last_peer
            self._sockets[peer] = sock
            self._tasks[peer] = asyncio.create_task(
                self._serve(peer), name=f"connection {peer} to the node port"
            )
            self._tasks[peer].add_done_callback(partial(self._forget, peer))
            # Before TLS, so that a stranger in its handshake counts as one.
            nonce = secrets.token_bytes(NONCE_BYTES)
            self.do(self._head.connected(peer, address[0], nonce, time.monotonic()))

    async def tick(self) -> None:
        """Tell the head the time until it is cancelled."""
        while True:
            self.do(self._head.tick(time.monotonic()))
            await asyncio.sleep(TICK_SECONDS)

    async def close(self) -> None:
        """Close what is left, after a moment for the last bytes."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=CLOSE_DEADLINE_SECONDS)
        for task in list(self._tasks.values()):
            await ended(task)

    async def _serve(self, peer: int) -> None:
        sock = self._sockets.pop(peer)
        stream = None
        try:
            stream = await accepted_stream(sock, self._context)
            self._streams[peer] = stream
            while data := await stream.read():
                self.do(self._head.received(peer, data, time.monotonic()))
        except OSError as error:  # ssl.SSLError is one
            reason = str(error) or "it closed the connection"
            self.do([PeerRefused("malformed", f"its TLS handshake failed: {reason}")])
        finally:
            self._streams.pop(peer, None)
            if stream is not None:
                stream.abort()
            self.do(self._head.disconnected(peer))

    def _warn(self, refusal: PeerRefused) -> None:
        """Log a refusal, unless there was one for the same reason: there may be many."""
        now = time.monotonic()
        warned = self._warned_seconds.get(refusal.reason, -math.inf)
        interval = math.inf if refusal.reason in _TOLD_ONCE else WARNING_INTERVAL_SECONDS
        if warned == -math.inf or now - warned > interval:
            self._warned_seconds[refusal.reason] = now
            logger.warning("refused a connection to the node port: %s", refusal.line)

    def _drop(self, peer: int) -> None:
        if (stream := self._streams.pop(peer, None)) is not None:
            stream.close()
        elif peer in self._tasks:  # in the TLS handshake
            self._tasks[peer].cancel()

    def _forget(self, peer: int, task: asyncio.Task[None]) -> None:
        del self._tasks[peer]
        if (sock := self._sockets.pop(peer, None)) is not None:
            sock.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a connection to the node port ended unexpectedly", exc_info=error)


@dataclass(frozen=True, slots=True)
class NodePort:
    """The head's port, and how it knows its followers."""

    sock: socket.socket
    address: str
    """The address of this machine that the followers reach."""
    key: bytes = field(repr=False)
    context: ssl.SSLContext | None


@contextmanager
def bound_node_port(
    address: str, port: int, *, key: bytes, context: ssl.SSLContext | None
) -> Iterator[NodePort]:
    """Bind the head's port at an address of this machine.

    Raises:
        AddressInUseError: another process has the port. UsageError: it cannot be bound.
    """
    with socket.socket(family_of(address), socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with _usable(HeadAddress(address, port)):
            sock.bind((address, port))
        yield NodePort(sock, address, key, context)


@contextmanager
def _usable(where: HeadAddress) -> Iterator[None]:
    """Raise our errors for those of a socket that shall listen there."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(
                f"{where} is in use by another process.",
                remedy="stop that process, or choose another --node-port.",
            ) from error
        raise UsageError(
            f"cannot listen on {where}: {error.strerror or error}.",
            remedy="choose another --node-port or --master-addr.",
        ) from error


@asynccontextmanager
async def listening_for_nodes(
    head: Head,
    sock: socket.socket,
    *,
    on_report: Callable[[HeadReport], None],
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[NodeListener]:
    """Accept followers on a bound socket while entered; they are told goodbye at the end.

    `on_report` gets everything that the head reports, on the event loop, and must not block.

    Raises:
        AddressInUseError: another process has begun to listen there since the socket was bound,
            which `SO_REUSEADDR` allows.
    """
    with _usable(HeadAddress(*sock.getsockname()[:2])):
        sock.listen(BACKLOG)
    sock.setblocking(False)
    listener = NodeListener(head, sock, on_report=on_report, context=context)
    tasks = [
        asyncio.create_task(listener.accept(), name="node port"),
        asyncio.create_task(listener.tick(), name="clock of the node port"),
    ]
    try:
        yield listener
    finally:
        for task in tasks:
            await ended(task)
        listener.do(head.leave("the server stops"))
        await listener.close()
