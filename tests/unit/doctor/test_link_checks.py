"""Each hazard of the way to a peer, from records of networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from holdfast.doctor.findings import Finding, Severity
from holdfast.doctor.link_checks import check_link, nccl_selected
from holdfast.doctor.links import Interface, Network, Route
from holdfast.doctor.machine import Machine
from holdfast.doctor.parallelism import Layout
from holdfast.doctor.peers import Peer
from machines import CPU, CUDA, SPARK
from peer_records import CABLE, HERE, LOOPBACK, NETWORK, OFFICE, PEER, WIRELESS

PLAIN = replace(CABLE, rdma_devices=())


def every(
    peer: Peer = PEER,
    network: Network = NETWORK,
    machine: Machine = SPARK,
    layout: Layout = Layout(),  # noqa: B008 - frozen
) -> list[Finding]:
    """All findings about the way."""
    return list(check_link(peer, network, machine, layout))


def found(*arguments: Any, **named: Any) -> dict[str, Finding]:
    """The findings by name."""
    return {one.name: one for one in every(*arguments, **named)}


def through(interface: Interface, *others: Interface) -> tuple[Peer, Network]:
    """A peer that this interface leads to, on a machine that has others."""
    route = Route(interface.addresses[0], interface)
    tcp_probes = tuple(replace(one, packet_bytes=interface.mtu_bytes) for one in PEER.tcp_probes)
    network = replace(NETWORK, interfaces=(LOOPBACK, interface, *others))
    return replace(PEER, route=route, tcp_probes=tcp_probes), network


def with_variables(machine: Machine, variables: Mapping[str, str]) -> Machine:
    """The same machine with other variables."""
    return replace(machine, environment=variables)


def test_a_sound_link_has_no_finding() -> None:
    """Two Sparks and one cable, as the guides ask for it."""
    findings = found()
    assert {one.severity for one in findings.values()} == {Severity.OK}
    assert set(findings) == {"path-mtu", "link", "rdma", "interfaces"}
    assert findings["link"].seen == "enp1s0f1np1 (200 Gbit/s)"
    assert findings["interfaces"].seen == f"{HERE} on enp1s0f1np1 leads to the peer"


@pytest.mark.parametrize("peer", [replace(PEER, is_here=True), replace(PEER, route=None)])
def test_without_a_link_there_is_nothing_to_find(peer: Peer) -> None:
    """This machine itself, or a peer without a route to it."""
    assert every(peer) == []


def test_a_peer_that_takes_shorter_packets_is_a_warning() -> None:
    """Both lengths are named."""
    tcp_probes = tuple(replace(one, packet_bytes=1500) for one in PEER.tcp_probes)
    finding = found(replace(PEER, tcp_probes=tcp_probes))["path-mtu"]
    assert finding.severity == "warning"
    assert "9000 bytes, and the peer takes packets of 1500" in finding.seen
    assert "mtu 9000" in finding.remedy


@pytest.mark.parametrize("answer", ["lost", "too_long"])
def test_packets_that_do_not_get_through_are_a_warning(answer: Any) -> None:
    """A switch in between has a shorter MTU than both ends."""
    finding = found(replace(PEER, packet_answer=answer))["path-mtu"]
    assert finding.severity == "warning"
    assert "9000 bytes" in finding.seen


@pytest.mark.parametrize(
    ("mtu_bytes", "speed_megabits", "severity"),
    [
        (1500, 200_000, "warning"),
        (1500, 100_000, "warning"),
        (1500, 10_000, "ok"),
        (1500, None, "ok"),
        (4200, 200_000, "ok"),
    ],
)
def test_a_fast_link_has_long_packets(
    mtu_bytes: int, speed_megabits: int | None, severity: str
) -> None:
    """From 100 Gbit/s on."""
    peer, network = through(replace(CABLE, mtu_bytes=mtu_bytes, speed_megabits=speed_megabits))
    assert found(peer, network)["path-mtu"].severity == severity


def test_an_interface_with_a_huge_mtu_is_not_called_wrong() -> None:
    """The first window of a connection is shorter than its packets."""
    peer, network = through(replace(CABLE, mtu_bytes=65520))
    tcp_probes = tuple(replace(one, packet_bytes=32_793) for one in peer.tcp_probes)
    assert found(replace(peer, tcp_probes=tcp_probes), network)["path-mtu"].severity == "ok"


def test_a_way_that_was_not_tried_is_said_to_be_unknown() -> None:
    """A firewall keeps the answers."""
    assert "was not tried" in found(replace(PEER, packet_answer="unknown"))["path-mtu"].seen
    assert "was not tried" not in found()["path-mtu"].seen
    peer, network = through(replace(CABLE, mtu_bytes=None))
    assert "path-mtu" not in found(peer, network)


@pytest.mark.parametrize("slow", [OFFICE, WIRELESS], ids=["office", "wireless"])
def test_a_slow_way_beside_a_fast_one_is_a_warning(slow: Interface) -> None:
    """Both are named; the fast one may have no address yet."""
    finding = found(*through(slow, replace(CABLE, addresses=())))["link"]
    assert finding.severity == "warning"
    assert slow.name in finding.seen
    assert "enp1s0f1np1 (200 Gbit/s) is up" in finding.seen


@pytest.mark.parametrize(
    "other",
    [
        replace(CABLE, is_up=False),
        replace(CABLE, is_physical=False),
        replace(CABLE, speed_megabits=None),
    ],
    ids=["down", "virtual", "unknown"],
)
def test_an_interface_that_is_no_faster_way_is_not_named(other: Interface) -> None:
    """It is down, leads nowhere, or tells no speed."""
    assert found(*through(OFFICE, other))["link"].severity == "ok"


def test_a_wireless_way_is_a_warning() -> None:
    """Even if there is no other."""
    finding = found(*through(WIRELESS))["link"]
    assert (finding.severity, "wireless" in finding.seen) == ("warning", True)


@pytest.mark.parametrize(
    ("speed_megabits", "severity"), [(1000, "warning"), (10_000, "ok"), (None, "ok")]
)
def test_a_slow_way_is_a_warning(speed_megabits: int | None, severity: str) -> None:
    """A virtual interface does not tell."""
    finding = found(*through(replace(PLAIN, speed_megabits=speed_megabits)))["link"]
    assert finding.severity == severity


@pytest.mark.parametrize(
    ("variables", "network"),
    [
        ({"NCCL_IB_DISABLE": "1"}, NETWORK),
        ({}, replace(NETWORK, has_verbs=False)),
        ({}, replace(NETWORK, has_memory_lock_limit=True)),
        ({"NCCL_IB_HCA": "roceP2p1s0f1"}, NETWORK),
        ({"NCCL_IB_HCA": "^rocep1s0f1:1"}, NETWORK),
        ({"NCCL_IB_GID_INDEX": "3"}, NETWORK),
    ],
    ids=["disabled", "no devices", "limit", "another", "excluded", "index"],
)
def test_what_keeps_nccl_from_rdma_is_a_warning(
    variables: dict[str, str], network: Network
) -> None:
    """It would send over TCP, or fail to lock its memory."""
    finding = found(network=network, machine=with_variables(SPARK, variables))["rdma"]
    assert finding.severity == "warning"
    assert finding.remedy


@pytest.mark.parametrize(
    "variables",
    [{"NCCL_IB_DISABLE": "0"}, {"NCCL_IB_HCA": "roce"}, {"NCCL_IB_HCA": "=rocep1s0f1:1"}],
)
def test_what_lets_nccl_use_rdma_is_no_hazard(variables: dict[str, str]) -> None:
    """As the guides set it."""
    assert found(machine=with_variables(SPARK, variables))["rdma"].severity == "ok"


def test_both_halves_of_the_port_of_a_spark_are_used() -> None:
    """The guides name both devices; elsewhere, NCCL chooses well."""
    twin = replace(CABLE, name="enP2p1s0f1np1", addresses=(), rdma_devices=("roceP2p1s0f1",))
    network = replace(NETWORK, interfaces=(*NETWORK.interfaces, twin))
    finding = found(network=network)["rdma"]
    assert finding.severity == "warning"
    assert "NCCL_IB_HCA=rocep1s0f1,roceP2p1s0f1" in finding.remedy
    given = with_variables(SPARK, {"NCCL_IB_HCA": "rocep1s0f1,roceP2p1s0f1"})
    assert found(network=network, machine=given)["rdma"].severity == "ok"
    assert found(network=network, machine=CUDA)["rdma"].severity == "ok"


@pytest.mark.parametrize("machine", [CPU, SPARK])
def test_without_rdma_there_is_nothing_to_find(machine: Machine) -> None:
    """The build for CPUs has no NCCL, and not every interface has a device."""
    peer, network = (PEER, NETWORK) if machine is CPU else through(PLAIN)
    assert "rdma" not in found(peer, network, machine)


@pytest.mark.parametrize(
    ("variables", "severity"),
    [
        ({"VLLM_HOST_IP": HERE}, "ok"),
        ({"VLLM_HOST_IP": "10.1.0.5"}, "warning"),
        ({"VLLM_HOST_IP": "10.9.9.9"}, "failure"),
        ({"VLLM_HOST_IP": ""}, "ok"),
        ({"GLOO_SOCKET_IFNAME": "enp1s0f1np1"}, "ok"),
        ({"GLOO_SOCKET_IFNAME": "enP7s7,enp1s0f1np1"}, "ok"),
        ({"GLOO_SOCKET_IFNAME": "enP7s7"}, "warning"),
        ({"GLOO_SOCKET_IFNAME": "enp1s0"}, "failure"),
        ({"NCCL_SOCKET_IFNAME": "enp1s0"}, "ok"),
        ({"NCCL_SOCKET_IFNAME": "^lo,wl"}, "ok"),
        ({"NCCL_SOCKET_IFNAME": "=enP7s7"}, "warning"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "failure"),
        ({"NCCL_SOCKET_IFNAME": ""}, "ok"),
    ],
)
def test_addresses_and_interfaces_that_are_given_lead_to_the_peer(
    variables: dict[str, str], severity: str
) -> None:
    """Each is named with what leads there; one that does not exist fails."""
    finding = found(machine=with_variables(SPARK, variables))["interfaces"]
    assert finding.severity == severity
    if severity != "ok":
        (variable,) = variables
        assert variable in finding.seen
        assert HERE in finding.remedy or "enp1s0f1np1" in finding.remedy


def test_nccl_is_not_used_on_the_cpu() -> None:
    """Its variables have no effect there."""
    machine = with_variables(CPU, {"NCCL_SOCKET_IFNAME": "eth"})
    assert found(machine=machine)["interfaces"].severity == "ok"


@pytest.mark.parametrize(
    ("address", "severity"),
    [("", "ok"), (HERE, "ok"), ("10.1.0.5", "warning"), ("192.168.177.12", "ok")],
)
def test_the_address_of_the_head_leads_to_the_peer(address: str, severity: str) -> None:
    """If it is one of this machine; on a follower it is the head's."""
    finding = found(layout=Layout(master_address=address))["interfaces"]
    assert finding.severity == severity


def test_a_route_without_an_interface_is_checked_as_far_as_possible() -> None:
    """Its address is known all the same."""
    findings = found(replace(PEER, route=Route(HERE, None)))
    assert set(findings) == {"interfaces"}
    assert findings["interfaces"].severity == "ok"


@pytest.mark.parametrize(
    ("given", "selected"),
    [
        ("en", ["en0", "en1"]),
        ("en1,ib", ["en1", "ib0"]),
        ("=en", []),
        ("=en0:1,ib0", ["en0", "ib0"]),
        ("^en", ["ib0"]),
        ("^=en0", ["en1", "ib0"]),
        ("", []),
    ],
)
def test_a_list_of_nccl_selects_as_nccl_does(given: str, selected: list[str]) -> None:
    """By beginnings, by whole names, or all others."""
    assert nccl_selected(given, ["en0", "en1", "ib0"]) == selected
