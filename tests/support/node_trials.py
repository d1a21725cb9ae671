"""Faults of two nodes in every state of the head, and whether what comes of them is as promised."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from faults import left_in_shared_memory
from holdfast.nodes.channel import SILENCE_SECONDS
from load_generator import Answer, Load
from servers import Server, descendants, has_ended, wait_until
from two_nodes import TwoNodes, processes_of

STATES = ("STARTING", "PROBING", "READY", "RECOVERING", "DRAINING")
SHORT_STATES = frozenset({"PROBING", "DRAINING"})
"""They may be over before the fault."""
NOTICED_SECONDS = 2 * SILENCE_SECONDS + 3.0
"""A side that is busy itself notices silence after twice the time; three are for our own looks."""
READY_SECONDS = 400.0
CLIENTS = 8
FLAGS = (
    "--max-engine-restarts=1000",
    "--restart-window=1",  # neither the budget nor its back-off is tested here
    "--hold-timeout=600",
    "--drain-timeout=600",  # an engine that dies meanwhile takes a start
)
LOOK_SECONDS = 0.2
SHORT_LOOK_SECONDS = 0.005
ARRIVAL_SECONDS = 1.0
"""What a busy client takes from its decision to ask until the head has its request."""
END_SECONDS = 30.0
"""Until whatever a fault has made useless has ended."""


@dataclass
class Trial:
    """One fault, and what came of it; times are of `time.monotonic()`."""

    fault: str
    state: str
    has_to_be_noticed: bool = True
    """Whether something runs that must end because of the fault."""
    may_end_follower: bool = False
    """Whether the fault itself ends the follower."""
    asked_seconds: float = 0.0
    """When the head was brought on its way to the state."""
    reached_seconds: float = 0.0
    """When it was in the state."""
    struck_seconds: float | None = None
    noticed_seconds: float | None = None
    back_seconds: float = 0.0
    refusing_seconds: float | None = None
    """When the head was asked to stop: it finishes what it has, and refuses the rest."""
    killed_seconds: float | None = None
    """When the head was killed, with all that it had."""
    ends: list[str] = field(default_factory=list)
    """What has ended although nobody killed it, and was started again."""
    problems: list[str] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether the fault came about."""
        return self.struck_seconds is not None

    def __str__(self) -> str:
        told = "; ".join(self.problems) or ("came back" if self.is_done else "not tried")
        noticed = self._since_struck(self.noticed_seconds)
        back = self._since_struck(self.back_seconds)
        return "; ".join(
            [f"{self.fault:36} {self.state:11} noticed {noticed} back {back}  {told}", *self.ends]
        )

    def judge(self, load: Load, *, left: Collection[str] = ()) -> None:
        """Note what is not as promised; `left` is what dead engines have left in memory."""
        self.problems += [f"wrong: {answer}" for answer in load.wrong]
        self.problems += [f"lost: {one.error}" for one in load.lost if not self.excuses(one)]
        self.problems += [f"broken: {one.error}" for one in load.broken if not self.excuses(one)]
        if left:
            self.problems.append(f"left in shared memory: {', '.join(sorted(left))}")
        if not self.is_done:
            self.problems += [] if self.state in SHORT_STATES else ["not tried"]
        elif self.has_to_be_noticed:
            self._judge_notice()

    def excuses(self, answer: Answer) -> bool:
        """Whether no server could give the answer: its head was stopping, killed or starting."""
        if answer.started_seconds > self.back_seconds:
            return False
        is_refused = (
            self.refusing_seconds is not None
            and not answer.is_begun
            and answer.started_seconds >= self.refusing_seconds - ARRIVAL_SECONDS
        )
        was_killed = self.killed_seconds is not None and answer.ended_seconds >= self.killed_seconds
        return is_refused or was_killed

    def judge_end(self, exit_code: int) -> None:
        """Note it if a head that has ended had no reason to: it was READY, and not told to stop."""
        told = f"the head ended with {exit_code}"
        if self.refusing_seconds is None and self.killed_seconds is None:
            self.problems.append(told)
        elif exit_code >= 0:
            self.ends.append(told)

    def judge_follower_end(self, exit_code: int) -> None:
        """Note it if a follower has ended that nobody killed: it joins whatever head comes."""
        if not self.may_end_follower:
            self.problems.append(f"the follower ended with {exit_code}")

    def _judge_notice(self) -> None:
        if self.noticed_seconds is None:
            self.problems.append("nobody noticed")
        elif self.noticed_seconds - (self.struck_seconds or 0.0) > NOTICED_SECONDS:
            self.problems.append("noticed too late")

    def _since_struck(self, at_seconds: float | None) -> str:
        if at_seconds is None or self.struck_seconds is None:
            return "     -  "
        return f"{at_seconds - self.struck_seconds:6.1f} s"


