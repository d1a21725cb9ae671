"""Which address and interface lead to another node."""

from __future__ import annotations

import socket

import pytest

from holdfast.errors import UsageError
from holdfast.nodes.addresses import address_towards, free_port, own_address, prefer


def test_an_address_of_this_machine_is_its_own() -> None:
    """A name resolves to it too."""
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("localhost") in {"127.0.0.1", "::1"}


@pytest.mark.parametrize(
    ("name", "is_told"),
    [("127.0.0.1", False), ("localhost", False), ("127.1", True)],
)
def test_a_name_that_is_the_loopback_is_told(
    name: str, caplog: pytest.LogCaptureFixture, *, is_told: bool
) -> None:
    """As that of the host may be; no other machine can reach it."""
    assert own_address(name) in {"127.0.0.1", "::1"}
    assert ("which other machines cannot reach" in caplog.text) == is_told


@pytest.mark.parametrize("name", ["192.0.2.1", "no.such.name.invalid", "a" * 300])
def test_an_address_of_another_machine_is_refused_with_a_remedy(name: str) -> None:
    """192.0.2.0/24 belongs to nobody (RFC 5737)."""
    with pytest.raises(UsageError) as refused:
        own_address(name)
    assert "--master-addr" in refused.value.cause
    assert "the address of this machine" in refused.value.remedy


def test_the_address_towards_this_machine_is_the_loopback() -> None:
    """The routes decide, and nothing is sent."""
    assert address_towards("127.0.0.1") == "127.0.0.1"


def test_a_node_that_cannot_be_reached_is_named() -> None:
    """The error names the node."""
    with pytest.raises(UsageError, match=r"no\.such\.name\.invalid"):
        address_towards("no.such.name.invalid")


def test_a_free_port_can_be_bound() -> None:
    """Nobody listens there."""
    port = free_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port


def test_vllm_gloo_and_nccl_use_the_address_and_its_interface() -> None:
    """All three would take others by default."""
    environment: dict[str, str] = {}
    prefer("127.0.0.1", environment)
    assert environment == {
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }


def test_what_the_user_has_set_stays() -> None:
    """Only what is missing is added."""
    environment = {"VLLM_HOST_IP": "10.0.0.1", "NCCL_SOCKET_IFNAME": "=ib0"}
    prefer("127.0.0.1", environment)
    assert environment == {
        "VLLM_HOST_IP": "10.0.0.1",
        "NCCL_SOCKET_IFNAME": "=ib0",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def test_an_address_without_an_interface_sets_no_interface() -> None:
    """For example one behind a translation of addresses."""
    environment: dict[str, str] = {}
    prefer("192.0.2.1", environment)
    assert environment == {"VLLM_HOST_IP": "192.0.2.1"}
