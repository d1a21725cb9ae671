"""Does a peer answer, and is it like this machine? Pure functions of records."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import replace

from holdfast.doctor.asking import PeerReport
from holdfast.doctor.findings import Finding, HazardName, failure, gib, ok, warning
from holdfast.doctor.peer_status import PeerStatus, clock_bounds_seconds
from holdfast.doctor.peers import Peer
from holdfast.nodes.facts import FACT_NAMES, differences
from holdfast.nodes.messages import NodeFacts

SLOW_ROUND_TRIP_SECONDS = 0.002
"""A cable takes a tenth of it; a layer waits for two round trips or more."""
CLOCK_SECONDS = 5.0
UNEQUAL_MEMORY = 0.8
_UNCHECKED = "versions, clock and memory are not checked"


def check_peer(peer: Peer, facts: NodeFacts, available_bytes: int) -> Iterator[Finding]:
    """Yield every finding about the peer itself.

    `facts` and `available_bytes` are those of this machine.
    """
    yield from _check_answers(peer)
    yield from _check_other_ports(peer)
    yield from _check_round_trip(peer)
    if peer.report is None or peer.status is None:
        return
    yield _check_clock(peer.report)
    yield from _check_versions(peer.status, facts)
    yield _check_memory(peer.status, available_bytes)


def _check_answers(peer: Peer) -> Iterator[Finding]:
    name: HazardName = "peer"
    if peer.is_here:
        yield warning(name, f"{peer} is this machine.", "name the other node.")
    if not peer.is_reachable:
        details = {one.detail for one in peer.tcp_probes if one.detail}
        problem = ", ".join(sorted(details)) or f"nothing answers on {_ports(peer)}"
        yield failure(
            name,
            f"{peer} cannot be reached: {problem}.",
            "check the cable, the address (`ping`) and the firewalls of both nodes.",
        )
    elif peer.report is None:
        yield _silence(peer)
    elif peer.status is None:
        problem = peer.report.problem or "its /statusz is not that of Holdfast"
        yield warning(
            name,
            f"port {peer.report.port} of {peer} is open, but {problem}: {_UNCHECKED}.",
            "give the port of its health routes with --peer-port, or run `holdfast doctor` there "
            "with --peer and the address of this node.",
        )
    else:
        yield _check_state(peer, peer.status)


def _silence(peer: Peer) -> Finding:
    if peer.is_head:
        return warning(
            "peer",
            f"port {peer.node_port} of {peer} is open, but no health port: {_UNCHECKED}.",
            "give the port of its health routes with --peer-port, and let it through the firewall.",
        )
    return warning(
        "peer",
        f"{peer} is reachable, but nothing listens on {_ports(peer)}: {_UNCHECKED}.",
        "start `holdfast follow` there, or the head, and check again.",
    )


def _check_state(peer: Peer, status: PeerStatus) -> Finding:
    name = f" {status.name}" if status.name else ""
    seen = f"{peer} is a {status.role}{name} in state {status.state}"
    if status.problem:
        return warning("peer", f"{seen}: {status.problem}", "correct that; it tries again.")
    if status.role == "head" and not peer.is_head:
        return warning(
            "peer",
            f"{seen}, but its port {peer.node_port} does not accept followers.",
            "start it with --nnodes, give its --node-port in --peer HOST:PORT, and let that "
            "through the firewall.",
        )
    return ok("peer", seen)


def _check_other_ports(peer: Peer) -> Iterator[Finding]:
    name: HazardName = "ports"
    kept = [str(one.port) for one in peer.other_probes if one.outcome in {"silent", "unreachable"}]
    if kept:
        yield warning(
            name,
            f"a firewall keeps connections from ports {', '.join(kept)} of {peer}: vLLM, NCCL and "
            "gloo choose their ports themselves, and would wait for each other.",
            "let every TCP port through between the nodes, for example `ufw allow from ADDRESS` "
            "on each with the address of the other.",
        )
    elif peer.other_probes:
        yield ok(name, "no firewall found")


def _check_round_trip(peer: Peer) -> Iterator[Finding]:
    name: HazardName = "round-trip"
    taken_seconds = peer.round_trip_seconds
    if taken_seconds is None:
        return
    seen = f"{taken_seconds * 1000:.2f} ms to the peer and back"
    if taken_seconds > SLOW_ROUND_TRIP_SECONDS:
        yield warning(
            name,
            f"{seen}: the ranks wait this long several times in each layer.",
            "connect the nodes with one cable or switch, and use the addresses of its interfaces.",
        )
    else:
        yield ok(name, seen)


def _check_clock(report: PeerReport) -> Finding:
    name: HazardName = "clock"
    bounds = clock_bounds_seconds(report.answers)
    if bounds is None:
        return warning(name, "the peer does not report its time.", "compare `date` on both nodes.")
    earliest, latest = bounds
    apart_seconds = max(earliest, -latest, 0.0)
    if apart_seconds > CLOCK_SECONDS:
        return warning(
            name,
            f"the clocks differ by at least {apart_seconds:.0f} s: logs cannot be compared, and "
            "certificates may seem invalid.",
            "synchronise both: `timedatectl set-ntp true`.",
        )
    return ok(name, f"the clocks agree to {max(abs(earliest), abs(latest)):.0f} s")


def _check_versions(status: PeerStatus, facts: NodeFacts) -> Iterator[Finding]:
    name: HazardName = "peer-versions"
    theirs = replace(facts, **status.facts)
    head, follower, node = (facts, theirs, status.name or "the peer")
    if status.role == "head":
        head, follower, node = theirs, facts, platform.node()
    found = [failure(name, *one) for one in differences(head, follower, node)]
    told = [known_as for fact, known_as in FACT_NAMES.items() if status.facts.get(fact)]
    yield from found or [ok(name, f"equal: {', '.join(told) or 'the peer reports none'}")]


def _check_memory(status: PeerStatus, available_bytes: int) -> Finding:
    name: HazardName = "peer-memory"
    here = f"{gib(available_bytes)} of memory available here"
    theirs_bytes = status.memory_available_bytes
    if theirs_bytes is None:
        return ok(name, f"{here}; the peer does not report it, so run `holdfast doctor` there too")
    seen = f"{here}, {gib(theirs_bytes)} on the peer"
    if min(available_bytes, theirs_bytes) < UNEQUAL_MEMORY * max(available_bytes, theirs_bytes):
        return warning(
            name,
            f"{seen}: with unified memory, every rank gets what the smallest can have.",
            "end what holds memory on the node that has less.",
        )
    return ok(name, seen)


def _ports(peer: Peer) -> str:
    *ports, last = (str(one.port) for one in peer.tcp_probes)
    return f"ports {', '.join(ports)} and {last}" if ports else f"port {last}"
