"""Which address and interface lead to another node."""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import sys

import pytest

from holdfast.errors import EngineStartError, UsageError
from holdfast.nodes.addresses import (
    address_towards,
    free_port,
    own_address,
    prefer,
    wait_for_own_address,
)

IN_A_NETWORK = ("unshare", "--user", "--map-root-user", "--net")
LATE_ADDRESS = """
import logging, subprocess
from holdfast.nodes.addresses import own_address, wait_for_own_address

class Plug(logging.Handler):
    def emit(self, record):
        print(record.getMessage())
        if record.levelno == logging.WARNING:
            subprocess.run("ip addr add 10.77.0.1/24 dev lo".split(), check=True)

subprocess.run("ip link set lo up".split(), check=True)
logging.basicConfig(level=logging.INFO, handlers=[Plug()])
wait_for_own_address("10.77.0.1")
print(own_address("10.77.0.1"))
"""
"""Gives the machine the address once it waits for it."""


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


def test_an_address_that_comes_late_is_waited_for() -> None:
    """As that on a cable does, while the machine at its other end is off."""
    can_unshare = subprocess.run([*IN_A_NETWORK, "true"], timeout=60, check=False).returncode == 0
    if not can_unshare or shutil.which("ip") is None:
        pytest.skip("no networks can be made here")
    done = subprocess.run(
        [*IN_A_NETWORK, sys.executable, "-c", LATE_ADDRESS],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    waits, comes, own = done.stdout.splitlines()
    assert "10.77.0.1: Cannot assign requested address. Waiting for it" in waits
    assert comes.endswith("this machine has the address 10.77.0.1 now")
    assert own == "10.77.0.1"


def test_an_address_that_never_comes_is_a_failure_that_a_restart_may_correct() -> None:
    """It is named, with what to check."""
    with pytest.raises(EngineStartError, match=r"192\.0\.2\.1") as failed:
        wait_for_own_address("192.0.2.1", absence_seconds=0.0)
    assert "cable" in failed.value.remedy


@pytest.mark.parametrize("name", ["127.0.0.1", "a" * 300])
def test_what_waiting_does_not_change_is_not_waited_for(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An address that is there, and a name that cannot be one."""
    caplog.set_level(logging.INFO)
    wait_for_own_address(name)
    assert caplog.messages == []


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
