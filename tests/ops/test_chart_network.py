"""Who may connect to the server of the chart, and where it may connect to."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from ops.charts import Answer, of_kind

pytestmark = pytest.mark.tools

PUBLIC = ("1.1.1.1", "203.0.114.7", "2606:4700::1111")
METADATA = ("169.254.169.254", "100.100.100.200", "192.0.0.192", "168.63.129.16", "fd00:ec2::254")
PRIVATE = (
    *("10.0.0.1", "172.20.0.1", "192.168.1.1", "127.0.0.1", "0.0.0.0", "100.64.1.1"),  # noqa: S104 - not bound
    *("198.18.0.1", "224.0.0.1", "255.255.255.255"),
    *("::1", "fe80::1", "fc00::1", "ff02::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::"),
)


def policy(answer: Answer, case: str) -> dict[str, Any]:
    """The policy of a case."""
    (found,) = of_kind(answer, case, "NetworkPolicy")
    return dict(found["spec"])


def may_reach(spec: dict[str, Any], address: str, port: int, protocol: str = "TCP") -> bool:
    """Whether a rule of the policy lets the server connect there."""
    if "Egress" not in spec["policyTypes"]:
        return True
    return any(
        _has_port(rule, port, protocol) and _has_address(rule, address)
        for rule in spec.get("egress", ())
    )


def _has_port(rule: dict[str, Any], port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    return ports is None or {"protocol": protocol, "port": port} in ports


def _has_address(rule: dict[str, Any], address: str) -> bool:
    if "to" not in rule:
        return True
    blocks = [peer["ipBlock"] for peer in rule["to"] if "ipBlock" in peer]
    found = ip_address(address)
    return any(
        found in ip_network(block["cidr"])
        and not any(found in ip_network(part) for part in block.get("except", ()))
        for block in blocks
    )


@pytest.mark.parametrize("address", [*METADATA, *PRIVATE])
def test_a_url_of_a_client_reaches_nothing_inside(answer: Answer, address: str) -> None:
    """Neither the metadata of a cloud nor what has a private address, by no port of the web."""
    spec = policy(answer, "one model")
    assert not [port for port in (80, 443, 8000) if may_reach(spec, address, port)]


@pytest.mark.parametrize("address", PUBLIC)
def test_the_hub_and_names_are_reached(answer: Answer, address: str) -> None:
    """A model is downloaded by HTTPS, and names are looked up, also where a node keeps them."""
    spec = policy(answer, "one model")
    assert may_reach(spec, address, 443)
    assert not may_reach(spec, address, 22)
    assert may_reach(spec, "169.254.20.10", 53, "UDP")


def test_names_are_looked_up_on_openshift_too(answer: Answer) -> None:
    """Its DNS pods listen at 5353, which is open in their namespace alone."""
    spec = policy(answer, "one model")
    (rule,) = (one for one in spec["egress"] if _has_port(one, 5353, "UDP"))
    assert _has_port(rule, 5353, "TCP")
    names = {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}}
    assert rule["to"] == [{"namespaceSelector": names}]
    assert not may_reach(spec, PUBLIC[0], 5353, "UDP")


def test_more_or_less_may_be_reached(answer: Answer) -> None:
    """Own rules are taken as they are; the Internet may be left out, or nothing at all."""
    closed = policy(answer, "closed to the Internet")
    assert may_reach(closed, "10.1.2.3", 8080)
    assert not any(may_reach(closed, address, 443) for address in PUBLIC)
    assert may_reach(policy(answer, "open egress"), "169.254.169.254", 80)
    assert of_kind(answer, "no policy of the network", "NetworkPolicy") == []


def test_a_server_without_a_key_is_its_namespaces_own(answer: Answer) -> None:
    """And that of Prometheus; where a key guards the door, everybody may knock."""
    monitoring = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    (rule,) = policy(answer, "one model")["ingress"]
    assert rule["from"] == [{"podSelector": {}}, {"namespaceSelector": monitoring}]
    (rule,) = policy(answer, "closed metrics")["ingress"]
    assert "from" not in rule
    (rule,) = policy(answer, "scaled")["ingress"]
    assert rule["from"] == [
        {"podSelector": {"matchLabels": {"app": "gateway"}}},
        {"namespaceSelector": monitoring},
    ]
