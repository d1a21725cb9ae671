"""Processes of two nodes are killed and stopped in every state, under load; all comes back."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import psutil
import pytest

from load_generator import Answer, Question, loaded, questions, undisturbed
from network_namespaces import cable, joined
from node_trials import (
    CLIENTS,
    END_SECONDS,
    FLAGS,
    NOTICED_SECONDS,
    READY_SECONDS,
    STATES,
    Trial,
    come_back,
    deaths,
    family,
    is_in,
    left_in_memory,
    newly_left,
    reach,
    require_ended,
    watch,
)
from servers import forkable, has_ended, reserved_port, running, wait_until
from two_nodes import (
    ENGINE_FLAGS,
    Places,
    TwoNodes,
    places_apart,
    processes_of,
    two_nodes,
)

MINUTES = float(os.environ.get("SOAK_NODES_MINUTES", "60").replace("all", "inf"))
"""`all` takes as long as all faults in all states do: about forty minutes."""
WANTED = os.environ.get("SOAK_NODES_STATES", ",".join(STATES)).split(",")
"""Only faults in these states are tried."""
SEED = int(os.environ.get("SOAK_SEED", "1"))
NODES = ("the head", "the follower")
VICTIMS = (
    *NODES,
    "EngineCore of the head",
    "Worker of the head",
    "Worker of the follower",
    "node_ranks of the follower",
)
STALL_FLAG = "--stall-timeout=20"
FROZEN_SECONDS = NOTICED_SECONDS + 2.0
"""Longer than the silence after which both sides give up."""
LIFE_SECONDS = 4 * 3600
PROCESS_SECONDS = 60.0
"""Until an engine that starts has a process of every kind."""
ATTEMPTS = 3
"""PROBING or a drain may be over before the signal is sent."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal to one process in one state."""

    victim: str
    number: signal.Signals
    state: str

    @property
    def is_node(self) -> bool:
        """Whether the whole node is lost."""
        return self.victim in NODES

    def trial(self) -> Trial:
        """A new attempt at it."""
        # A generation that is ending, or a start in which vLLM looks at times of its own, need not
        # notice the end of a process; a drain may end by itself.
        is_sure = self.state != "DRAINING" if self.is_node else self.state in {"PROBING", "READY"}
        return Trial(
            f"{self.number.name:7} {self.victim}",
            self.state,
            has_to_be_noticed=is_sure,
            may_end_follower=self.victim == "the follower" and self.number is signal.SIGKILL,
        )


def _process(nodes: TwoNodes, victim: str) -> psutil.Process | None:
    if victim == "the head":
        return psutil.Process(nodes.head.process.pid)
    if victim == "the follower":
        return psutil.Process(nodes.follower.process.pid)
    word, _, node = victim.partition(" of the ")
    return processes_of(nodes.head if node == "head" else nodes.follower).get(word)


def _strike(nodes: TwoNodes, fault: Fault, trial: Trial) -> None:
    """Send the signal; a node that is frozen as a whole goes on later, as one that was asleep."""
    is_counted = trial.has_to_be_noticed and not fault.is_node
    deaths_before = deaths(nodes.head) if is_counted else 0.0
    deadline = time.monotonic() + (0 if fault.state == "DRAINING" else PROCESS_SECONDS)
    while (hit := _struck(nodes, fault)) is None and is_in(nodes.head, fault.state):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if hit is None:
        return
    victim, struck = hit
    trial.struck_seconds = struck
    if fault.victim == "the head" and fault.number is signal.SIGKILL:
        trial.killed_seconds = struck
    if trial.has_to_be_noticed:
        watch(trial, lambda: _is_noticed(nodes, fault, deaths_before), seconds=FROZEN_SECONDS)
    if fault.is_node and fault.number is signal.SIGSTOP:
        time.sleep(max(0.0, struck + FROZEN_SECONDS - time.monotonic()))
        victim.send_signal(signal.SIGCONT)


def _struck(nodes: TwoNodes, fault: Fault) -> tuple[psutil.Process, float] | None:
    """Return the process that got the signal, and when; None if there is none in the state."""
    try:
        victim = _process(nodes, fault.victim)
        if victim is None or not is_in(nodes.head, fault.state):
            return None
        struck = time.monotonic()
        victim.send_signal(fault.number)
    except psutil.NoSuchProcess:
        return None
    return victim, struck


