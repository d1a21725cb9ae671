from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest

from holdfast.workspace import futex
from holdfast.workspace.futex import SharedCounter
from holdfast.workspace.spinning import CROWDED_SECONDS, WokenCondition
from servers import wait_until

DEADLINE_SECONDS = 30
TURNS = 20_000
LONG_MS = 600_000


class Core:
    """A core that others want too, or that nobody wants."""

    def __init__(self, *, is_crowded: bool) -> None:
        self.is_crowded = is_crowded
        self.yields = 0
        self.seconds = 0.0

    def give_way(self) -> None:
        """Others run, if there are any."""
        self.yields += 1
        if self.is_crowded:
            self.seconds += CROWDED_SECONDS

    def clock(self) -> float:
        """The time, which passes only while others run."""
        return self.seconds


def condition(counter: SharedCounter, core: Core) -> WokenCondition:
    return WokenCondition(counter, is_reader=True, give_way=core.give_way, clock=core.clock)


@pytest.fixture
def counter(tmp_path: Path) -> SharedCounter:
    return SharedCounter(tmp_path / "count", is_new=True)


def answer(own: Path, other: Path) -> None:
    """In another process: add one to its own for each time the other is changed."""
    heard, said = SharedCounter(other), SharedCounter(own)
    for turn in range(TURNS):
        while heard.value == turn:
            heard.until_other(turn, None)
        said.add_one()


def test_no_wake_is_lost_between_two_processes(tmp_path: Path) -> None:
    """Each sleeps until the other has changed its number, without a time-out."""
    paths = tmp_path / "ask", tmp_path / "answer"
    asked, answered = (SharedCounter(path, is_new=True) for path in paths)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=answer, args=(paths[1], paths[0]), daemon=True)
    process.start()
    asking = threading.Thread(target=ask, args=(asked, answered), daemon=True)
    asking.start()
    asking.join(DEADLINE_SECONDS)
    process.join(DEADLINE_SECONDS)
    process.kill()
    assert (asked.value, answered.value) == (TURNS, TURNS)


def ask(asked: SharedCounter, answered: SharedCounter) -> None:
    for turn in range(TURNS):
        asked.add_one()
        while answered.value == turn:
            answered.until_other(turn, None)


def test_a_counter_lasts_as_long_as_what_made_it(tmp_path: Path) -> None:
    """Nobody finds it before or after, and none is made twice."""
    path = tmp_path / "count"
    with pytest.raises(FileNotFoundError):
        SharedCounter(path)
    made = SharedCounter(path, is_new=True)
    with pytest.raises(FileExistsError):
        SharedCounter(path, is_new=True)
    assert SharedCounter(path).value == made.value
    del made
    assert not path.exists()


def test_nothing_is_left_of_a_counter_that_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose system call nobody knows."""
    monkeypatch.setattr(futex, "_SYSCALLS", {})
    with pytest.raises(OSError, match="no futex"):
        SharedCounter(tmp_path / "count", is_new=True)
    assert not list(tmp_path.iterdir())


def test_whoever_waits_for_another_number_waits_no_longer_than_allowed(
    counter: SharedCounter,
) -> None:
    """It returns, with the number as it was."""
    counter.until_other(counter.value, 1)
    assert counter.value == 0


def test_a_core_to_itself_is_kept(counter: SharedCounter) -> None:
    """Each wait gives way once, and looks again."""
    core = Core(is_crowded=False)
    reader = condition(counter, core)
    for _ in range(100):
        reader.wait(LONG_MS)
    assert core.yields == 100


def test_a_crowded_core_is_left(counter: SharedCounter) -> None:
    """It gives way once, looks once more, and sleeps until it is notified."""
    core = Core(is_crowded=True)
    reader = condition(counter, core)
    reader.wait(LONG_MS)
    assert core.yields == 1
    sleeper = threading.Thread(target=reader.wait, args=(LONG_MS,), daemon=True)
    sleeper.start()
    assert sleeper.is_alive()
    reader.notify()
    sleeper.join(DEADLINE_SECONDS)
    assert not sleeper.is_alive()
    assert core.yields == 1


def test_a_notification_before_the_sleep_is_not_slept_through(counter: SharedCounter) -> None:
    """It came after the reader had looked for the last time."""
    reader = condition(counter, Core(is_crowded=True))
    reader.wait(LONG_MS)
    reader.notify()
    sleeper = threading.Thread(target=reader.wait, args=(LONG_MS,), daemon=True)
    sleeper.start()
    wait_until(
        lambda: not sleeper.is_alive(),
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: "it sleeps",
    )
