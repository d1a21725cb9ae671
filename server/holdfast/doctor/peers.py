"""Examines the way to other nodes, and what listens there.

A follower listens only for health checks, and a head for followers too. So the peer is asked at its
health port what it is, and both kinds of ports are tried.
"""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from holdfast.doctor.asking import ANSWERS_SECONDS, PeerReport, ask
from holdfast.doctor.links import Network, Route, route_to
from holdfast.doctor.peer_status import PeerStatus, read_status
from holdfast.doctor.reach import (
    Address,
    PacketAnswer,
    TcpProbe,
    full_packet_answer,
    probe_tcp,
    resolve,
    shortest_round_trip_seconds,
)
from holdfast.errors import UsageError
from holdfast.nodes.command_line import head_address
from holdfast.settings import ListenSettings, NodeSettings
from holdfast.settings.flag import port_number
from holdfast.settings.node_flags import FOLLOWER_PORT

NODE_PORT = NodeSettings().port
HEALTH_PORTS = (FOLLOWER_PORT, ListenSettings().port)
"""Where a follower answers, and where a head does."""
OTHER_PORTS = 3
"""How many ports are tried that nothing should listen on."""
_PORT_RANGE = Path("proc/sys/net/ipv4/ip_local_port_range")
_USUAL_PORTS = range(32768, 61000)
_ANSWERING = {"open", "closed"}


@dataclass(frozen=True, slots=True)
class PeerName:
    """A peer as it is given on the command line."""

    host: str
    node_port: int = NODE_PORT


def peer_name(text: str) -> PeerName:
    """Parse a peer as a follower parses the address of its head.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    try:
        return PeerName(*head_address(text))
    except UsageError:
        raise argparse.ArgumentTypeError(
            "expected HOST or HOST:PORT, with an IPv6 address in brackets before a port, not "
            f"{text!r}"
        ) from None


def peer_port(text: str) -> int:
    """Parse the port of a peer's health routes.

    Raises:
        argparse.ArgumentTypeError: it is not a port.
    """
    try:
        return port_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, not {text!r}") from None


@dataclass(frozen=True, slots=True)
class Peer:
    """What was found on the way to a peer, and there."""

    name: PeerName
    address: Address
    is_here: bool
    """Whether it is an address of this machine."""
    route: Route | None
    """None if this machine has no route to it."""
    tcp_probes: tuple[TcpProbe, ...]
    """At the node port, then at the health ports."""
    other_probes: tuple[TcpProbe, ...] = ()
    """At ports like those that vLLM, NCCL and gloo choose; none if the peer is not reachable."""
    round_trip_seconds: float | None = None
    packet_answer: PacketAnswer | None = None
    """What becomes of a packet as long as the interface allows; None if none was sent."""
    report: PeerReport | None = None
    """What a health port answers; None if none is open."""

    def __str__(self) -> str:
        if self.name.host == self.address.host:
            return self.name.host
        return f"{self.name.host} ({self.address.host})"

    @property
    def node_port(self) -> int:
        """The port where a head accepts followers."""
        return self.name.node_port

    @property
    def is_reachable(self) -> bool:
        """Whether the peer answered anything."""
        return any(one.outcome in _ANSWERING for one in self.tcp_probes)

    @property
    def is_head(self) -> bool:
        """Whether something accepts connections at the node port."""
        return self.tcp_probes[0].outcome == "open"

    @property
    def packet_bytes(self) -> int | None:
        """The largest packet of a connection, if one was open."""
        found = [one.packet_bytes for one in self.tcp_probes if one.packet_bytes is not None]
        return min(found, default=None)

    @property
    def status(self) -> PeerStatus | None:
        """What the peer says of itself; None if it says nothing, or is not ours."""
        return read_status(self.report.document) if self.report is not None else None


def examine(
    name: PeerName,
    network: Network,
    health_ports: Sequence[int] = HEALTH_PORTS,
    *,
    answers_seconds: float = ANSWERS_SECONDS,
    root: Path = Path("/"),
) -> Peer:
    """Examine the way to a peer; `root` has the `proc` of this machine.

    Raises:
        UsageError: the name does not resolve.
    """
    address = resolve(name.host)[0]
    route = route_to(address, network)
    tcp_probes = _probe_everywhere(address, (name.node_port, *health_ports))
    is_loopback = ipaddress.ip_address(address.host).is_loopback
    is_here = is_loopback or network.has_address(address.host)
    peer = Peer(name, address, is_here, route, tcp_probes)
    if not peer.is_reachable:
        return peer
    open_ports = [one.port for one in reversed(tcp_probes) if one.outcome == "open"]
    return replace(
        peer,
        other_probes=_probe_everywhere(address, _other_ports(root)),
        round_trip_seconds=(
            shortest_round_trip_seconds(address, open_ports[0]) if open_ports else None
        ),
        packet_answer=None if is_here else _packet_answer(address, route),
        report=_report(address, tcp_probes[1:], answers_seconds),
    )


def _probe_everywhere(address: Address, ports: Sequence[int]) -> tuple[TcpProbe, ...]:
    """Probe all ports at once, because each may take as long as its deadline."""
    with ThreadPoolExecutor() as pool:
        return tuple(pool.map(partial(probe_tcp, address), ports))


def _other_ports(root: Path) -> list[int]:
    """Return ports of the range from which the kernel chooses one if a program does not."""
    ports = range(0)
    with suppress(OSError, ValueError):
        first, last = map(int, (root / _PORT_RANGE).read_text(encoding="ascii").split())
        ports = range(first, last + 1)
    ports = ports or _USUAL_PORTS
    parts = range(1, OTHER_PORTS + 1)
    return list(dict.fromkeys(ports[len(ports) * part // (OTHER_PORTS + 1)] for part in parts))


def _packet_answer(address: Address, route: Route | None) -> PacketAnswer | None:
    if route is None or route.interface is None or route.interface.mtu_bytes is None:
        return None
    return full_packet_answer(address, route.interface.mtu_bytes)


def _report(
    address: Address, tcp_probes: Sequence[TcpProbe], deadline_seconds: float
) -> PeerReport | None:
    """Return the answers of the first health port that is one of ours, else of the first."""
    first = None
    for one in tcp_probes:
        if one.outcome == "open":
            report = ask(address, one.port, deadline_seconds)
            if read_status(report.document) is not None:
                return report
            first = first or report
    return first
