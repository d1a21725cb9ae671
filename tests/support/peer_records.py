"""A follower on another node, as the doctor finds it: a DGX Spark at the other end of a cable."""

from __future__ import annotations

import socket
from datetime import UTC, datetime
from typing import Any

from holdfast.doctor.asking import PeerAnswer, PeerReport
from holdfast.doctor.links import Interface, Network, Route
from holdfast.doctor.peers import Peer, PeerName
from holdfast.doctor.reach import Address, TcpProbe
from node_pairs import FACTS

HERE, THERE = "192.168.177.11", "192.168.177.12"
NOW_SECONDS = 1_800_000_000.0

CABLE = Interface(
    "enp1s0f1np1",
    (HERE,),
    mtu_bytes=9000,
    speed_megabits=200_000,
    is_physical=True,
    rdma_devices=("rocep1s0f1",),
)
LOOPBACK = Interface("lo", ("127.0.0.1", "::1"), mtu_bytes=65536)
OFFICE = Interface("enP7s7", ("10.1.0.5",), mtu_bytes=1500, speed_megabits=10_000, is_physical=True)
WIRELESS = Interface("wlP9s9", ("10.2.0.5",), mtu_bytes=1500, is_physical=True, is_wireless=True)
NETWORK = Network((LOOPBACK, CABLE, OFFICE, WIRELESS), has_verbs=True)

FOLLOWER: dict[str, Any] = {
    "state": "waiting",
    "node": "spark2",
    "head": f"{HERE}:29600",
    "is_connected": True,
    "problem": "",
    "facts": {"holdfast_version": FACTS.holdfast_version},
}
HEAD: dict[str, Any] = {
    "state": "READY",
    "engine": {"generation": 1},
    "configuration": {"versions": {"holdfast": FACTS.holdfast_version, "vllm": "0.32.0"}},
}


def an_answer(*, ahead_seconds: float = 0.0) -> PeerAnswer:
    """An answer of a peer whose clock is ahead."""
    there = datetime.fromtimestamp(NOW_SECONDS + ahead_seconds, UTC)
    date = there.strftime("%a, %d %b %Y %H:%M:%S GMT")
    return PeerAnswer(200, b"", date, NOW_SECONDS, NOW_SECONDS + 0.001)


def report(document: dict[str, Any]) -> PeerReport:
    """What a health port answered that answers well."""
    return PeerReport(8001, document, answers=(an_answer(),))


PEER = Peer(
    PeerName("spark2"),
    Address(socket.AF_INET, THERE),
    is_here=False,
    route=Route(HERE, CABLE),
    tcp_probes=(
        TcpProbe(29600, "closed"),
        TcpProbe(8001, "open", round_trip_seconds=0.0001, packet_bytes=9000),
        TcpProbe(8000, "closed"),
    ),
    other_probes=(TcpProbe(40000, "closed"), TcpProbe(50000, "closed")),
    round_trip_seconds=0.0001,
    packet_answer="answered",
    report=report(FOLLOWER),
)
"""With nothing wrong."""
