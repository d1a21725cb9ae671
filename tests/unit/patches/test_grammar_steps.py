"""A step waits for a grammar for as long as that has CPU time, and for the others anyway."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from holdfast.patches import grammar_memory, grammar_steps
from holdfast.patches.grammar_steps import (
    BURST_SECONDS,
    FAILED,
    HAD_NO_TIME,
    SECONDS_PER_TOKEN,
    TOO_LARGE,
    TOO_SLOW,
    GrammarBudget,
    GrammarThreads,
    Job,
)

DEADLINE_SECONDS = 60.0
LEISURE_SECONDS = 60.0
"""More CPU time than a grammar takes that touches memory, on any machine."""
BLOCK_BYTES = 32 << 20
LONG_ITERATIONS = 5_000_000
"""Of a hash, in native code without Python's lock: seconds of CPU time."""


class Seen:
    """What became of the jobs of a step, by name."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}

    def job(self, name: str, work: Callable[[], Any], budget: GrammarBudget | None = None) -> Job:
        def finish(result: Any) -> None:
            self.said[name] = result

        def give_up(reason: str) -> None:
            self.said[name] = reason

        return Job(work, finish, give_up, budget or GrammarBudget())


def long_work(ended: threading.Event) -> None:
    hashlib.pbkdf2_hmac("sha256", b"", b"", LONG_ITERATIONS)
    ended.set()


def some_work() -> str:
    hashlib.pbkdf2_hmac("sha256", b"", b"", 20_000)
    return "done"


def work_for(seconds: float) -> str:
    until_seconds = time.thread_time() + seconds
    while time.thread_time() < until_seconds:
        pass
    return "done"


def test_a_step_goes_on_without_a_grammar_that_takes_too_long() -> None:
    """Native code that nothing can interrupt goes on beside the steps, and the others are done."""
    ended = threading.Event()
    seen, threads = Seen(), GrammarThreads()
    before = seen.job("before", lambda: "done")
    long = seen.job("long", lambda: long_work(ended))
    after = seen.job("after", lambda: "done")
    threads.run([before, long, after])
    assert not ended.is_set()
    assert seen.said == {"before": "done", "long": TOO_SLOW, "after": "done"}
    threads.run([seen.job("next", lambda: "done")])
    assert seen.said["next"] == "done"
    assert ended.wait(DEADLINE_SECONDS)
    assert seen.said["long"] == TOO_SLOW


def test_what_is_given_up_has_the_lowest_priority() -> None:
    """It takes no CPU from the engine."""
    numbers: list[int] = []
    ended = threading.Event()
    ours = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def work() -> None:
        numbers.append(threading.get_native_id())
        long_work(ended)

    GrammarThreads().run([Seen().job("long", work)])
    assert os.getpriority(os.PRIO_PROCESS, numbers[0]) == grammar_steps._LOWEST_PRIORITY
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == ours
    assert ended.wait(DEADLINE_SECONDS)


def test_many_grammars_that_are_all_too_slow_do_not_add_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When a step is late, none may take what it has saved."""
    monkeypatch.setattr(grammar_steps, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(grammar_steps, "SECONDS_PER_TOKEN", 0.0)
    seen = Seen()
    GrammarThreads().run([seen.job(str(number), some_work) for number in range(16)])
    assert set(seen.said.values()) == {TOO_SLOW}


@pytest.mark.parametrize("poll_seconds", [grammar_steps._POLL_SECONDS, LEISURE_SECONDS])
def test_a_grammar_that_others_make_late_is_not_called_slow(
    monkeypatch: pytest.MonkeyPatch, poll_seconds: float
) -> None:
    """Nothing is known against it, whether it is given up at work or at its end."""
    monkeypatch.setattr(grammar_steps, "_POLL_SECONDS", poll_seconds)
    monkeypatch.setattr(grammar_steps, "STEP_SECONDS", 1.5)
    seen = Seen()
    jobs = [
        seen.job(name, partial(work_for, seconds), GrammarBudget(LEISURE_SECONDS))
        for name, seconds in (("first", 0.9), ("late", 1.0))
    ]
    GrammarThreads().run(jobs)
    assert seen.said == {"first": "done", "late": HAD_NO_TIME}


def test_a_grammar_that_only_waits_is_not_called_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The container may have been frozen meanwhile."""
    monkeypatch.setattr(grammar_steps, "MAX_WAIT_SECONDS", 0.1)
    ended, seen = threading.Event(), Seen()
    GrammarThreads().run([seen.job("waits", lambda: ended.wait(DEADLINE_SECONDS))])
    ended.set()
    assert seen.said == {"waits": HAD_NO_TIME}


def test_a_grammar_that_raises_concerns_no_other() -> None:
    """In EngineCore itself, that would end the engine."""
    seen = Seen()

    def broken() -> None:
        raise RuntimeError("an assertion in native code")

    GrammarThreads().run([seen.job("broken", broken), seen.job("after", lambda: "done")])
    assert seen.said == {"broken": FAILED, "after": "done"}


@pytest.fixture
def leisure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no grammar be too slow."""
    monkeypatch.setattr(grammar_steps, "STEP_SECONDS", LEISURE_SECONDS)
    monkeypatch.setattr(grammar_steps, "SECONDS_PER_TOKEN", LEISURE_SECONDS)


@pytest.mark.usefixtures("leisure")
def test_a_grammar_that_grows_too_large_concerns_no_other() -> None:
    """It is given up when it has touched more memory than it may, all of its tokens together."""
    held: list[bytes] = []
    seen, threads, budget = Seen(), GrammarThreads(), GrammarBudget(most_bytes=3 * BLOCK_BYTES)

    def grow() -> None:
        held.append(b"x" * BLOCK_BYTES)

    for _ in range(5):
        threads.run([seen.job("growing", grow, budget), seen.job("usual", lambda: "done")])
        if seen.said["growing"] is not None:
            break
    assert seen.said == {"growing": TOO_LARGE, "usual": "done"}
    assert 3 <= len(held) <= 4


@pytest.mark.usefixtures("leisure")
def test_grammars_that_grow_in_one_step_are_all_given_up() -> None:
    """What the first of them gave back does not hide what the next one takes."""
    held: dict[str, bytes] = {}
    seen = Seen()

    def growing(name: str) -> Job:
        def grow() -> None:
            held[name] = b"x" * 4 * BLOCK_BYTES

        def give_up(reason: str) -> None:
            del held[name]
            job.give_up(reason)

        job = seen.job(name, grow, GrammarBudget(most_bytes=BLOCK_BYTES))
        return replace(job, give_up=give_up)

    GrammarThreads().run([growing("one"), growing("two"), growing("three")])
    assert set(seen.said.values()) == {TOO_LARGE}
    assert not held


@pytest.mark.usefixtures("leisure")
@pytest.mark.parametrize("has_huge_pages", [False, True])
def test_a_grammar_is_not_charged_what_others_take(
    monkeypatch: pytest.MonkeyPatch, has_huge_pages: bool
) -> None:
    """However much that is, and however the kernel counts."""
    monkeypatch.setattr(grammar_memory, "_HAS_HUGE_PAGES", has_huge_pages)
    held: list[bytes] = []

    def wait_for_neighbour() -> str:
        neighbour = threading.Thread(target=lambda: held.append(b"x" * 16 * BLOCK_BYTES))
        neighbour.start()
        neighbour.join()
        return "done"

    seen = Seen()
    budget = GrammarBudget(most_bytes=8 * BLOCK_BYTES)
    GrammarThreads().run([seen.job("usual", wait_for_neighbour, budget)])
    assert seen.said == {"usual": "done"}


def test_a_large_step_is_shared() -> None:
    """Each job is done once, whichever thread takes it."""
    counts: list[int] = []
    seen = Seen()
    jobs = [seen.job(str(n), partial(counts.append, n)) for n in range(1000)]
    GrammarThreads().run(jobs)
    assert sorted(counts) == list(range(1000))
    assert len(seen.said) == 1000


def test_a_budget_allows_so_much_on_average() -> None:
    """And more at once only of what was saved."""
    budget = GrammarBudget()
    assert not budget.spend(BURST_SECONDS, 1)
    for _ in range(100):
        assert not budget.spend(SECONDS_PER_TOKEN, 1)
    assert budget.spend(3 * SECONDS_PER_TOKEN, 1) == TOO_SLOW


def test_a_budget_saves_so_much_and_no_more() -> None:
    """However many cheap tokens came first."""
    budget = GrammarBudget()
    for _ in range(10_000):
        budget.spend(0.0, 1)
    assert budget.spend(BURST_SECONDS + 2 * SECONDS_PER_TOKEN, 1) == TOO_SLOW
