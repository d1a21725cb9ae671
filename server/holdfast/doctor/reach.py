"""What does the network do to packets for a peer? Connections and datagrams, each with a deadline.

Nothing is asked of the peer except what every machine answers: whether a port is open, and that
nothing listens on one.
"""

from __future__ import annotations

import errno
import queue
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import UsageError

RESOLVE_SECONDS = 15.0
"""Longer than the three attempts of the usual resolver at one name server."""
CONNECT_SECONDS = 2.0
DATAGRAM_SECONDS = 1.0
ROUND_TRIPS = 5
SMALL_PACKET_BYTES = 576
"""Every host accepts a packet of this size: https://www.rfc-editor.org/rfc/rfc791#section-3.1."""
_FULL_PACKET_TRIES = 3
_UNUSED_PORT = 33434
"""Where traceroute begins, since no program listens there."""
_IP_HEADER_BYTES = {socket.AF_INET: 20, socket.AF_INET6: 40}
_TCP_HEADER_BYTES = 20
_UDP_HEADER_BYTES = 8
_TIMESTAMPS_BYTES = 12
"""What the option takes from each segment of a connection that uses it."""
_HAS_TIMESTAMPS = 1
_TCP_INFO = struct.Struct("=8B24I")
"""The beginning of `tcp_info` in linux/tcp.h."""
_OPTIONS, _SEGMENT_BYTES, _ROUND_TRIP_MICROSECONDS = 5, 8 + 2, 8 + 15
"""The positions of these numbers in it."""
_DISCOVERY = {
    socket.AF_INET: (socket.IPPROTO_IP, 10, 3),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 23, 3),
}
"""The numbers of IP_MTU_DISCOVER and IP_PMTUDISC_PROBE, which Python does not name: do not
fragment, and do not believe what was learned of the path before."""

ReachOutcome = Literal["open", "closed", "silent", "unreachable"]
PacketAnswer = Literal["answered", "too_long", "lost", "unknown"]


@dataclass(frozen=True, slots=True)
class Address:
    """A numeric address."""

    family: socket.AddressFamily
    host: str
    scope: int = 0
    """The number of the interface that a link-local address of IPv6 belongs to."""

    def at(self, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
        """Return what a socket connects to."""
        if self.family == socket.AF_INET6:
            return (self.host, port, 0, self.scope)
        return (self.host, port)


@dataclass(frozen=True, slots=True)
class TcpProbe:
    """What came of one attempt to connect."""

    port: int
    outcome: ReachOutcome
    """`closed` if the peer refuses, `silent` if nothing answers, else `unreachable`."""
    detail: str = ""
    """What the kernel says, if the peer is unreachable."""
    round_trip_seconds: float | None = None
    """As the kernel measured it; None unless the port is open."""
    packet_bytes: int | None = None
    """The largest packet that both ends would send in this connection: the smaller MTU of the two
    interfaces. None unless the port is open."""


def resolve(name: str, deadline_seconds: float = RESOLVE_SECONDS) -> tuple[Address, ...]:
    """Return the addresses of a host, in the order in which a program would try them.

    Raises:
        UsageError: there are none, or the name servers do not answer in time.
    """
    answers: queue.SimpleQueue[tuple[Address, ...] | str] = queue.SimpleQueue()
    # The resolver of the C library cannot be interrupted. A daemon does not keep the process.
    threading.Thread(
        target=lambda: answers.put(_resolved(name)), name="resolver", daemon=True
    ).start()
    try:
        answer = answers.get(timeout=deadline_seconds)
    except queue.Empty:
        answer = f"no name server answers within {deadline_seconds:g} s"
    if isinstance(answer, str):
        raise UsageError(
            f"{name} does not resolve: {answer}.", remedy="correct the name, or give an address."
        )
    return answer


def _resolved(name: str) -> tuple[Address, ...] | str:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:
        return "it is not a name"
    addresses = []
    for family, *_, (host, _, *more) in found:
        if family in _DISCOVERY:
            numeric = str(host).partition("%")[0]  # the scope is a number of its own
            addresses.append(Address(family, numeric, int(more[1]) if more else 0))
    return tuple(dict.fromkeys(addresses)) or "it has no address"


def probe_tcp(address: Address, port: int, deadline_seconds: float = CONNECT_SECONDS) -> TcpProbe:
    """Connect to a port and close the connection again."""
    with socket.socket(address.family, socket.SOCK_STREAM) as sock:
        sock.settimeout(deadline_seconds)
        try:
            sock.connect(address.at(port))
            return _opened(address, port, sock)
        except TimeoutError:
            return TcpProbe(port, "silent")
        except (ConnectionRefusedError, ConnectionResetError):
            return TcpProbe(port, "closed")
        except OSError as error:
            return TcpProbe(port, "unreachable", error.strerror or str(error))


def shortest_round_trip_seconds(
    address: Address, port: int, deadline_seconds: float = CONNECT_SECONDS
) -> float | None:
    """Return the shortest of a few round trips to an open port; None if one fails."""
    times = []
    for _ in range(ROUND_TRIPS):
        found = probe_tcp(address, port, deadline_seconds).round_trip_seconds
        if found is None:
            return None
        times.append(found)
    return min(times)


def full_packet_answer(
    address: Address, packet_bytes: int, deadline_seconds: float = DATAGRAM_SECONDS
) -> PacketAnswer:
    """Return whether a packet of that size reaches the peer in one piece.

    The packet is a datagram to a port where nothing listens, which the peer answers with an ICMP
    error. It is `too_long` if a router says so, `lost` if the peer answers only shorter ones, and
    `unknown` if it answers none.
    """
    answer = _answer(address, packet_bytes, deadline_seconds)
    if answer != "lost":
        return answer
    shorter = _answer(address, SMALL_PACKET_BYTES, deadline_seconds)
    if shorter != "answered":
        return "unknown"
    for _ in range(_FULL_PACKET_TRIES - 1):
        answer = _answer(address, packet_bytes, deadline_seconds)
        if answer != "lost":
            return answer
    return "lost"


def _answer(address: Address, packet_bytes: int, deadline_seconds: float) -> PacketAnswer:
    """Return what becomes of one datagram; `lost` if nothing answers it."""
    level, option, probe = _DISCOVERY[address.family]
    payload_bytes = packet_bytes - _IP_HEADER_BYTES[address.family] - _UDP_HEADER_BYTES
    with socket.socket(address.family, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(level, option, probe)
        sock.settimeout(deadline_seconds)
        try:
            sock.connect(address.at(_UNUSED_PORT))
            sock.send(bytes(payload_bytes))
            sock.recv(1)
        except ConnectionRefusedError:
            return "answered"
        except TimeoutError:
            return "lost"
        except OSError as error:
            return "too_long" if error.errno == errno.EMSGSIZE else "unknown"
    return "answered"


def _opened(address: Address, port: int, sock: socket.socket) -> TcpProbe:
    """Return what the kernel knows about a connection that was just made."""
    with suppress(struct.error):  # an older kernel's record is shorter
        known = _TCP_INFO.unpack(
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        )
        headers_bytes = _IP_HEADER_BYTES[address.family] + _TCP_HEADER_BYTES
        if known[_OPTIONS] & _HAS_TIMESTAMPS:
            headers_bytes += _TIMESTAMPS_BYTES
        return TcpProbe(
            port,
            "open",
            round_trip_seconds=known[_ROUND_TRIP_MICROSECONDS] / 1e6,
            packet_bytes=known[_SEGMENT_BYTES] + headers_bytes,
        )
    return TcpProbe(port, "open")
