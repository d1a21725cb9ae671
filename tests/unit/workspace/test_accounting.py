"""What a manager did is in the stats of its rank, which outlive the manager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from numpy import int64

from holdfast.records import Rejection, SlotStats
from holdfast.workspace.accounting import WorkspaceAccounting
from holdfast.workspace.stats import MAX_CALLERS, NAME_BYTES, StatsWriter
from workspace_managers import stats_of, written

SLOTS = ((0, 0), (0, 1))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[StatsWriter]:
    with stats_of(tmp_path) as stats:
        yield stats


def accounting_of(writer: StatsWriter | None) -> WorkspaceAccounting:
    accounting = WorkspaceAccounting(SLOTS)
    accounting.bind(writer)
    return accounting


def test_what_was_recorded_before_it_is_bound_is_written_then(writer: StatsWriter) -> None:
    """A manager that existed before the stats writes its present state to them."""
    accounting = accounting_of(None)
    accounting.set_size(1, 200)
    accounting.set_reserved(1, 150)
    accounting.record_request(1, 180, "attention.py:7:forward")
    accounting.set_retained(retired_bytes=11, persistent_bytes=12)
    accounting.set_lock(is_sealed=True, is_locked=False)
    accounting.bind(writer)
    stats = written(writer)
    assert stats.slots == (
        SlotStats(0, 0, 0, 0, 0, ""),
        SlotStats(0, 1, 200, 150, 180, "attention.py:7:forward"),
    )
    assert stats.callers == {"attention.py:7:forward": 180}
    assert (stats.retired_bytes, stats.persistent_bytes) == (11, 12)
    assert (stats.is_sealed, stats.is_locked) == (True, False)


def test_the_sizes_of_the_newest_lock_are_kept(writer: StatsWriter) -> None:
    """What a slot gets later is not what it was locked with."""
    accounting = accounting_of(writer)
    accounting.set_size(0, 100)
    for later, locked in ((300, 100), (500, 300)):
        accounting.set_lock(is_sealed=False, is_locked=True)
        accounting.set_size(0, later)
        accounting.set_lock(is_sealed=True, is_locked=True)
        assert [slot.locked_bytes for slot in written(writer).slots] == [locked, 0]
        accounting.set_lock(is_sealed=True, is_locked=False)


def test_growths_and_refusals_count_over_the_managers_of_a_rank(writer: StatsWriter) -> None:
    """A manager that replaces another continues its counts."""
    rejection = Rejection("scratch", "moe.py:1:run", 300, 200, "the growth policy is deny")
    for _ in range(2):
        accounting = accounting_of(writer)
        accounting.record_growth("locked")
        accounting.record_rejection(rejection)
    stats = written(writer)
    assert stats.growths == {"warmup": 0, "sealed": 0, "locked": 2}
    assert stats.rejections == {"scratch": 2, "persistent": 0, "permute": 0}
    assert stats.last_rejection == rejection


def test_a_second_manager_does_not_lower_the_high_water(writer: StatsWriter) -> None:
    """The largest need of a rank outlives the manager that met it."""
    accounting_of(writer).record_request(0, 500, "large")
    accounting_of(writer).record_request(0, 100, "small")
    stats = written(writer)
    assert (stats.slots[0].high_water_bytes, stats.slots[0].high_water_caller) == (500, "large")
    assert stats.callers == {"large": 500, "small": 100}


def test_the_largest_callers_are_kept(writer: StatsWriter) -> None:
    """Beyond the bound, a larger need takes the place of the smallest."""
    accounting = accounting_of(writer)
    for index in range(1, MAX_CALLERS + 3):
        accounting.record_request(0, index * 10, f"caller-{index}")
    accounting.record_request(0, 7, "caller-5")
    accounting.record_request(0, 1, "tiny")
    expected = {f"caller-{index}": index * 10 for index in range(3, MAX_CALLERS + 3)}
    assert written(writer).callers == expected


def test_sizes_may_be_integers_of_numpy(writer: StatsWriter) -> None:
    """A layer that computes its shape with NumPy does not fail for it."""
    accounting = accounting_of(writer)
    size_bytes: Any = int64(180)
    accounting.record_request(0, size_bytes, "attention.py:7:forward")
    stats = written(writer)
    assert stats.callers == {"attention.py:7:forward": 180}
    assert stats.slots[0].high_water_bytes == 180


def test_the_longest_names_and_reasons_are_cut(writer: StatsWriter) -> None:
    """A refusal is written whatever its caller is called."""
    accounting = accounting_of(writer)
    accounting.record_request(0, 1, "ä" * 500)
    accounting.record_rejection(Rejection("scratch", "\udcff" * 500, 1, 0, '"' * 50_000))
    stats = written(writer)
    assert next(iter(stats.callers)).startswith("ä" * 50)
    assert stats.slots[0].high_water_caller.startswith("ä" * 50)
    assert stats.last_rejection is not None
    assert stats.last_rejection.caller == "?" * (NAME_BYTES - 2)
    assert stats.last_rejection.reason.startswith('"' * 500)
