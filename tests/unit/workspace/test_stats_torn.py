"""Stats are of one moment, whenever they are read and wherever their writer was killed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest

from holdfast.records import RankReport, RankStats
from holdfast.workspace.stats import StatsWriter, read_stats
from holdfast.workspace.stats.layout import (
    REPORTS_OFFSET,
    RING_OFFSET,
    StepCounts,
    packed_pulse,
    packed_step,
    pulse_offset,
    report_offset,
    step_offset,
)
from stats_writers import check_whole, killed_writers, rejection, write_once

KILLS = 60


@pytest.fixture
def often_switched() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval_seconds = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_seconds)


def test_a_killed_writer_leaves_no_torn_stats(tmp_path: Path) -> None:
    """SIGKILL at random moments: every read is whole and none goes back. `make soak`: 1,000."""
    ends = list(killed_writers(tmp_path, KILLS, seed=3))
    assert len(ends) == KILLS
    assert sum(reads > 0 for reads, _ in ends) > KILLS // 2
    assert all(steps > 0 for reads, steps in ends if reads)


@pytest.mark.usefixtures("often_switched")
def test_two_threads_that_write_tear_nothing(tmp_path: Path) -> None:
    """Ubatches report from their own threads; each read is of one moment, and all is counted."""
    with StatsWriter(tmp_path, engine=0, rank=0, generation=1) as writer:

        def count_one(report: RankReport, caller: str) -> RankReport:
            callers = {**report.callers, caller: report.callers.get(caller, 0) + 1}
            return replace(report, retired_bytes=report.retired_bytes + 1, callers=callers)

        def count(caller: str) -> None:
            for _ in range(500):
                writer.update(partial(count_one, caller=caller))

        threads = [threading.Thread(target=count, args=(f"caller-{n}",)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        stats = read_stats(writer.path)
    assert stats is not None
    assert stats.retired_bytes == 1000
    assert stats.callers == {"caller-0": 500, "caller-1": 500}


def test_a_write_that_was_cut_is_not_seen(tmp_path: Path) -> None:
    """Whatever a dead writer had begun to write, readers see the moment before."""
    with StatsWriter(tmp_path, engine=0, rank=0, generation=1) as writer:
        for number in range(1, 40):
            write_once(writer, number)
        before = read_stats(writer.path)
        writer._put(report_offset(writer._place.number + 1), b'{"engine": 7, "half of a rep')
        pulse = packed_pulse(writer._writes + 1, writer._place, StepCounts(10**9))
        writer._put(pulse_offset(writer._writes + 1), pulse[:-8])
        writer._put(step_offset(40), packed_step(40, 1, 1, 1.0, 1.0)[:-8])
        after = read_stats(writer.path)
    assert before is not None
    check_whole(before)
    assert after == before


WRITES: dict[str, Callable[[StatsWriter], None]] = {
    "step": lambda writer: writer.step_ended(scheduled_tokens=40, requests=5),
    "number": lambda writer: writer.update(lambda report: replace(report, retired_bytes=10**6)),
    "refusal": lambda writer: writer.update(
        lambda report: replace(report, last_rejection=rejection(40))
    ),
}


class Torn:
    """One write in every state that its readers could find it in."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._path = directory / "torn.stats"
        with StatsWriter(directory, engine=0, rank=0, generation=1) as writer:
            for number in range(1, 40):
                write_once(writer, number)
            self.old, self._old_file = read_stats(writer.path), writer.path.read_bytes()
            WRITES[kind](writer)
            self.new, self._new_file = read_stats(writer.path), writer.path.read_bytes()
        assert self.old != self.new
        self.places = [n for n in range(0, len(self._old_file), 8) if self._is_changed(n)]
        """The offsets of the words that the write changes."""
        texts = [n for n in self.places if _part(n) == "reports"]
        self.looked_at = {*self.places} - {*texts} | {*texts[::50]}
        """All of them, but only some of the long report."""

    def read(self, visible: Iterable[int]) -> RankStats | None:
        """What is read while no more than these words are visible."""
        content = bytearray(self._old_file)
        for place in visible:
            content[place : place + 8] = self._new_file[place : place + 8]
        self._path.write_bytes(content)
        return read_stats(self._path)

    def _is_changed(self, place: int) -> bool:
        return self._old_file[place : place + 8] != self._new_file[place : place + 8]


@pytest.mark.parametrize("order", [*permutations(("pulses", "reports", "ring"))], ids="-".join)
@pytest.mark.parametrize("is_backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("kind", WRITES)
def test_stores_may_become_visible_in_any_order(
    kind: str, order: tuple[str, ...], tmp_path: Path, *, is_backwards: bool
) -> None:
    """As on ARM: with any part of a write in the file, readers see all of it or nothing."""
    torn = Torn(tmp_path, kind)
    places = sorted(torn.places, key=lambda n: (order.index(_part(n)), -n if is_backwards else n))
    seen = [
        torn.read(places[: count + 1])
        for count, place in enumerate(places)
        if place in torn.looked_at
    ]
    assert all(stats in (torn.old, torn.new) for stats in seen)
    assert seen == sorted(seen, key=lambda stats: stats == torn.new), "a reader went back"
    assert torn.read(places) == torn.new


@pytest.mark.parametrize("kind", WRITES)
def test_any_store_may_be_the_last_or_the_first(kind: str, tmp_path: Path) -> None:
    """One word that comes late, or ahead of all others, tears nothing."""
    torn = Torn(tmp_path, kind)
    for place in torn.looked_at:
        late = torn.read(other for other in torn.places if other != place)
        assert late in (torn.old, torn.new)
        assert torn.read([place]) == torn.old


@pytest.mark.parametrize("kind", WRITES)
def test_a_pulse_without_its_report_is_not_seen(kind: str, tmp_path: Path) -> None:
    """The number of a write may be visible before anything else that it wrote."""
    torn = Torn(tmp_path, kind)
    ahead = [place for place in torn.places if _part(place) == "pulses"]
    assert torn.read(ahead) == torn.old


def _part(place: int) -> str:
    if place < REPORTS_OFFSET:
        return "pulses"
    return "reports" if place < RING_OFFSET else "ring"
