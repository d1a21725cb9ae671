"""What is recorded without viewers."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from holdfast.records import BaselineComparison, Death
from holdfast.status_page import history as histories
from holdfast.status_page.history import History, Sample
from holdfast.verify.records import VerifyRun
from sample_status import a_probe, a_rank
from stub_engine import FakeClock

DEADLINE_SECONDS = 60
INTERVAL_SECONDS = 0.05


def until_samples(
    count: int,
    history: History,
    sample: Callable[[], Sample],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let a history take this many samples, in short intervals."""
    monkeypatch.setattr(histories, "INTERVAL_SECONDS", INTERVAL_SECONDS)
    asked = 0

    def counted() -> Sample:
        nonlocal asked
        asked += 1
        return sample()

    async def play() -> None:
        async with asyncio.timeout(DEADLINE_SECONDS), history.sampled(counted):
            while asked < count:  # noqa: ASYNC110 - the history tells nobody
                await asyncio.sleep(0.001)

    asyncio.run(play())


def events(history: History) -> list[Mapping[str, Any]]:
    """Every event without its time, oldest first."""
    return [
        {name: fact for name, fact in event.items() if name != "at"}
        for event in history.timeline.events().values()
    ]


def test_states_deaths_and_proofs_are_events_of_their_generation() -> None:
    """With what an operator asks first."""
    history = History(lambda: 2)
    history.state_changed("RECOVERING", "the engine died: stall: no step")
    history.engine_died(Death("stall", "no step"))
    history.probe_ran(a_probe())
    assert events(history) == [
        {
            "kind": "state",
            "state": "RECOVERING",
            "reason": "the engine died: stall: no step",
            "generation": 2,
        },
        {"kind": "death", "cause": "stall", "reason": "no step", "generation": 2},
        {
            "kind": "probe",
            "suite": "worst-case",
            "is_whole": True,
            "passed": True,
            "limited": True,
            "proven_tokens": 2048,
            "duration_seconds": 4.0,
            "generation": 2,
        },
    ]


def test_one_request_is_not_the_time_of_the_suite() -> None:
    """It shows a proven engine again; the whole run before it stays what was proven, and when."""
    clock = FakeClock()
    history = History(lambda: 1, clock=clock)
    history.probe_ran(a_probe())
    clock.now_seconds += 100
    history.probe_ran(replace(a_probe(), is_whole=False))
    assert history.probed_unix_seconds == {"worst-case": clock.now_seconds - 100}
    assert [event["is_whole"] for event in events(history)] == [True, False]


def test_a_probe_that_is_off_is_not_an_event() -> None:
    """Nothing ran, so nothing passed."""
    history = History(lambda: 1)
    history.probe_ran(replace(a_probe(), suite="off"))
    assert events(history) == []
    assert history.probed_unix_seconds == {}


def test_the_last_run_of_verify_is_kept() -> None:
    """With the time at which it was told; each is an event."""
    history = History(lambda: 1, clock=lambda: 5.0)
    runs = VerifyRun("failed", "quick", 3, 1, 0), VerifyRun("passed", "full", 40, 0, 1)
    for run in runs:
        history.verified(run)
    assert history.last_verified == (runs[1], 5.0)
    assert events(history) == [
        {"kind": "verify", "verdict": "failed", "profile": "quick", "generation": 1},
        {"kind": "verify", "verdict": "passed", "profile": "full", "generation": 1},
    ]


def growths(history: History) -> list[tuple[Any, ...]]:
    """Generation, ranks, phase and number of each growth."""
    names = ("generation", "ranks", "phase", "growths")
    return [tuple(event[name] for name in names) for event in events(history)]


def test_each_growth_is_told_once() -> None:
    """By phase; those of the warm-up are not worth an event."""
    history = History(lambda: 1)
    grown = a_rank(growths={"warmup": 5, "sealed": 1, "locked": 2}), a_rank(rank=1, growths={})
    history.saw_ranks(grown)
    history.saw_ranks(grown)
    assert growths(history) == [(1, [0], "sealed", 1), (1, [0], "locked", 2)]
    history.saw_ranks([a_rank(growths={"sealed": 1, "locked": 3})])
    assert growths(history)[2:] == [(1, [0], "locked", 1)]


