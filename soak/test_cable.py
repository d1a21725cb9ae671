"""The cable between two nodes is pulled under load and plugged in again; all comes back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from load_generator import loaded, questions, undisturbed
from network_namespaces import ADDRESSES, cable, joined
from servers import wait_until
from two_nodes import Place, Places, two_nodes

SEED = 3
CLIENTS = 8
OUT_SECONDS = 10.0
"""Longer than the silence after which both sides give up."""
FLAGS = ("--hold-timeout=600", "--max-engine-restarts=20")
OWN_SHARED_MEMORY = (
    *("unshare", "--mount", "sh", "-c"),
    'mount -t tmpfs tmpfs /dev/shm && exec "$@"',
    "sh",
)


@pytest.mark.timeout(1800)
def test_a_cable_that_is_out_for_ten_seconds_costs_no_answer(tmp_path: Path) -> None:
    """With engines that share neither a network nor memory, as on two machines."""
    with cable() as link:
        if link is None:
            pytest.skip("this user cannot make network namespaces here")
        places = Places(
            Place(OWN_SHARED_MEMORY),
            Place((*link.inside(1), *OWN_SHARED_MEMORY)),
            address=ADDRESSES[0],
        )
        with joined(link.pids[0]), two_nodes(tmp_path, *FLAGS, places=places) as nodes:
            head = nodes.head
            nodes.until_ready()
            expected = undisturbed(head, questions(SEED, count=8, longest_tokens=1000))
            with loaded(head, expected, clients=CLIENTS, seed=SEED) as load:
                wait_until(
                    lambda: head.status["progress"]["running"] > 1,
                    deadline_seconds=60,
                    what=lambda: "nobody asks",
                )
                link.pull()
                pulled_seconds = time.monotonic()
                head.until(
                    lambda: head.metric("engine_deaths_total", cause="node_lost") > 0, "a lost node"
                )
                head.until_state("RECOVERING")
                time.sleep(max(0.0, pulled_seconds + OUT_SECONDS - time.monotonic()))
                link.plug()
                nodes.until_ready()
            assert head.metric("requests_replayed_total") > 0
    assert load.answers
    assert (load.lost, load.broken, load.wrong) == ([], [], [])
