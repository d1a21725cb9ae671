"""The file of a rank says what its worker wrote: while it runs and after it is dead."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.records import GROWTH_PHASES, REJECTION_KINDS, Rejection
from holdfast.workspace.stats import (
    MAX_CALLERS,
    RECENT_STEPS,
    StatsWriter,
    read_all,
    read_stats,
    stats_path,
)

WORKER = """
import sys
from pathlib import Path
from holdfast.records import Rejection
from holdfast.workspace.stats import StatsWriter

writer = StatsWriter(Path(sys.argv[1]), engine=1, rank=2, generation=3)
writer.phase("load")
writer.slot_count(2)
writer.slot(0, ubatch=0, lane=0, size_bytes=100)
writer.slot(1, ubatch=0, lane=1, size_bytes=200)
writer.reserved(1, 150)
writer.high_water(1, 180, "attention.py:7:forward")
writer.caller("attention.py:7:forward", 180)
writer.growth("locked")
writer.holdings(retired_bytes=11, persistent_bytes=12)
writer.lamport(13)
writer.lock(is_sealed=True, is_locked=True)
writer.memory("weights", 14)
writer.rejection(Rejection("scratch", "moe.py:1:run", 300, 200, "the growth policy is deny"))
writer.step_started()
writer.step_ended(scheduled_tokens=32, requests=4)
writer.step_started()
writer.fatal_error("AssertionError: Workspace is locked")
writer.fatal_error("a later cause")
print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def writer(tmp_path: Path) -> StatsWriter:
    """A file of rank 0."""
    return StatsWriter(tmp_path, engine=0, rank=0, generation=1)


def test_a_reader_sees_what_another_process_wrote_also_once_it_is_killed(tmp_path: Path) -> None:
    """The record of a live worker is whole, and SIGKILL takes nothing from it."""
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "written\n"
        alive = read_stats(stats_path(tmp_path, 1, 2))
        worker.send_signal(signal.SIGKILL)
        worker.wait(timeout=30)
    assert alive is not None
    assert alive == read_stats(stats_path(tmp_path, 1, 2))
    assert (alive.engine, alive.rank, alive.generation, alive.pid) == (1, 2, 3, worker.pid)
    assert [(s.ubatch, s.lane, s.size_bytes) for s in alive.slots] == [(0, 0, 100), (0, 1, 200)]
    assert (alive.slots[1].reserved_bytes, alive.slots[1].high_water_bytes) == (150, 180)
    assert alive.slots[1].high_water_caller == "attention.py:7:forward"
    assert alive.callers == {"attention.py:7:forward": 180}
    assert alive.growths == {"warmup": 0, "sealed": 0, "locked": 1}
    assert (alive.retired_bytes, alive.persistent_bytes, alive.lamport_bytes) == (11, 12, 13)
    assert alive.is_sealed
    assert alive.is_locked
    assert alive.memory == {"weights": 14}
    assert set(alive.phases) == {"load"}
    assert alive.last_rejection == Rejection(
        "scratch", "moe.py:1:run", 300, 200, "the growth policy is deny"
    )
    assert (alive.steps, alive.scheduled_tokens) == (1, 32)
    assert alive.running_step_started_seconds is not None
    assert [(s.index, s.scheduled_tokens, s.requests) for s in alive.recent_steps] == [(1, 32, 4)]
    assert alive.fatal_error == "AssertionError: Workspace is locked"


def test_a_new_file_knows_nothing(writer: StatsWriter) -> None:
    """What was not measured is absent, not zero."""
    stats = read_stats(writer.path)
    assert stats is not None
    assert (stats.slots, stats.memory, stats.phases, stats.callers) == ((), {}, {}, {})
    assert stats.last_rejection is None
    assert stats.running_step_started_seconds is None
    assert stats.last_step_ended_seconds is None
    assert stats.growths == dict.fromkeys(GROWTH_PHASES, 0)
    assert stats.rejections == dict.fromkeys(REJECTION_KINDS, 0)


def test_all_ranks_are_found_in_order(tmp_path: Path) -> None:
    """Files come by engine and rank; what is no stats file is passed over."""
    for engine, rank in ((1, 0), (0, 10), (0, 2)):
        StatsWriter(tmp_path, engine=engine, rank=rank, generation=1).close()
    (tmp_path / "other.stats").write_text("not ours")
    assert [(s.engine, s.rank) for s in read_all(tmp_path)] == [(0, 2), (0, 10), (1, 0)]
    assert read_all(tmp_path / "missing") == ()


