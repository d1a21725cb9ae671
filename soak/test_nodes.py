"""Processes of two nodes are killed and stopped in every state, under load; all comes back."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import psutil
import pytest

from faults import left_in_shared_memory
from load_generator import Answer, Load, Question, loaded, questions, undisturbed
from servers import has_ended, reserved_port, wait_until
from two_nodes import TwoNodes, processes_of, two_nodes

MINUTES = float(os.environ.get("SOAK_NODES_MINUTES", "60"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
CLIENTS = 8
VICTIMS = (
    "the head",
    "the follower",
    "EngineCore of the head",
    "Worker of the head",
    "Worker of the follower",
    "node_ranks of the follower",
)
STATES = ("STARTING", "PROBING", "READY", "RECOVERING", "DRAINING")
FLAGS = (
    "--max-engine-restarts=1000",
    "--restart-window=1",  # neither the budget nor its back-off is tested here
    "--hold-timeout=600",
    "--stall-timeout=20",
)
FROZEN_SECONDS = 10.0
"""Longer than the silence after which both sides give up."""
READY_SECONDS = 400.0
RETRIES = 120
"""More than a client needs during two starts."""
PROCESS_SECONDS = 60.0
"""Until an engine that starts has a process of every kind."""
END_SECONDS = 30.0


@dataclass
class Trial:
    """One fault, and what came of it."""

    victim: str
    number: signal.Signals
    state: str
    reached_seconds: float = 0.0
    """When the head was in the state, of `time.monotonic()`."""
    is_done: bool = False
    """Whether the signal was sent."""
    seconds: float = 0.0
    outcome: str = "not tried"
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        told = "; ".join(self.problems) or self.outcome
        return (
            f"{self.number.name:8} {self.victim:27} {self.state:11} {self.seconds:6.1f} s  {told}"
        )


def _process(nodes: TwoNodes, victim: str) -> psutil.Process | None:
    if victim == "the head":
        return psutil.Process(nodes.head.process.pid)
    if victim == "the follower":
        return psutil.Process(nodes.follower.process.pid)
    word, _, node = victim.partition(" of the ")
    return processes_of(nodes.head if node == "head" else nodes.follower).get(word)


def _reach(nodes: TwoNodes, state: str) -> None:
    """Bring the head into a state."""
    if state == "STARTING":
        nodes.start_head()
        nodes.head.until(lambda: processes_of(nodes.follower).get("node_ranks"), "its ranks")
    elif state in {"PROBING", "RECOVERING"}:
        processes_of(nodes.head)["Worker"].kill()
        nodes.head.until_state(state)
    elif state == "DRAINING":
        nodes.head.process.send_signal(signal.SIGTERM)
        nodes.head.until_state(state)


def _strike(nodes: TwoNodes, trial: Trial) -> None:
    """Send the signal; a node that is frozen as a whole goes on later, as one that was asleep."""
    deadline = time.monotonic() + (0 if trial.state == "DRAINING" else PROCESS_SECONDS)
    while (victim := _struck(nodes, trial)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    trial.is_done = victim is not None
    trial.outcome = "there was no such process" if victim is None else "came back"
    if victim is None:
        return
    if trial.number is signal.SIGSTOP and trial.victim in {"the head", "the follower"}:
        time.sleep(FROZEN_SECONDS)
        victim.send_signal(signal.SIGCONT)


def _struck(nodes: TwoNodes, trial: Trial) -> psutil.Process | None:
    """Return the process that got the signal; None if there is none of that kind now."""
    try:
        if (victim := _process(nodes, trial.victim)) is not None:
            victim.send_signal(trial.number)
    except psutil.NoSuchProcess:
        return None
    return victim


def _come_back(nodes: TwoNodes) -> None:
    """Do what systemd does, and wait until both nodes serve."""
    deadline = time.monotonic() + READY_SECONDS

    def is_back() -> bool:
        for server, start in (
            (nodes.head, nodes.start_head),
            (nodes.follower, nodes.start_follower),
        ):
            if server.process.poll() is not None:
                start()
        return nodes.head.is_healthy

    wait_until(
        is_back,
        deadline_seconds=deadline - time.monotonic(),
        what=lambda: f"not READY:\n{nodes.head.log[-3000:]}\n{nodes.follower.log[-3000:]}",
    )
    nodes.until_ready()


def _tried(nodes: TwoNodes, trial: Trial, expected: Mapping[Question, Answer]) -> Trial:
    with loaded(nodes.head, expected, clients=CLIENTS, seed=SEED, retries=RETRIES) as load:
        _reach(nodes, trial.state)
        trial.reached_seconds = time.monotonic()
        head = nodes.head.process
        _strike(nodes, trial)
        _come_back(nodes)
        trial.seconds = time.monotonic() - trial.reached_seconds
    trial.problems = _problems(load, trial, has_kept_head=nodes.head.process is head)
    return trial


def _problems(load: Load, trial: Trial, *, has_kept_head: bool) -> list[str]:
    found = [f"wrong: {answer}" for answer in load.wrong]
    if not trial.is_done and trial.state != "DRAINING":  # which may be over by then
        found.append(trial.outcome)
    lost = load.lost
    if trial.state == "STARTING":  # the head before it was stopped for this trial
        lost = [answer for answer in lost if answer.started_seconds >= trial.reached_seconds]
        is_excused = not has_kept_head
    else:
        is_excused = trial.victim == "the head" or trial.state == "DRAINING"
    return found if is_excused else [*found, *(f"lost: {answer.error}" for answer in lost)]


def _untried(trials: Sequence[Trial]) -> set[object]:
    """The victims, signals and states that no trial has had yet."""

    def kinds(some: Iterable[Trial]) -> set[object]:
        return {kind for trial in some for kind in (trial.victim, trial.number, trial.state)}

    return kinds(trials) - kinds(trial for trial in trials if trial.is_done)


def _session() -> set[psutil.Process]:
    """All processes of this session: an orphan stays in it, whatever its parent is by then."""
    found = set()
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getsid(process.pid) == os.getsid(0) and not has_ended(process):
                found.add(process)
    return found


@pytest.mark.timeout(4 * 3600)
def test_two_nodes_come_back_from_whatever_is_killed_or_stopped(tmp_path: Path) -> None:
    """No answer that had not begun is lost, and no process or shared memory is left.

    It ends after its time, but not before every victim, signal and state was tried.
    """
    shared, before = left_in_shared_memory(), _session()
    trials = [
        Trial(victim, number, state)
        for victim, number, state in product(VICTIMS, (signal.SIGKILL, signal.SIGSTOP), STATES)
    ]
    random.Random(SEED).shuffle(trials)
    end = time.monotonic() + MINUTES * 60
    with reserved_port() as port, two_nodes(tmp_path, *FLAGS, http_port=port) as nodes:
        nodes.until_ready()
        expected = undisturbed(nodes.head, questions(SEED, count=8, longest_tokens=1000))
        for trial in trials:
            if time.monotonic() > end and not _untried(trials):
                break
            print(_tried(nodes, trial, expected), flush=True)
    left = [trial for trial in trials if not trial.is_done]
    print(f"{len(left)} of {len(trials)} were not tried:", *left, sep="\n", flush=True)
    wait_until(
        lambda: not _session() - before,
        deadline_seconds=END_SECONDS,
        what=lambda: f"processes are left: {_session() - before}",
    )
    assert not left_in_shared_memory() - shared
    assert not _untried(trials)
    assert not [str(trial) for trial in trials if trial.problems]
