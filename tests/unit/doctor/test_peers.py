"""A peer is found and examined, on real sockets."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from holdfast.doctor.links import Network, read_network
from holdfast.doctor.peers import NODE_PORT, OTHER_PORTS, PeerName, examine, peer_name
from holdfast.errors import UsageError
from peer_records import FOLLOWER, HEAD
from peer_servers import answer, answering, closed_ports, peer_server, silent, telling

PATIENCE_SECONDS = 120.0


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("spark2", PeerName("spark2", NODE_PORT)),
        ("10.0.0.2:29601", PeerName("10.0.0.2", 29601)),
        ("[fe80::1%eth0]", PeerName("fe80::1%eth0", NODE_PORT)),
        ("[::1]:5", PeerName("::1", 5)),
        ("::1", PeerName("::1", NODE_PORT)),
    ],
)
def test_a_peer_is_given_as_a_follower_gives_its_head(text: str, name: PeerName) -> None:
    """The port is that for followers."""
    assert peer_name(text) == name


@pytest.mark.parametrize(
    "text", ["", ":1", "a:", "a:b", "a:0", "a:65536", "::1:", "http://a", "[::1", "[]", "a:1:2"]
)
def test_anything_else_is_refused(text: str) -> None:
    """It is bad usage."""
    with pytest.raises(argparse.ArgumentTypeError):
        peer_name(text)


def test_a_follower_is_found_at_its_health_port(tmp_path: Path) -> None:
    """Its node port is closed, and it says what it is."""
    with closed_ports(2) as (node, other), peer_server(telling(FOLLOWER)) as health:
        peer = examine(
            PeerName("127.0.0.1", node),
            read_network(),
            (other, health),
            answers_seconds=PATIENCE_SECONDS,
            root=tmp_path,
        )
    assert [one.outcome for one in peer.tcp_probes] == ["closed", "closed", "open"]
    assert (peer.is_here, peer.is_reachable, peer.is_head) == (True, True, False)
    assert peer.status is not None
    assert peer.status.role == "follower"
    assert peer.round_trip_seconds is not None
    assert len(peer.other_probes) == OTHER_PORTS
    assert {one.outcome for one in peer.other_probes} <= {"open", "closed"}


def test_a_head_is_found_behind_a_server_of_something_else() -> None:
    """The first health port that is one of ours counts."""
    with (
        peer_server(silent) as node,
        peer_server(answering(answer(b"[]"))) as other,
        peer_server(telling(HEAD)) as health,
    ):
        peer = examine(
            PeerName("127.0.0.1", node),
            read_network(),
            (other, health),
            answers_seconds=PATIENCE_SECONDS,
        )
    assert peer.is_head
    assert peer.report is not None
    assert peer.report.port == health
    assert peer.status is not None
    assert peer.status.role == "head"


def test_a_server_of_something_else_is_reported() -> None:
    """With what is wrong with it."""
    with closed_ports(1) as (node,), peer_server(answering(answer(b"[]"))) as health:
        peer = examine(
            PeerName("127.0.0.1", node),
            read_network(),
            (health,),
            answers_seconds=PATIENCE_SECONDS,
        )
    assert peer.status is None
    assert peer.report is not None
    assert peer.report.problem == "/statusz is not a JSON object"


def test_a_machine_where_nothing_listens_is_reachable() -> None:
    """There is nobody to ask."""
    with closed_ports(2) as (node, health):
        peer = examine(PeerName("localhost", node), read_network(), (health,))
    assert (peer.is_reachable, peer.report, peer.round_trip_seconds) == (True, None, None)
    assert str(peer).startswith("localhost (")


def test_a_machine_that_cannot_be_reached_is_not_examined_further() -> None:
    """Its ports are not tried one by one."""
    peer = examine(PeerName("255.255.255.255", 1), Network(()), (2,))
    assert (peer.is_reachable, peer.route, peer.other_probes) == (False, None, ())
    assert peer.packet_answer is None


@pytest.mark.parametrize("text", ["40000\t40003\n", "5 1\n", "many\n", "7 7\n"])
def test_the_other_ports_are_those_that_the_kernel_chooses(tmp_path: Path, text: str) -> None:
    """From its own range, or from the usual one if that cannot be read."""
    path = tmp_path / "proc/sys/net/ipv4/ip_local_port_range"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with closed_ports(1) as (port,):
        peer = examine(PeerName("127.0.0.1", port), Network(()), (port,), root=tmp_path)
    ports = [one.port for one in peer.other_probes]
    assert ports == {
        "40000\t40003\n": [40001, 40002, 40003],
        "7 7\n": [7],
    }.get(text, [39826, 46884, 53942])


def test_a_name_that_does_not_resolve_is_refused() -> None:
    """It is a finding of the command."""
    with pytest.raises(UsageError, match="does not resolve"):
        examine(PeerName("a..b"), Network(()))


def test_the_address_decides_whether_a_peer_is_this_machine() -> None:
    """Any address of loopback is."""
    with closed_ports(1) as (port,):
        assert examine(PeerName("127.0.0.8", port), Network(()), (port,)).is_here
