"""The file of a rank says what its worker wrote: while it runs and after it is dead."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.labels import GROWTH_PHASES, MEMORY_KINDS, REJECTION_KINDS, START_PHASES
from holdfast.records import Rejection, SlotStats
from holdfast.workspace.stats import (
    MAX_CALLERS,
    MAX_SLOTS,
    NAME_BYTES,
    RECENT_STEPS,
    TEXT_BYTES,
    StatsWriter,
    cut_text,
    read_all,
    read_stats,
    stats_path,
)
from holdfast.workspace.stats.layout import REPORT_BYTES, ReportPlace, encoded_report, report_offset

MOST = (1 << 63) - 1

WORKER = """
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from holdfast.records import Rejection, SlotStats
from holdfast.workspace.stats import StatsWriter

CALLER = "attention.py:7:forward"
writer = StatsWriter(Path(sys.argv[1]), engine=1, rank=2, generation=3)
writer.update(lambda report: replace(
    report,
    slots=(SlotStats(0, 0, 100, 0, 0, ""), SlotStats(0, 1, 200, 150, 180, CALLER)),
    callers={CALLER: 180},
    growths={**report.growths, "locked": 1},
    retired_bytes=11,
    persistent_bytes=12,
    lamport_bytes=13,
    is_sealed=True,
    is_locked=True,
    memory={"weights": 14},
    phases={"load": 15.5},
    last_rejection=Rejection("scratch", "moe.py:1:run", 300, 200, "the growth policy is deny"),
))
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
    assert alive.phases == {"load": 15.5}
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
    assert stats.lamport_bytes is None
    assert stats.running_step_started_seconds is None
    assert stats.last_step_ended_seconds is None
    assert stats.growths == dict.fromkeys(GROWTH_PHASES, 0)
    assert stats.rejections == dict.fromkeys(REJECTION_KINDS, 0)


def test_all_ranks_are_found_in_order(tmp_path: Path) -> None:
    """Files come by engine and rank; other files are skipped."""
    for engine, rank in ((1, 0), (0, 10), (0, 2)):
        StatsWriter(tmp_path, engine=engine, rank=rank, generation=1).close()
    (tmp_path / "other.stats").write_text("not ours")
    assert [(s.engine, s.rank) for s in read_all(tmp_path)] == [(0, 2), (0, 10), (1, 0)]
    assert read_all(tmp_path / "missing") == ()


def test_a_new_worker_takes_the_place_of_the_old_at_once(writer: StatsWriter) -> None:
    """The file of the same rank is replaced whole by the next generation."""
    with StatsWriter(writer.path.parent, engine=0, rank=0, generation=2):
        writer.update(lambda report: replace(report, retired_bytes=1))
        stats = read_stats(writer.path)
    assert stats is not None
    assert (stats.generation, stats.retired_bytes) == (2, 0)


def test_a_missing_or_short_file_is_none(writer: StatsWriter, tmp_path: Path) -> None:
    """Only a whole file is read."""
    assert read_stats(tmp_path / "missing.stats") is None
    for size in (0, 1, 100, writer.path.stat().st_size - 1):
        cut = tmp_path / "cut.stats"
        cut.write_bytes(writer.path.read_bytes()[:size])
        assert read_stats(cut) is None


def test_garbage_is_none(writer: StatsWriter, tmp_path: Path) -> None:
    """A file of the right size with another beginning is not read."""
    garbage = tmp_path / "garbage.stats"
    garbage.write_bytes(random.Random(7).randbytes(writer.path.stat().st_size))
    assert read_stats(garbage) is None


def test_another_layout_is_none(writer: StatsWriter) -> None:
    """A file of another version of Holdfast is not misread."""
    content = bytearray(writer.path.read_bytes())
    content[8] += 1
    writer.path.write_bytes(content)
    assert read_stats(writer.path) is None


def test_the_report_of_another_version_is_none(writer: StatsWriter) -> None:
    """A whole report that does not fit our records is not misread."""
    writer._put(report_offset(2), b"{}")
    writer._place = ReportPlace(2, 2, zlib.crc32(b"{}"))
    writer._show()
    assert read_stats(writer.path) is None


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32))
def test_a_corrupt_file_is_never_fatal(seed: int, writer: StatsWriter, tmp_path: Path) -> None:
    """Random bytes after a valid beginning give no record and no error."""
    corrupt = tmp_path / "corrupt.stats"
    size = writer.path.stat().st_size - 16
    corrupt.write_bytes(writer.path.read_bytes()[:16] + random.Random(seed).randbytes(size))
    assert read_stats(corrupt) is None
    assert read_stats(corrupt, reads_steps=False) is None


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


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        ("ä" * 500, "ä" * 50),
        ("\udcff" + "x" * 5000, "?" + "x" * 100),
        ('"\\' * 500, '"\\' * 25),
        ("\x00\n" * 500, "\x00\n" * 10),
        ("short", "short"),
        ("", ""),
    ],
)
def test_a_text_of_any_length_and_alphabet_is_cut_not_refused(given: str, begins: str) -> None:
    """It is kept as far as there is room for it, however JSON escapes it."""
    kept = cut_text(given, NAME_BYTES)
    assert kept.startswith(begins)
    assert len(json.dumps(kept, ensure_ascii=False).encode()) <= NAME_BYTES


def test_the_fullest_report_has_room(writer: StatsWriter) -> None:
    """The longest texts and numbers in every place leave room for further numbers."""
    name, reason = cut_text('"' * 500, NAME_BYTES), cut_text("\n" * 5000, TEXT_BYTES)
    slot = SlotStats(MOST, MOST, MOST, MOST, MOST, name, MOST)
    writer.update(
        lambda report: replace(
            report,
            slots=(slot,) * MAX_SLOTS,
            retired_bytes=MOST,
            persistent_bytes=MOST,
            lamport_bytes=MOST,
            growths=dict.fromkeys(GROWTH_PHASES, MOST),
            rejections=dict.fromkeys(REJECTION_KINDS, MOST),
            last_rejection=Rejection("persistent", name, MOST, MOST, reason),
            callers={f"{index:02}{name[2:]}": MOST for index in range(MAX_CALLERS)},
            memory=dict.fromkeys(MEMORY_KINDS, MOST),
            phases=dict.fromkeys(START_PHASES, 1e9 / 3),
        )
    )
    writer.fatal_error("\n" * 5000)
    stats = read_stats(writer.path)
    assert stats is not None
    assert (stats.slots[-1], stats.fatal_error) == (slot, reason)
    assert len(encoded_report(stats)) < REPORT_BYTES * 3 / 4


def test_a_report_without_room_is_refused_and_changes_nothing(writer: StatsWriter) -> None:
    """Readers keep the one before, and the next one is written."""
    before = read_stats(writer.path)
    with pytest.raises(ValueError, match="takes 20"):
        writer.update(lambda report: replace(report, fatal_error="x" * 20_000))
    assert read_stats(writer.path) == before
    writer.fatal_error("short")
    after = read_stats(writer.path)
    assert after is not None
    assert after.fatal_error == "short"


def test_the_file_is_read_while_it_is_written(writer: StatsWriter) -> None:
    """A reader between steps sees every counter grow and no step out of order."""
    seen = 0
    for index in range(1, 200):
        writer.step_started()
        writer.step_ended(scheduled_tokens=1, requests=1)
        stats = read_stats(writer.path)
        assert stats is not None
        assert stats.steps == index > seen
        seen = stats.steps
