"""One engine on two nodes: it answers as one does, and comes back when a node is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from load_generator import loaded, questions, undisturbed
from servers import READY_DEADLINE_SECONDS, Server, wait_until
from two_nodes import NODE_METRICS, Place, Places, TwoNodes, processes_of, two_nodes

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("demo"), pytest.mark.timeout(900)]

CLIENTS = 8
START_SECONDS = 2 * READY_DEADLINE_SECONDS
"""Each of two processes imports vLLM and starts a rank, all on the cores of one."""
MIB = 1024 * 1024
SMALLER_MIB, LARGER_MIB = 24, 32
"""What the ranks of the head and of the other node need, as an installed reserver declares it."""
RESERVER = """
import os
from holdfast.workspace.plan import Term

def declare(context):
    return [Term("declared", "a test", int(os.environ["A_TEST_MIB"]) << 20)]
"""
FLAGS = ("--hold-timeout=300", "--max-engine-restarts=20")
"""A loaded machine may silence a node for five seconds, which costs a restart and no answer."""
PROMPTS = ("hold fast", "0123456789" * 200)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    """Two nodes that are READY, whose ranks need different sizes."""
    installed = a_reserver(tmp_path_factory.mktemp("installed"))
    head, follower = (
        Place(environment={"PYTHONPATH": installed, "A_TEST_MIB": str(mib)})
        for mib in (SMALLER_MIB, LARGER_MIB)
    )
    places = Places(head, follower)
    with two_nodes(tmp_path_factory.mktemp("nodes"), *FLAGS, places=places) as nodes:
        nodes.until_ready(deadline_seconds=START_SECONDS)
        yield nodes


@pytest.fixture
def ready(pair: TwoNodes) -> TwoNodes:
    """The same, READY again if the machine has cost them an engine."""
    pair.until_ready(deadline_seconds=START_SECONDS)
    return pair


def a_reserver(directory: Path) -> str:
    """Install a reserver, and return the PYTHONPATH that has it."""
    (directory / "reserver_of_a_test.py").write_text(RESERVER)
    metadata = directory / "reserver_of_a_test-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: reserver-of-a-test\nVersion: 1.0\n"
    )
    point = "[holdfast.reservers]\na_test = reserver_of_a_test:declare\n"
    (metadata / "entry_points.txt").write_text(point)
    return os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH", "")]))


def test_two_nodes_answer_as_one(demo: Server, ready: TwoNodes) -> None:
    """The same tokens, from a rank on each node."""
    for prompt in PROMPTS:
        options = {"max_tokens": 24, "return_token_ids": True, "ignore_eos": True}
        alone, together = (s.completion(prompt, **options).json() for s in (demo, ready.head))
        assert together["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]


def test_every_rank_is_seen_with_its_node(ready: TwoNodes) -> None:
    """`/metrics` and `/statusz` of the head cover the rank of the other node."""
    head = ready.head
    assert head.metric("nodes_wanted") == 2
    assert head.metric("rank_info", rank="1", node="other") == 1
    for rank in ("0", "1"):
        assert head.metric("workspace_reserved_bytes", rank=rank) > 0
        assert head.metric("workspace_locked", rank=rank) == 1
        assert head.metric("engine_steps_total", rank=rank) > 0
    here, there = head.status["nodes"]
    assert (here["ranks"], there["ranks"]) == ([[0, 0]], [[0, 1]])
    assert there == {"name": "other", "is_joined": True, "ranks": [[0, 1]], "problem": ""}
    assert [rank["rank"] for rank in head.status["workspace"]] == [0, 1]
    pages = (*head.metrics(), *ready.follower.metrics())
    assert {name for name, _ in pages} >= NODE_METRICS


def test_the_ranks_of_all_nodes_reserve_what_the_neediest_needs(ready: TwoNodes) -> None:
    """So the KV cache has one size everywhere, and no rank is the first to fall short."""
    here, there = (ready.head.metric("workspace_reserved_bytes", rank=rank) for rank in ("0", "1"))
    assert here == there >= LARGER_MIB * MIB


def test_the_follower_says_how_it_is(ready: TwoNodes) -> None:
    """Its own probes and metrics show the rank that runs there."""
    follower = ready.follower
    assert follower.get("/livez").status_code == follower.get("/readyz").status_code == 200
    assert follower.status["state"] == "running"
    assert follower.metric("workspace_locked", rank="1") == 1


def test_a_worker_killed_on_the_other_node_costs_no_answer(ready: TwoNodes) -> None:
    """Both nodes end the generation, and the next one is READY without a hand."""
    head = ready.head
    expected = undisturbed(head, questions(5, count=8, longest_tokens=1000))
    with loaded(head, expected, clients=CLIENTS, seed=5) as load:
        wait_until(
            lambda: head.status["progress"]["running"] > 1,
            deadline_seconds=60,
            what=lambda: "nobody asks",
        )
        before = head.metric("engine_generation")
        processes_of(ready.follower)["Worker"].send_signal(signal.SIGKILL)
        head.until(lambda: head.metric("engine_generation") > before, "the next generation")
        ready.until_ready(deadline_seconds=START_SECONDS)
    assert load.answers
    assert head.metric("engine_deaths_total", cause="worker_exit") == 1
    assert (load.lost, load.broken, load.wrong) == ([], [], [])
    assert "node other" in head.status["engine"]["last_exit"]


def test_a_follower_that_was_killed_joins_again(ready: TwoNodes) -> None:
    """The head counts a lost node and waits; a new process takes the place."""
    head, before = ready.head, processes_of(ready.follower)
    lost = head.metric("engine_deaths_total", cause="node_lost")
    ready.follower.process.kill()
    head.until(lambda: head.metric("engine_deaths_total", cause="node_lost") > lost, "a lost node")
    assert not psutil.wait_procs(list(before.values()), timeout=30)[1]
    head.until_state("RECOVERING")
    assert head.get("/livez").status_code == 200
    assert "node_lost: node other: " in head.status["engine"]["last_exit"]
    ready.start_follower()
    head.until_ready(deadline_seconds=START_SECONDS)
    assert head.completion("hold fast").status_code == 200
    assert ready.follower.stop() == 0
    head.until_state("RECOVERING")
    assert head.stop() == 0