def is_in(head: Server, state: str) -> bool:
    """Whether the head is in this state now; one that has ended is in none."""
    with suppress(httpx.TransportError):
        return head.state == state
    return False


def reach(nodes: TwoNodes, trial: Trial) -> bool:
    """Bring the head into the state of the trial, and return whether it was met there.

    Until then it has answers to make: a drain without any is over at once. After a recovery,
    PROBING takes a fifth of a second.
    """
    head = nodes.head
    head.until(lambda: head.status["progress"]["running"] > CLIENTS / 2, "clients that ask")
    trial.asked_seconds = time.monotonic()
    if trial.state == "STARTING":
        trial.refusing_seconds = trial.asked_seconds
        nodes.start_head()
        nodes.head.until(lambda: processes_of(nodes.follower).get("node_ranks"), "its ranks")
    elif trial.state in {"PROBING", "RECOVERING"}:
        processes_of(head)["Worker"].kill()
        _until(lambda: not is_in(head, "READY"))
        if trial.state == "PROBING":
            _until(lambda: not is_in(head, "RECOVERING"))
    elif trial.state == "DRAINING":
        trial.refusing_seconds = trial.asked_seconds
        head.process.terminate()
        _until(lambda: not is_in(head, "READY"))
    trial.reached_seconds = time.monotonic()
    return is_in(nodes.head, trial.state)


def _until(condition: Callable[[], bool]) -> None:
    """Wait with short looks: some states are short."""
    deadline = time.monotonic() + READY_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(SHORT_LOOK_SECONDS)


def family(nodes: TwoNodes) -> set[psutil.Process]:
    """All processes of both nodes."""
    return {
        process
        for server in (nodes.head, nodes.follower)
        for process in (psutil.Process(server.process.pid), *descendants(server.process.pid))
    }


def require_ended(nodes: TwoNodes, trial: Trial, before: set[psutil.Process]) -> None:
    """Note what was there before the fault, and is of neither node now, but still runs."""

    def strays() -> list[psutil.Process]:
        return [one for one in before - family(nodes) if not has_ended(one)]

    deadline = time.monotonic() + END_SECONDS
    while strays() and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    trial.problems += [f"still runs: {one}" for one in strays()]


def watch(trial: Trial, is_noticed: Callable[[], bool], *, seconds: float) -> None:
    """Look until the fault is noticed, but not for longer than that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):  # a head that is ending says nothing
            if is_noticed():
                trial.noticed_seconds = time.monotonic()
                return
        time.sleep(LOOK_SECONDS)


def come_back(nodes: TwoNodes, trial: Trial) -> None:
    """Do what systemd does, and wait until both nodes serve."""

    def is_back() -> bool:
        if (exit_code := nodes.head.process.poll()) is not None:
            trial.judge_end(exit_code)
        if (exit_code := nodes.follower.process.poll()) is not None:
            trial.judge_follower_end(exit_code)
        for server, start in (
            (nodes.head, nodes.start_head),
            (nodes.follower, nodes.start_follower),
        ):
            if server.process.poll() is not None:
                start()
        return nodes.head.is_healthy

    wait_until(
        is_back,
        deadline_seconds=READY_SECONDS,
        what=lambda: f"not READY:\n{nodes.head.log[-3000:]}\n{nodes.follower.log[-3000:]}",
    )
    nodes.until_ready()
    trial.back_seconds = time.monotonic()


def deaths(head: Server) -> float:
    """How many engines of this head have died."""
    return sum(
        value for (name, _), value in head.metrics().items() if name.endswith("engine_deaths_total")
    )


def left_in_memory(nodes: TwoNodes) -> set[str]:
    """What is in the shared memory that a node sees, and no process has it any more, by name."""
    pids = (nodes.head.process.pid, nodes.follower.process.pid)
    places = (Path(f"/proc/{pid}/root/dev/shm") for pid in pids)
    return {path.name for place in places for path in left_in_shared_memory(place)}


def newly_left(left: set[str], before: set[str]) -> set[str]:
    """What is left that was not, if it is more: a running engine has as much as the last one."""
    return left - before if len(left) > len(before) else set()