def test_ranks_that_grow_together_are_one_event_of_their_engine() -> None:
    """A step makes all of them grow, and an event of each would evict the deaths."""
    history = History(lambda: 1)
    history.saw_ranks(
        a_rank(engine=engine, rank=rank, growths={"locked": 2})
        for engine in (0, 1)
        for rank in (1, 0)
    )
    assert growths(history) == [(1, [0, 1], "locked", 4), (1, [0, 1], "locked", 4)]


def test_a_rank_that_is_missing_for_once_is_not_told_again() -> None:
    """The file of a rank may be unreadable for a moment."""
    history = History(lambda: 1)
    both = [a_rank(growths={"locked": 1}), a_rank(rank=1, growths={"locked": 1})]
    for seen in (both, both[:1], both):
        history.saw_ranks(seen)
    assert growths(history) == [(1, [0, 1], "locked", 2)]


def test_the_next_generation_counts_from_zero() -> None:
    """And while there is no engine, nothing is forgotten."""
    history = History(lambda: 1)
    history.saw_ranks([a_rank(growths={"locked": 2})])
    history.saw_ranks([])
    history.saw_ranks([a_rank(growths={"locked": 2})])
    history.saw_ranks([a_rank(generation=2, growths={"locked": 1})])
    assert growths(history) == [(1, [0], "locked", 2), (2, [0], "locked", 1)]


def test_a_point_has_the_rates_of_its_interval() -> None:
    """And percentiles of the first tokens that came in it."""
    history = History(lambda: 1)
    history.take(Sample(prompt_tokens=100, output_tokens=10), 4, 15.0)
    history.take(
        Sample(
            prompt_tokens=130,
            output_tokens=40,
            first_token_seconds=(0.2, 0.1, 3.0),
            running=2,
            waiting=1,
            kv_used_ratio=0.25,
        ),
        5,
        15.0,
    )
    assert history.curves.points()["5"] == {
        "prompt_tokens_per_second": 2.0,
        "output_tokens_per_second": 2.0,
        "first_tokens": 3,
        "first_token_median_seconds": 0.2,
        "first_token_p99_seconds": 3.0,
        "running": 2,
        "waiting": 1,
        "kv_used_ratio": 0.25,
    }


def test_a_canary_is_in_the_point_of_its_interval() -> None:
    """Once; one that found other tokens altogether has no difference that JSON could write."""
    history = History(lambda: 1)
    for interval, canary in enumerate(
        (
            BaselineComparison(True, 0.25, 1.0),
            BaselineComparison(True, 0.25, 1.0),
            BaselineComparison(False, math.inf, 2.0),
        )
    ):
        history.take(Sample(canary=canary), interval, 15.0)
    points = history.curves.points().values()
    assert [point.get("canary_worst_nats") for point in points] == [0.25, None, None]
    assert [point.get("canary_agrees") for point in points] == [True, None, False]


def test_a_sample_is_never_taken_before_its_interval_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep that is too short would give the interval a second point, without any tokens."""
    began_seconds = time.monotonic()
    seen: list[int] = []

    def slow_clock() -> float:
        return 0.9 * (time.monotonic() - began_seconds)

    def sample() -> Sample:
        seen.append(int(slow_clock() // INTERVAL_SECONDS))
        return Sample()

    until_samples(4, History(lambda: 1, clock=slow_clock), sample, monkeypatch)
    assert len(set(seen)) == len(seen)


def test_a_clock_that_is_set_back_does_not_stop_the_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hour before is not waited for."""
    began_seconds = time.monotonic()
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return time.monotonic() - began_seconds + (7200.0 if looks < 3 else 3600.0)

    history = History(lambda: 1, clock=clock)
    until_samples(2, history, Sample, monkeypatch)
    assert history.curves.points()


def test_a_sample_that_fails_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the curves go on."""
    failures = iter([OSError("broken on purpose")])

    def sample() -> Sample:
        for failure in failures:
            raise failure
        return Sample(running=7)

    history = History(lambda: 1)
    with caplog.at_level(logging.ERROR):
        until_samples(3, history, sample, monkeypatch)
    assert "broken on purpose" in caplog.text
    assert [point["running"] for point in history.curves.points().values()][-1] == 7
