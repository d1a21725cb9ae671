"""A start in which nothing moves any more ends; whatever still moves may take its time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from holdfast.engine.launch import hung_start
from holdfast.engine.launch.hung_start import StartTimer
from holdfast.labels import StartPhase
from holdfast.workspace.stats import StatsWriter
from sleepers import begun

DEADLINE_SECONDS = 60.0
LOOKS = 20
"""More than a hang would need."""
SPINS = "print(flush=True)\nwhile True: pass"
READS = "file = open('/dev/zero', 'rb', 0)\nprint(flush=True)\nwhile True: file.read(1 << 20)"
COMPILES = """
import time
with open("/proc/self/comm", "w") as name:
    name.write("nvcc")
print(flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few looks in a row see that nothing moves."""
    monkeypatch.setattr(hung_start, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(hung_start, "MIN_SECONDS", 0.05)


@contextmanager
def child(program: str) -> Iterator[frozenset[psutil.Process]]:
    """A process of an engine, once it runs the program."""
    with begun([sys.executable, "-c", program]) as process:
        yield frozenset({process})


def ended_by(
    processes: frozenset[psutil.Process],
    directory: Path,
    *,
    is_first: bool = False,
    is_alone: bool = True,
) -> str:
    """Why a start was ended; empty if it was not within a number of looks."""
    looks, timer = 0, StartTimer()
    if not is_first:
        with timer.timed():
            pass

    def look() -> frozenset[psutil.Process]:
        nonlocal looks
        looks += 1
        return processes

    async def scene() -> str:
        watching = asyncio.create_task(timer.until_hung(look, directory, is_alone=is_alone))
        async with asyncio.timeout(DEADLINE_SECONDS):
            while looks < LOOKS and not watching.done():
                await asyncio.wait({watching}, timeout=0.01)
        return watching.result().cause if watching.done() else ""

    return asyncio.run(scene())


def see_stacks(monkeypatch: pytest.MonkeyPatch, stacks: str) -> None:
    """Have the stacks of all processes be these."""

    async def stacks_of(*_: object) -> str:
        return stacks

    monkeypatch.setattr(hung_start, "stacks_of", stacks_of)


def test_a_start_in_which_nothing_moves_is_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Though its process runs, as a rank does that waits in a collective; the stacks are logged."""
    with child(SPINS) as processes:
        cause = ended_by(processes, tmp_path)
        (process,) = processes
    assert cause.startswith("the engine could not start: it hangs: nothing has moved in the phase")
    assert f"Process {process.pid}" in caplog.text


def report_phases(directory: Path, *ranks: Sequence[StartPhase]) -> None:
    """Have ranks, all in this process, say which phases they have begun."""
    for rank, phases in enumerate(ranks):
        with StatsWriter(directory, engine=0, rank=rank, generation=1) as writer:
            begun = dict.fromkeys(phases, 1.0)
            writer.update(partial(replace, phases=begun))


def test_the_phase_of_the_rank_that_is_behind_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may wait for it."""
    see_stacks(monkeypatch, "")
    report_phases(tmp_path, ("load", "kv_sizing", "kv_cache"), ("load", "kv_sizing"))
    assert "in the phase 'kv_sizing'" in ended_by(frozenset({psutil.Process()}), tmp_path)


def test_a_start_with_ranks_elsewhere_may_take_its_time(tmp_path: Path) -> None:
    """Nobody sees here what the workers of a Ray cluster read."""
    report_phases(tmp_path, ("load",))
    assert not ended_by(frozenset(), tmp_path)


def test_a_start_whose_reads_are_hidden_may_take_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox of containers may have no counts."""
    monkeypatch.setattr(hung_start, "_moved_bytes", lambda _: None)
    with child(SPINS) as processes:
        assert not ended_by(processes, tmp_path)


def test_before_the_first_rank_reports_processes_start(tmp_path: Path) -> None:
    """The phase has the name that it has in the progress of a start."""
    assert "in the phase 'processes'" in ended_by(frozenset(), tmp_path)


def test_a_start_that_reads_its_weights_may_take_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a slow disk, the phase does not change for long."""
    monkeypatch.setattr(hung_start, "MOVED_BYTES", 1)
    # It has to read between two of the looks, beside whatever else wants its core.
    monkeypatch.setattr(hung_start, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(hung_start, "MIN_SECONDS", 0.75)
    with child(READS) as processes:
        assert not ended_by(processes, tmp_path)


def test_a_start_that_compiles_may_take_its_time(tmp_path: Path) -> None:
    """The compiler is one of the engine's processes."""
    with child(COMPILES) as processes:
        assert not ended_by(processes, tmp_path)


def test_a_compiler_within_a_process_is_seen_in_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton runs LLVM's in a thread."""
    see_stacks(monkeypatch, "make_cubin (triton/backends/nvidia/compiler.py:400)")
    assert not ended_by(frozenset(), tmp_path)


@pytest.mark.parametrize(("is_first", "is_alone"), [(True, True), (False, False)])
def test_what_may_take_any_time_is_only_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_first: bool, is_alone: bool
) -> None:
    """Nobody knows how long a first start takes, or another node that downloads its weights."""
    assert not ended_by(frozenset(), tmp_path, is_first=is_first, is_alone=is_alone)
    assert "the start of the engine may hang" in caplog.text


def test_a_start_may_stand_still_five_times_as_long_as_the_last_one_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that takes an hour has phases that take long."""
    monkeypatch.setattr(hung_start, "START_FACTOR", 1e12)
    assert not ended_by(frozenset(), tmp_path)
