"""Stats are of one moment, whenever they are read and wherever their writer was killed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest

from holdfast.workspace.stats import StatsWriter, read_stats
from holdfast.workspace.stats.layout import COPIES, StatsFile
from torn import check_no_step_back, check_whole, killed_writers, rejection, write_once

KILLS = 60


def test_a_killed_writer_leaves_no_torn_stats(tmp_path: Path) -> None:
    """SIGKILL at random moments: every read is whole and none goes back. `make soak`: 1,000."""
    ends = list(killed_writers(tmp_path, KILLS, seed=3))
    assert len(ends) == KILLS
    assert sum(steps > 0 for _, steps in ends) > KILLS // 2


def test_two_threads_that_write_tear_nothing(tmp_path: Path) -> None:
    """Ubatches report from threads of their own; each read is of one moment, and all is counted."""
    with StatsWriter(tmp_path, engine=0, rank=0, generation=1) as writer:

        def count(caller: str) -> None:
            for number in range(500):
                writer.caller(caller, number)
                writer.growth("locked")

        threads = [threading.Thread(target=count, args=(f"caller-{n}",)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        stats = read_stats(writer.path)
    assert stats is not None
    assert stats.growths["locked"] == 1000
    assert stats.callers == {"caller-0": 499, "caller-1": 499}


def test_a_write_that_was_cut_is_not_seen(tmp_path: Path) -> None:
    """Whatever a dead writer had begun to write, readers see the moment before."""
    with StatsWriter(tmp_path, engine=0, rank=0, generation=1) as writer:
        writer.slot_count(2)
        for number in range(1, 40):
            write_once(writer, number)
        before = read_stats(writer.path)
        hidden = writer._file.copies[(writer._file.header.writes + 1) % COPIES].record
        hidden.steps, hidden.rejection_caller = 10**9, b"half"
        writer._file.ring.steps[40].index = 40
        after = read_stats(writer.path)
        del hidden
    assert before is not None
    check_whole(before)
    assert after == before


WRITES: dict[str, Callable[[StatsWriter], None]] = {
    "step": lambda writer: writer.step_ended(scheduled_tokens=40, requests=5),
    "caller": lambda writer: writer.caller("another", 10**6),
    "refusal": lambda writer: writer.rejection(rejection(40)),
}


@pytest.mark.parametrize("order", [*permutations(("header", "copies", "ring"))], ids="-".join)
@pytest.mark.parametrize("is_backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("kind", WRITES)
def test_stores_may_become_visible_in_any_order(
    kind: str, order: tuple[str, ...], tmp_path: Path, *, is_backwards: bool
) -> None:
    """As on ARM: with any part of a write in the file, readers see all of it or nothing."""
    with StatsWriter(tmp_path, engine=0, rank=0, generation=1) as writer:
        for number in range(1, 40):
            write_once(writer, number)
        old_file, old = writer.path.read_bytes(), read_stats(writer.path)
        WRITES[kind](writer)
        new_file, new = writer.path.read_bytes(), read_stats(writer.path)
    assert old != new
    places = [n for n in range(0, len(old_file), 8) if old_file[n : n + 8] != new_file[n : n + 8]]
    places.sort(key=lambda n: (order.index(_part(n)), -n if is_backwards else n))
    torn_file, content, seen = tmp_path / "torn.stats", bytearray(old_file), []
    for count, place in enumerate(places):
        content[place : place + 8] = new_file[place : place + 8]
        if _part(place) != "copies" or count % 50 == 0:
            torn_file.write_bytes(content)
            seen.append(read_stats(torn_file))
    torn_file.write_bytes(content)
    assert read_stats(torn_file) == new
    assert all(stats in (old, new) for stats in seen)
    assert seen == sorted(seen, key=lambda stats: stats == new)


def _part(place: int) -> str:
    if place < StatsFile.copies.offset:
        return "header"
    return "copies" if place < StatsFile.ring.offset else "ring"


def test_a_second_manager_does_not_lower_the_high_water(tmp_path: Path) -> None:
    """The largest need of a rank outlives the manager that met it."""
    with StatsWriter(tmp_path, engine=0, rank=0, generation=1) as writer:
        writer.slot_count(1)
        writer.high_water(0, 500, "large")
        before = read_stats(writer.path)
        writer.high_water(0, 100, "small")
        after = read_stats(writer.path)
    assert before is not None
    assert after is not None
    check_no_step_back(before, after)
    assert after.slots[0].high_water_caller == "large"
