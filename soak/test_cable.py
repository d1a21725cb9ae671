"""The cable between two nodes is pulled under load and plugged in again; all comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import pytest

from load_generator import Answer, Question, loaded, questions, undisturbed
from network_namespaces import Cable, cable, joined
from node_trials import (
    CLIENTS,
    FLAGS,
    NOTICED_SECONDS,
    READY_SECONDS,
    SHORT_STATES,
    STATES,
    Trial,
    come_back,
    deaths,
    family,
    left_in_memory,
    newly_left,
    reach,
    require_ended,
    watch,
)
from servers import reserved_port
from two_nodes import TwoNodes, places_apart, two_nodes

SEED = 3
SHORT_SECONDS = 2.0
"""Shorter than the silence after which a side gives up."""
LONG_SECONDS = NOTICED_SECONDS + 2.0
LIFE_SECONDS = 2 * 3600
Pair = tuple[Cable, TwoNodes, Mapping[Question, Answer], set[str]]
"""With what every client should get, and with what an undisturbed engine leaves in memory."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two nodes with a cable, which share neither a network nor memory, as two machines do."""
    with cable(LIFE_SECONDS) as link:
        if link is None:
            pytest.skip("this user cannot make network namespaces here")
        with (
            joined(link.pids[0]),
            reserved_port() as port,
            two_nodes(
                tmp_path_factory.mktemp("nodes"), *FLAGS, http_port=port, places=places_apart(link)
            ) as nodes,
        ):
            nodes.until_ready(deadline_seconds=READY_SECONDS)
            expected = undisturbed(nodes.head, questions(SEED, count=8, longest_tokens=1000))
            yield link, nodes, expected, left_in_memory(nodes)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("out_seconds", [SHORT_SECONDS, LONG_SECONDS])
@pytest.mark.parametrize("state", STATES)
def test_a_cable_that_is_out_costs_no_answer(pair: Pair, state: str, out_seconds: float) -> None:
    """Out for longer than the silence that is allowed, it ends the engine; shorter, nothing."""
    link, nodes, expected, left_before = pair
    is_lasting = out_seconds > SHORT_SECONDS
    trial = Trial(
        f"the cable is out for {out_seconds:g} s",
        state,
        has_to_be_noticed=is_lasting and state != "DRAINING",
    )
    with loaded(nodes.head, expected, clients=CLIENTS, seed=SEED) as load:
        before = family(nodes)
        is_met = reach(nodes, trial)
        deaths_before = deaths(nodes.head) if state == "READY" else 0.0
        link.pull()
        trial.struck_seconds = pulled = time.monotonic()
        watch(trial, lambda: _is_noticed(nodes), seconds=out_seconds)
        time.sleep(max(0.0, pulled + out_seconds - time.monotonic()))
        link.plug()
        come_back(nodes, trial)
        if state == "READY" and not is_lasting:
            assert deaths(nodes.head) == deaths_before
        require_ended(nodes, trial, before)
    trial.judge(load, left=newly_left(left_in_memory(nodes), left_before))
    if not is_met and state not in SHORT_STATES:
        trial.problems.append(f"it was no longer {state}")
    print(trial, "" if is_met else f"after {state}", flush=True)
    assert load.answers
    assert not trial.problems


def _is_noticed(nodes: TwoNodes) -> bool:
    head = nodes.head
    return head.process.poll() is not None or head.metric("node_joined", node="other") == 0