def test_a_new_worker_takes_the_place_of_the_old_at_once(writer: StatsWriter) -> None:
    """The file of the same rank is replaced whole by the next generation."""
    writer.slot_count(1)
    with StatsWriter(writer.path.parent, engine=0, rank=0, generation=2):
        writer.growth("warmup")
        stats = read_stats(writer.path)
    assert stats is not None
    assert (stats.generation, stats.slots, stats.growths["warmup"]) == (2, (), 0)


def test_a_missing_or_short_file_is_none(writer: StatsWriter, tmp_path: Path) -> None:
    """Only a whole file is read."""
    assert read_stats(tmp_path / "missing.stats") is None
    for size in (0, 1, 100, writer.path.stat().st_size - 1):
        cut = tmp_path / "cut.stats"
        cut.write_bytes(writer.path.read_bytes()[:size])
        assert read_stats(cut) is None


def test_garbage_is_none(writer: StatsWriter, tmp_path: Path) -> None:
    """A file of the right size that does not begin as ours is not read."""
    garbage = tmp_path / "garbage.stats"
    garbage.write_bytes(random.Random(7).randbytes(writer.path.stat().st_size))
    assert read_stats(garbage) is None


def test_another_layout_is_none(writer: StatsWriter) -> None:
    """A file of another version of Holdfast is not misread."""
    content = bytearray(writer.path.read_bytes())
    content[8] += 1
    writer.path.write_bytes(content)
    assert read_stats(writer.path) is None


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32))
def test_a_corrupt_file_is_never_fatal(seed: int, writer: StatsWriter, tmp_path: Path) -> None:
    """Behind a right beginning, bytes that nobody wrote give no record, and no error."""
    corrupt = tmp_path / "corrupt.stats"
    size = writer.path.stat().st_size - 16
    corrupt.write_bytes(writer.path.read_bytes()[:16] + random.Random(seed).randbytes(size))
    assert read_stats(corrupt) is None
    assert read_stats(corrupt, with_steps=False) is None


def test_the_largest_callers_are_kept(writer: StatsWriter) -> None:
    """Beyond the bound a larger need takes the place of the smallest, a smaller one none."""
    for index in range(1, MAX_CALLERS + 3):
        writer.caller(f"caller-{index}", index * 10)
    writer.caller("caller-5", 7)
    writer.caller("tiny", 1)
    stats = read_stats(writer.path)
    assert stats is not None
    assert stats.callers == {f"caller-{index}": index * 10 for index in range(3, MAX_CALLERS + 3)}


def test_the_newest_steps_are_kept(writer: StatsWriter) -> None:
    """The ring holds the newest steps, oldest first, and the totals count all of them."""
    for index in range(1, RECENT_STEPS + 6):
        writer.step_started()
        writer.step_ended(scheduled_tokens=index, requests=1)
    stats = read_stats(writer.path)
    assert stats is not None
    assert [step.index for step in stats.recent_steps] == list(range(6, RECENT_STEPS + 6))
    assert all(step.scheduled_tokens == step.index for step in stats.recent_steps)
    assert stats.steps == RECENT_STEPS + 5
    assert stats.scheduled_tokens == sum(range(1, RECENT_STEPS + 6))


def test_long_and_foreign_text_is_cut_not_refused(writer: StatsWriter) -> None:
    """A name or reason of any length and alphabet is kept as far as there is room."""
    writer.caller("ä" * 500, 1)
    writer.fatal_error("\udcff" + "x" * 5000)
    stats = read_stats(writer.path)
    assert stats is not None
    assert next(iter(stats.callers)).startswith("ä" * 50)
    assert stats.fatal_error.endswith("x" * 100)


def test_the_file_is_read_while_it_is_written(writer: StatsWriter) -> None:
    """A reader in the middle of steps sees every counter grow and no step out of order."""
    seen = 0
    for index in range(1, 200):
        writer.step_started()
        writer.step_ended(scheduled_tokens=1, requests=1)
        stats = read_stats(writer.path)
        assert stats is not None
        assert stats.steps == index > seen
        seen = stats.steps
    assert os.getpid() == writer._record.pid
