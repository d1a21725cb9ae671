"""`holdfast doctor --peer` with a real follower, and between two network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from machines import SIZED, findings
from machines import doctor as doctor_here
from network_namespaces import ADDRESSES, INTERFACES, Cable, cable
from node_pairs import KEY
from servers import reserved_port, running

DEADLINE_SECONDS = 240.0
SUPPORT = Path(__file__).parents[1] / "support"
OWN_SYS = ("unshare", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh")
"""Below /sys are the interfaces of the network namespace in which it was mounted."""
HEALTH_PORT = 8001
FOLLOW = (sys.executable, "-m", "holdfast", "follow")


def test_a_follower_is_understood(tmp_path: Path) -> None:
    """With its versions and its memory, and the reason why it does not reach its head."""
    key = tmp_path / "node.key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    with reserved_port() as node:
        words = (f"127.0.0.1:{node}", "--node-key-file", str(key), "--node-name", "b")
        with running(tmp_path, *words, command=FOLLOW) as follower:
            follower.until(lambda: follower.status["problem"], "a problem")
            health = follower.url.rpartition(":")[2]
            peer = ("--peer", f"127.0.0.1:{node}", "--peer-port", health)
            done = doctor_here("--json", *SIZED, *peer)
    found = {one["name"]: one for one in findings(done) if one["source"] == "peer 127.0.0.1"}
    assert found["peer"]["severity"] == "warning"
    assert "a follower b in state away: cannot connect to the head" in found["peer"]["seen"]
    assert found["clock"]["severity"] == "ok"
    assert "on the peer" in found["peer-memory"]["seen"]
    equal = "equal: Holdfast, the code of Holdfast, vLLM, torch"
    assert found["peer-versions"]["seen"].startswith(equal)


@pytest.fixture(name="link")
def a_link() -> Iterator[Cable]:
    """The doctor is at its first end, the peer at its second one."""
    with cable() as made:
        if made is None:
            pytest.skip("this user cannot make network namespaces here")
        attempt = [*made.inside(0), *OWN_SYS, "true"]
        if subprocess.run(attempt, capture_output=True, timeout=60, check=False).returncode:
            pytest.skip("this user cannot mount /sys here")
        made.ip(0, "link set lo up")
        made.ip(1, "link set lo up")
        yield made


@contextmanager
def a_follower(link: Cable) -> Iterator[None]:
    """A server at the second end that answers as a follower does."""
    words = ["serve", ADDRESSES[1], str(HEALTH_PORT)]
    command = [*link.inside(1), sys.executable, str(SUPPORT / "peer_servers.py"), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == b"listening\n"
            yield
        finally:
            running.kill()


def doctor(link: Cable, *arguments: str, **variables: str) -> dict[str, Any]:
    """What the doctor finds at the first end about the second one, by the name of the finding."""
    command = [*link.inside(0), *OWN_SYS, sys.executable, "-m", "holdfast", "doctor", "--json"]
    done = subprocess.run(
        [*command, "--peer", ADDRESSES[1], *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
        env={**os.environ, **variables},
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)["findings"]
    return {one["name"]: one for one in found if one["source"] == f"peer {ADDRESSES[1]}"}


def set_mtu(link: Cable, *sizes: int) -> None:
    """Give each end its MTU."""
    for side, size in enumerate(sizes):
        link.ip(side, f"link set {INTERFACES[side]} mtu {size}")


def test_a_sound_cable_has_no_finding(link: Cable) -> None:
    """The way was tried with the longest packet that the interface takes."""
    set_mtu(link, 9000, 9000)
    with a_follower(link):
        found = doctor(link)
    for name in ("peer", "ports", "path-mtu", "link", "interfaces"):
        assert found[name]["severity"] == "ok", found[name]
    assert found["path-mtu"]["seen"] == "9000 bytes"
    assert found["link"]["seen"].startswith(INTERFACES[0])
    assert found["interfaces"]["seen"] == f"{ADDRESSES[0]} on {INTERFACES[0]} leads to the peer"


def test_an_end_with_a_shorter_mtu_is_found(link: Cable) -> None:
    """From the connection if a server listens there, and from lost packets if none does."""
    set_mtu(link, 9000, 1500)
    finding = doctor(link)["path-mtu"]
    assert finding["severity"] == "warning"
    assert "packets of 9000 bytes" in finding["seen"]
    with a_follower(link):
        finding = doctor(link)["path-mtu"]
    assert finding["severity"] == "warning"
    assert "9000 bytes, and the peer takes packets of 1500" in finding["seen"]


def test_a_packet_is_not_cut_into_pieces_on_the_way(link: Cable) -> None:
    """Pieces would arrive, and hide that the whole cannot."""
    code = (
        "import socket\n"
        "from holdfast.doctor.reach import Address, full_packet_answer\n"
        f"peer = Address(socket.AF_INET, {ADDRESSES[1]!r})\n"
        "print(full_packet_answer(peer, 1500), full_packet_answer(peer, 1501))\n"
    )
    command = [*link.inside(0), sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=True
    )
    assert done.stdout == "answered too_long\n"


def test_a_peer_that_drops_everything_is_not_reachable(link: Cable) -> None:
    """As one that is switched off, or whose cable is pulled; the command comes to its end."""
    link.ip(1, f"link set {INTERFACES[1]} down")
    found = doctor(link)
    assert found["peer"]["severity"] == "failure"
    assert "ports" not in found


def test_variables_that_lead_elsewhere_are_found(link: Cable) -> None:
    """As the kernel routes here, and with the interfaces that are here."""
    found = doctor(link, GLOO_SOCKET_IFNAME="lo")
    assert found["interfaces"]["severity"] == "warning"
    assert f"GLOO_SOCKET_IFNAME=lo, but {INTERFACES[0]}" in found["interfaces"]["seen"]
