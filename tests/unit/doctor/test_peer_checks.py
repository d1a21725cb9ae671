"""Each hazard of a peer, from records of what was found there."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from holdfast.doctor.asking import PeerReport
from holdfast.doctor.findings import GIB, Finding, Severity
from holdfast.doctor.peer_checks import check_peer
from holdfast.doctor.peers import Peer
from holdfast.doctor.reach import TcpProbe
from holdfast.nodes.messages import NodeFacts
from node_pairs import FACTS
from peer_records import FOLLOWER, HEAD, PEER, an_answer, report

HEAD_PEER = replace(
    PEER,
    tcp_probes=(TcpProbe(29600, "open"), TcpProbe(8001, "closed"), TcpProbe(8000, "open")),
    report=report(HEAD),
)


def found(peer: Peer, *, available_bytes: int = 100 * GIB) -> dict[str, Finding]:
    """The findings by name."""
    return {one.name: one for one in check_peer(peer, FACTS, available_bytes)}


@pytest.mark.parametrize("peer", [PEER, HEAD_PEER], ids=["follower", "head"])
def test_a_sound_peer_has_no_finding(peer: Peer) -> None:
    """Everything was checked."""
    findings = found(peer)
    assert {one.severity for one in findings.values()} == {Severity.OK}
    assert set(findings) == {
        "peer",
        "ports",
        "round-trip",
        "clock",
        "peer-versions",
        "peer-memory",
    }


def test_a_peer_that_cannot_be_reached_fails() -> None:
    """With what the kernel says, or with the ports that were tried."""
    silent = tuple(TcpProbe(one.port, "silent") for one in PEER.tcp_probes)
    peer = replace(PEER, tcp_probes=silent, other_probes=(), round_trip_seconds=None, report=None)
    (finding,) = found(peer).values()
    assert (finding.name, finding.severity) == ("peer", "failure")
    assert "29600, 8001 and 8000" in finding.seen
    unreachable = tuple(
        TcpProbe(one.port, "unreachable", "No route to host") for one in PEER.tcp_probes
    )
    (finding,) = found(replace(peer, tcp_probes=unreachable)).values()
    assert "spark2 (192.168.177.12) cannot be reached: No route to host." in finding.seen
    assert "cable" in finding.remedy


def test_a_machine_where_nothing_listens_is_a_warning() -> None:
    """A follower may start later; what cannot be checked without it is said."""
    closed = tuple(TcpProbe(one.port, "closed") for one in PEER.tcp_probes)
    finding = found(replace(PEER, tcp_probes=closed, report=None))["peer"]
    assert finding.severity == "warning"
    assert "versions, clock and memory are not checked" in finding.seen
    assert "holdfast follow" in finding.remedy


def test_a_head_without_a_health_port_is_a_warning() -> None:
    """It may have another one."""
    tcp_probes = (TcpProbe(29600, "open"), TcpProbe(8001, "closed"), TcpProbe(8000, "silent"))
    finding = found(replace(PEER, tcp_probes=tcp_probes, report=None))["peer"]
    assert finding.severity == "warning"
    assert "--peer-port" in finding.remedy


@pytest.mark.parametrize("problem", ["/statusz asks for an API key", ""])
def test_a_health_port_of_something_else_is_a_warning(problem: str) -> None:
    """The others are checked all the same."""
    findings = found(replace(PEER, report=PeerReport(8001, {}, problem)))
    assert findings["peer"].severity == "warning"
    assert (problem or "not that of Holdfast") in findings["peer"].seen
    assert "clock" not in findings
    assert findings["ports"].severity == "ok"


@pytest.mark.parametrize(
    ("peer", "document"),
    [
        (PEER, {**FOLLOWER, "state": "away", "problem": "no answer from the head"}),
        (
            HEAD_PEER,
            {**HEAD, "nodes": [{"name": "b", "is_joined": False, "problem": "no answer from the"}]},
        ),
    ],
    ids=["follower", "head"],
)
def test_nodes_that_do_not_find_each_other_are_a_warning(
    peer: Peer, document: dict[str, Any]
) -> None:
    """In the words of the one that tries, which shows the way in the other direction."""
    finding = found(replace(peer, report=report(document)))["peer"]
    assert finding.severity == "warning"
    assert "no answer from the" in finding.seen


def test_a_head_that_accepts_no_follower_is_a_warning() -> None:
    """It serves on one node, or its port is another one."""
    tcp_probes = (TcpProbe(29600, "closed"), *HEAD_PEER.tcp_probes[1:])
    finding = found(replace(HEAD_PEER, tcp_probes=tcp_probes))["peer"]
    assert finding.severity == "warning"
    assert "--nnodes" in finding.remedy


def test_this_machine_is_not_a_peer() -> None:
    """Nothing about a link is learned from it."""
    findings = [*check_peer(replace(PEER, is_here=True), FACTS, GIB)]
    assert findings[0].severity == "warning"
    assert "is this machine" in findings[0].seen


@pytest.mark.parametrize("outcome", ["silent", "unreachable"])
def test_a_firewall_between_the_nodes_is_a_warning(outcome: Any) -> None:
    """The ports that are kept are named."""
    tcp_probes = (TcpProbe(40000, "closed"), TcpProbe(50000, outcome))
    finding = found(replace(PEER, other_probes=tcp_probes))["ports"]
    assert finding.severity == "warning"
    assert "ports 50000 of" in finding.seen


def test_a_peer_that_is_far_away_is_a_warning() -> None:
    """No cable is this slow."""
    finding = found(replace(PEER, round_trip_seconds=0.0045))["round-trip"]
    assert finding.severity == "warning"
    assert "4.50 ms" in finding.seen


@pytest.mark.parametrize("ahead_seconds", [-90.0, 90.0])
def test_clocks_that_differ_are_a_warning(ahead_seconds: float) -> None:
    """Whichever is ahead; the difference is at least what is said."""
    answers = (an_answer(ahead_seconds=ahead_seconds),)
    finding = found(replace(PEER, report=PeerReport(8001, FOLLOWER, answers=answers)))["clock"]
    assert finding.severity == "warning"
    assert any(f"at least {seconds} s" in finding.seen for seconds in (88, 90))


def test_a_clock_that_is_not_told_is_said_to_be_unknown() -> None:
    """It is not taken for a good one."""
    finding = found(replace(PEER, report=PeerReport(8001, FOLLOWER)))["clock"]
    assert (finding.severity, "does not report" in finding.seen) == ("warning", True)


def test_versions_that_differ_fail() -> None:
    """The head refuses such a follower; each difference is named, with both versions."""
    versions = {"holdfast": "0.2.0", "vllm": "0.33.0", "torch": FACTS.torch_version}
    document = {**HEAD, "configuration": {"versions": versions}}
    peer = replace(HEAD_PEER, report=report(document))
    failed = [one for one in check_peer(peer, FACTS, GIB) if one.name == "peer-versions"]
    assert [one.severity for one in failed] == ["failure", "failure"]
    assert "Holdfast is 0.2.0 on the head and 0.1.0 on node " in failed[0].seen
    assert "vLLM is 0.33.0 on the head" in failed[1].seen
    document = {**FOLLOWER, "facts": {"holdfast_version": "0.2.0"}}
    finding = found(replace(PEER, report=report(document)))["peer-versions"]
    assert "Holdfast is 0.1.0 on the head and 0.2.0 on node spark2." in finding.seen


def test_what_the_peer_does_not_have_is_a_difference() -> None:
    """A node without a driver says so; one that does not tell is not compared."""
    here = replace(FACTS, driver_version="580.95.05")
    without = replace(PEER, report=report({**FOLLOWER, "facts": {"driver_version": ""}}))
    (failed,) = [one for one in check_peer(without, here, GIB) if one.name == "peer-versions"]
    assert failed.severity == "failure"
    assert "the NVIDIA driver is 580.95.05 on the head and missing on node" in failed.seen
    (equal,) = [one for one in check_peer(PEER, here, GIB) if one.name == "peer-versions"]
    assert equal.severity == "ok"


def test_only_what_the_peer_tells_is_called_equal() -> None:
    """The rest is compared when it joins."""
    assert found(PEER)["peer-versions"].seen == "equal: Holdfast"
    assert found(HEAD_PEER)["peer-versions"].seen == "equal: Holdfast, vLLM, VLLM_PLUGINS"
    nothing = {**FOLLOWER, "facts": {}}
    seen = found(replace(PEER, report=report(nothing)))["peer-versions"].seen
    assert seen == "equal: the peer reports none"


@pytest.mark.parametrize(
    ("theirs_bytes", "severity"), [(100 * GIB, "ok"), (60 * GIB, "warning"), (200 * GIB, "warning")]
)
def test_memory_that_differs_is_a_warning(theirs_bytes: int, severity: str) -> None:
    """The smallest decides for all; both sizes are said."""
    document = {**FOLLOWER, "memory_available_bytes": theirs_bytes}
    finding = found(replace(PEER, report=report(document)))["peer-memory"]
    assert finding.severity == severity
    assert "100.0 GiB" in finding.seen
    assert f"{theirs_bytes // GIB}.0 GiB on the peer" in finding.seen


def test_memory_that_the_peer_does_not_tell_is_said_to_be_unknown() -> None:
    """With what is available here."""
    seen = found(PEER)["peer-memory"].seen
    assert "100.0 GiB" in seen
    assert "does not report" in seen


def test_everything_but_ok_has_a_remedy() -> None:
    """And is one line."""
    other = {**FOLLOWER, "facts": {"holdfast_version": "2"}}
    documents: list[dict[str, Any]] = [other, {**FOLLOWER, "problem": "x"}, {}]
    peers = [replace(PEER, report=report(document)) for document in documents]
    peers += [replace(PEER, report=None), replace(PEER, is_here=True, round_trip_seconds=1.0)]
    for one in (finding for peer in peers for finding in check_peer(peer, FACTS, GIB)):
        assert one.severity is Severity.OK or one.remedy
        assert "\n" not in one.seen + one.remedy


def test_every_fact_of_a_node_that_needs_no_model_is_compared() -> None:
    """A new one cannot be forgotten."""
    names = [field.name for field in fields(NodeFacts) if field.name != "model_digest"]
    document = {**FOLLOWER, "facts": dict.fromkeys(names, "other")}
    peer = replace(PEER, report=report(document))
    failed = [one for one in check_peer(peer, FACTS, GIB) if one.name == "peer-versions"]
    assert len(failed) == len(names)
