"""What waits is counted once, wherever it waits, and divided among the engines without a rest."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from holdfast.telemetry.load import (
    SATURATED_KV_USAGE,
    SATURATED_WAITING,
    Load,
    SchedulerReport,
    with_running,
)

COUNTS = st.integers(0, 300)
REPORTS = st.builds(SchedulerReport, COUNTS, COUNTS, COUNTS, st.floats(0, 1))
LOADS = st.builds(Load, COUNTS, COUNTS, st.lists(REPORTS, min_size=1, max_size=9).map(tuple))


def test_what_was_sent_and_is_in_no_report_waits() -> None:
    """A step may take seconds, and a scheduler reports when it is over."""
    load = Load(held=2, sent=5, schedulers=(SchedulerReport(running=1),))
    assert (load.running, load.waiting) == (1, 2 + 4)


def test_what_a_scheduler_reports_is_not_forgotten() -> None:
    """It still counts what a client has just given up, until its next report."""
    load = Load(sent=1, schedulers=(SchedulerReport(running=1, waiting=2, deferred=3),))
    assert load.waiting == 2 + 3


@given(LOADS)
def test_the_engines_share_what_waits_without_a_rest(load: Load) -> None:
    """Their sum is exact, none has less than its scheduler reported, and the rest is even."""
    shares = load.waiting_by_engine()
    assert sum(shares) == load.waiting
    rests = [
        share - report.all_waiting for share, report in zip(shares, load.schedulers, strict=True)
    ]
    assert 0 <= max(rests) - min(rests) <= 1
    assert min(rests) >= 0


@given(LOADS)
def test_a_saturated_load_is_full_and_hides_no_request(load: Load) -> None:
    """A router sees at least a long queue and a full cache; a longer queue stays as it is."""
    full = load.saturated()
    assert full.kv_usage == SATURATED_KV_USAGE
    assert full.waiting == max(load.waiting, SATURATED_WAITING * len(load.schedulers))
    assert full.running == load.running


def test_the_caches_of_all_engines_are_one() -> None:
    """They have one size, so the used share of all of them is the mean."""
    load = Load(schedulers=(SchedulerReport(kv_usage=0.5), SchedulerReport(kv_usage=0.1)))
    assert load.kv_usage is not None
    assert math.isclose(load.kv_usage, 0.3)


def test_the_adapters_of_all_engines_are_named_once() -> None:
    """In order, so that equal loads look equal."""
    one = SchedulerReport(running_loras=frozenset({"b", "a"}), waiting_loras=frozenset({"c"}))
    other = SchedulerReport(running_loras=frozenset({"b"}))
    load = Load(schedulers=(one, other))
    assert load.running_loras == ("a", "b")
    assert load.waiting_loras == ("c",)


def test_silent_schedulers_are_assumed_to_run_what_fits() -> None:
    """The rest waits, and nobody knows how full the cache is."""
    silent = (SchedulerReport(kv_usage=None),)
    load = Load(sent=10, schedulers=with_running(silent, 10, 8))
    assert (load.running, load.waiting, load.kv_usage) == (8, 2, None)
    assert Load(sent=10, schedulers=with_running(silent, 10, math.inf)).waiting == 0


def test_what_a_step_finishes_ran_until_then() -> None:
    """A pooling model runs what it was sent, though its scheduler reports 0 after each step."""
    reports = (SchedulerReport(waiting=1), SchedulerReport())
    load = Load(sent=6, schedulers=with_running(reports, 6, 8))
    assert [report.running for report in load.schedulers] == [3, 2]
    assert load.waiting == 1


@given(LOADS, COUNTS)
def test_no_more_runs_than_was_sent_and_fits(load: Load, running_at_once: int) -> None:
    """A scheduler may still report requests that have ended: then nothing is known to run."""
    schedulers = with_running(load.schedulers, load.sent, running_at_once)
    running = sum(report.running for report in schedulers)
    assert 0 <= running <= min(load.sent, running_at_once)
    assert [one.all_waiting for one in schedulers] == [one.all_waiting for one in load.schedulers]
