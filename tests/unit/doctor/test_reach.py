"""What the network does to packets for a peer, on real sockets."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress

import pytest

from holdfast.doctor.reach import (
    Address,
    full_packet_answer,
    probe_tcp,
    resolve,
    shortest_round_trip_seconds,
)
from holdfast.errors import UsageError
from peer_servers import closed_ports, peer_server, silent

HERE = Address(socket.AF_INET, "127.0.0.1")


def test_an_open_port_tells_the_round_trip_and_the_length_of_packets() -> None:
    """From the kernel, which measured both when it connected."""
    with peer_server(silent) as port:
        found = probe_tcp(HERE, port)
        shortest_seconds = shortest_round_trip_seconds(HERE, port)
    assert (found.port, found.outcome) == (port, "open")
    assert found.round_trip_seconds is not None
    assert found.packet_bytes is not None
    assert found.packet_bytes > 1280
    assert shortest_seconds is not None
    assert 0 < shortest_seconds < 60


def test_the_length_of_packets_is_what_both_ends_take() -> None:
    """A peer with a shorter MTU says so when it accepts the connection."""
    with socket.socket() as server:
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1460)
        server.bind(("127.0.0.1", 0))
        server.listen()
        found = probe_tcp(HERE, server.getsockname()[1])
    assert found.packet_bytes == 1500


def test_a_port_that_nothing_listens_on_is_closed() -> None:
    """The peer is there."""
    with closed_ports(1) as (port,):
        assert probe_tcp(HERE, port).outcome == "closed"
        assert shortest_round_trip_seconds(HERE, port) is None


def test_a_port_that_does_not_answer_is_silent() -> None:
    """As behind a firewall; the attempt ends at its deadline."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = server.getsockname()
        for _ in range(4):  # the kernel drops what does not fit into the queue
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with suppress(BlockingIOError):
                filler.connect(address)
        assert probe_tcp(HERE, address[1], 0.2).outcome == "silent"


def test_a_peer_without_a_route_is_unreachable() -> None:
    """With the words of the kernel."""
    found = probe_tcp(Address(socket.AF_INET, "255.255.255.255"), 29600)
    assert found.outcome == "unreachable"
    assert found.detail


def test_a_name_has_its_addresses() -> None:
    """Numeric ones are their own."""
    assert resolve("127.0.0.1") == (HERE,)
    assert HERE in resolve("localhost")
    assert resolve("::1") == (Address(socket.AF_INET6, "::1"),)


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b", "x" * 300])
def test_a_name_without_an_address_is_refused(name: str) -> None:
    """It is named, with a remedy, within the deadline."""
    with pytest.raises(UsageError, match="does not resolve") as caught:
        resolve(name, deadline_seconds=2.0)
    assert name in caught.value.cause
    assert caught.value.remedy


@pytest.mark.parametrize("address", [HERE, Address(socket.AF_INET6, "::1")], ids=["IPv4", "IPv6"])
def test_a_packet_that_arrives_is_answered(address: Address) -> None:
    """By the peer's kernel, since nothing listens there."""
    assert full_packet_answer(address, 1500) == "answered"


def test_a_packet_that_is_too_long_is_refused_on_the_way() -> None:
    """No interface takes it."""
    assert full_packet_answer(HERE, 65_560) == "too_long"


def test_a_peer_that_answers_no_packet_at_all_shows_nothing() -> None:
    """Here a program listens and does not answer."""
    address = Address(socket.AF_INET, "127.0.0.77")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.77", 33434))
        assert full_packet_answer(address, 1500, 0.1) == "unknown"