def _is_noticed(nodes: TwoNodes, fault: Fault, deaths_before: float) -> bool:
    """Whether what the fault has made useless has ended on the other side."""
    if fault.victim == "the head":
        return "node_ranks" not in processes_of(nodes.follower)
    head = nodes.head
    if head.process.poll() is not None:
        return True
    if fault.victim == "the follower":
        return head.metric("node_joined", node="other") == 0
    return deaths(head) > deaths_before


def _tried(
    nodes: TwoNodes, fault: Fault, expected: Mapping[Question, Answer], left_before: set[str]
) -> Trial:
    trial = fault.trial()
    with loaded(nodes.head, expected, clients=CLIENTS, seed=SEED) as load:
        before = family(nodes)
        if reach(nodes, trial):
            _strike(nodes, fault, trial)
        come_back(nodes, trial)
        require_ended(nodes, trial, before)
    trial.judge(load, left=newly_left(left_in_memory(nodes), left_before))
    return trial


def _untried(faults: Sequence[Fault], done: Iterable[Fault]) -> set[object]:
    """The victims, signals and states that no trial has had yet; with `all`, the faults."""
    tried = set(done)
    if math.isinf(MINUTES):
        return {fault for fault in faults if fault not in tried}

    def kinds(some: Iterable[Fault]) -> set[object]:
        return {kind for one in some for kind in (one.victim, one.number, one.state)}

    return kinds(faults) - kinds(tried)


def _session() -> set[psutil.Process]:
    """All processes of this session: an orphan stays in it, whatever its parent is by then."""
    found = set()
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getsid(process.pid) == os.getsid(0) and not has_ended(process):
                found.add(process)
    return found


@contextmanager
def _apart() -> Iterator[Places]:
    """Where both nodes run: without a network or memory in common, where this machine allows it."""
    with cable(LIFE_SECONDS) as link:
        if link is None:
            yield Places()
            return
        with joined(link.pids[0]):
            yield places_apart(link)


@pytest.mark.timeout(LIFE_SECONDS)
def test_two_nodes_come_back_from_whatever_is_killed_or_stopped(tmp_path: Path) -> None:
    """No answer is lost that a server could have given; no process or shared memory is left.

    Every answer is that of one node with both ranks.

    It ends after its time, but not before every victim, signal and state was tried.
    """
    faults = [
        Fault(victim, number, state)
        for victim, number, state in product(VICTIMS, (signal.SIGKILL, signal.SIGSTOP), WANTED)
    ]
    random.Random(SEED).shuffle(faults)
    end = time.monotonic() + MINUTES * 60
    trials: list[Trial] = []
    done: set[Fault] = set()
    with _apart() as places:
        with running(tmp_path / "alone", "--demo", *ENGINE_FLAGS, environment=forkable()) as alone:
            alone.until_ready(deadline_seconds=READY_SECONDS)
            expected = undisturbed(alone, questions(SEED, count=8, longest_tokens=1000))
        before = _session()
        with (
            reserved_port() as port,
            two_nodes(tmp_path, *FLAGS, STALL_FLAG, http_port=port, places=places) as nodes,
        ):
            nodes.until_ready(deadline_seconds=READY_SECONDS)
            left_before = left_in_memory(nodes)
            for fault in faults:
                if time.monotonic() > end and not _untried(faults, done):
                    break
                for _ in range(ATTEMPTS):
                    trials.append(_tried(nodes, fault, expected, left_before))
                    print(trials[-1], flush=True)
                    if trials[-1].is_done:
                        done.add(fault)
                        break
        wait_until(
            lambda: not _session() - before,
            deadline_seconds=END_SECONDS,
            what=lambda: f"processes are left: {_session() - before}",
        )
    left = [fault for fault in faults if fault not in done]
    print(f"{len(left)} of {len(faults)} were not tried:", *left, sep="\n", flush=True)
    assert not _untried(faults, done)
    assert not [str(trial) for trial in trials if trial.problems]
