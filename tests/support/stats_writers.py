"""Writers of statistics with numbers that follow from each other, and checks of what is read."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from holdfast.labels import GROWTH_PHASES, REJECTION_KINDS
from holdfast.records import RankReport, RankStats, Rejection, SlotStats
from holdfast.workspace.stats import (
    MAX_CALLERS,
    RECENT_STEPS,
    StatsWriter,
    read_stats,
    stats_path,
)

CALLERS = MAX_CALLERS + 8
DEADLINE_SECONDS = 60.0
_WORKER = "import sys, stats_writers as w, pathlib; w.write_forever(pathlib.Path(sys.argv[1]))"


def write_forever(directory: Path) -> None:
    """Be the worker: count in every place that there is, as fast as it goes."""
    with StatsWriter(directory, engine=0, rank=0, generation=1) as writer:
        number = 0
        while True:
            number += 1
            write_once(writer, number)


def write_once(writer: StatsWriter, number: int) -> None:
    """Write everything that follows from `number`."""
    writer.step_started()
    writer.step_ended(scheduled_tokens=number, requests=number % 7)
    writer.update(partial(next_report, number=number))


def next_report(report: RankReport, number: int) -> RankReport:
    """Return the report with this number, which counts on from the one before."""
    phase = GROWTH_PHASES[number % len(GROWTH_PHASES)]
    refused = rejection(number)
    return replace(
        report,
        slots=(
            SlotStats(0, 0, number, 0, number, text(number)),
            SlotStats(number, number, number, 0, 0, ""),
        ),
        retired_bytes=number,
        persistent_bytes=number,
        growths={**report.growths, phase: report.growths[phase] + 1},
        rejections={**report.rejections, refused.kind: report.rejections[refused.kind] + 1},
        last_rejection=refused,
        callers={f"caller-{n % CALLERS}": n for n in range(max(1, number - 15), number + 1)},
    )


def text(number: int) -> str:
    """A name that fills its place, so that half of one is not another."""
    return (f"{number}:" * 120)[:119]


def rejection(number: int) -> Rejection:
    """The refusal with this number."""
    kind = REJECTION_KINDS[number % len(REJECTION_KINDS)]
    return Rejection(kind, text(number), number, -number, text(number) * 10)


def check_whole(stats: RankStats) -> None:
    """Raise AssertionError if two places do not belong to one moment."""
    steps = stats.steps
    assert stats.scheduled_tokens == steps * (steps + 1) // 2
    seen = [(step.index, step.scheduled_tokens, step.requests) for step in stats.recent_steps]
    oldest = max(1, steps - RECENT_STEPS + 1)
    assert seen == [(index, index, index % 7) for index in range(oldest, steps + 1)]
    for slot in stats.slots:
        needed_bytes = slot.high_water_bytes
        assert slot.high_water_caller == (text(needed_bytes) if needed_bytes else "")
    if stats.slots:
        assert stats.slots[1].ubatch == stats.slots[1].lane == stats.slots[1].size_bytes
    assert stats.retired_bytes == stats.persistent_bytes
    assert len(stats.callers) == min(MAX_CALLERS, max(stats.callers.values(), default=0))
    assert all(name == f"caller-{need % CALLERS}" for name, need in stats.callers.items())
    refused = sum(stats.rejections.values())
    assert stats.last_rejection == (rejection(refused) if refused else None)
    counts = [
        len(range(place or len(REJECTION_KINDS), refused + 1, len(REJECTION_KINDS)))
        for place in range(len(REJECTION_KINDS))
    ]
    assert list(stats.rejections.values()) == counts


def check_no_step_back(before: RankStats, after: RankStats) -> None:
    """Raise AssertionError if anything that only rises fell."""
    assert (before.pid, before.generation) == (after.pid, after.generation)
    assert before.steps <= after.steps
    assert before.scheduled_tokens <= after.scheduled_tokens
    assert before.retired_bytes <= after.retired_bytes
    assert all(before.rejections[kind] <= after.rejections[kind] for kind in before.rejections)
    assert all(before.growths[phase] <= after.growths[phase] for phase in before.growths)
    for old, new in zip(before.slots, after.slots, strict=False):
        assert old.high_water_bytes <= new.high_water_bytes


def killed_writers(directory: Path, kills: int, seed: int) -> Iterator[tuple[int, int]]:
    """Start writers and kill each after a random number of reads; check every read.

    Yields how many reads there were of each writer and how many steps it had come to. One in five
    is killed as soon as it makes its file, the others after reads that saw a step.
    """
    chosen = random.Random(seed)
    for turn in range(kills):
        place = directory / str(turn)
        place.mkdir()
        reads = chosen.choice((0, *(chosen.randint(1, 20) for _ in range(4))))
        yield reads, _killed_after(reads, place)


def _killed_after(reads: int, directory: Path) -> int:
    command = [sys.executable, "-c", _WORKER, str(directory)]
    with subprocess.Popen(command, cwd=Path(__file__).parent) as writer:
        try:
            last = _watch(directory, reads)
            assert writer.poll() is None, "the writer failed"
        finally:
            writer.kill()
            writer.wait(timeout=DEADLINE_SECONDS)
    final = read_stats(stats_path(directory, 0, 0))
    assert final == read_stats(stats_path(directory, 0, 0))
    if final is None:
        assert last is None, "what was there is gone"
        return 0
    check_whole(final)
    if last is not None:
        check_no_step_back(last, final)
    return final.steps


def _watch(directory: Path, reads: int) -> RankStats | None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    last: RankStats | None = None
    done = 0
    while done < reads or not any(directory.iterdir()):
        assert time.monotonic() < deadline, "the writer writes nothing"
        stats = read_stats(stats_path(directory, 0, 0))
        if stats is None:
            assert last is None, "what was there is gone"
            continue
        check_whole(stats)
        if last is not None:
            check_no_step_back(last, stats)
        last, done = stats, done + (stats.steps > 0)
    return last
