"""The guard says when the host runs short of memory, and ends the engine before there is none."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fake_host import GIB, MIB, FakeHost
from holdfast.host_memory.guard import (
    LARGEST_MARKS,
    Judge,
    Level,
    Marks,
    MemoryGuard,
    Reading,
    ample_bytes,
    marks_of,
)
from holdfast.host_memory.reader import Bound
from memory_cgroups import memory_cgroup
from servers import wait_until
from sleepers import sleeping
from traced_memory import least_memory

MARKS = (4 * GIB, 2 * GIB, GIB)
DEADLINE_SECONDS = 60.0


def level_at(*available_bytes: int, pressure_ratio: float | None = None) -> Level:
    """The level after these readings of a host of 100 GiB, one after another."""
    judge = Judge(MARKS)
    readings = [
        judge.judge([Bound(100 * GIB, available, pressure_ratio)]) for available in available_bytes
    ]
    assert readings[-1] is not None
    return readings[-1].level


@pytest.mark.parametrize(
    ("available_bytes", "level"),
    [
        (100 * GIB, Level.AMPLE),
        (4 * GIB, Level.AMPLE),
        (4 * GIB - 1, Level.HOLD),
        (2 * GIB - 1, Level.GIVE_UP),
        (GIB - 1, Level.END),
        (0, Level.END),
    ],
)
def test_each_mark_has_its_level(available_bytes: int, level: Level) -> None:
    """A level begins below its mark."""
    assert level_at(available_bytes) is level


@pytest.mark.parametrize(
    ("available_bytes", "pressure_ratio", "level"),
    [
        (5 * GIB, 1.0, Level.AMPLE),
        (3 * GIB, 0.4, Level.HOLD),
        (3 * GIB, 0.5, Level.GIVE_UP),
        (GIB * 3 // 2, 0.9, Level.END),
        (GIB // 2, 0.9, Level.END),
    ],
)
def test_under_pressure_the_level_is_one_deeper(
    available_bytes: int, pressure_ratio: float, level: Level
) -> None:
    """What is said to be left is out of reach then; pressure alone calls for nothing."""
    assert level_at(available_bytes, pressure_ratio=pressure_ratio) is level


@pytest.mark.parametrize(("on_host", "level"), [(True, Level.HOLD), (False, Level.GIVE_UP)])
def test_the_pressure_elsewhere_makes_no_level_deeper(level: Level, *, on_host: bool) -> None:
    """A neighbour at a limit of its own has the host's tasks wait, and takes nothing from ours."""
    host = Bound(128 * GIB, 100 * GIB, 1.0 if on_host else None)
    container = Bound(4 * GIB, GIB // 8, None if on_host else 1.0)
    found = Judge(None).judge([host, container])
    assert found is not None
    assert (found.level, found.pressure_ratio) == (level, container.pressure_ratio)


@pytest.mark.parametrize(
    ("marks", "level"),
    [((4 * GIB, 2 * GIB, 0), Level.GIVE_UP), ((4 * GIB, 0, 0), Level.HOLD)],
)
def test_a_mark_of_0_is_not_passed_under_pressure(
    marks: tuple[int, int, int], level: Level
) -> None:
    """It says that nothing of this kind is to be done."""
    found = Judge(marks).judge([Bound(100 * GIB, GIB, 1.0)])
    assert found is not None
    assert found.level is level


def test_a_level_is_left_only_well_above_its_mark() -> None:
    """So that the line does not open and close with every reading."""
    assert level_at(3 * GIB, 4 * GIB + MIB) is Level.HOLD
    assert level_at(3 * GIB, 5 * GIB) is Level.AMPLE
    assert level_at(GIB // 2, 3 * GIB) is Level.HOLD


@pytest.mark.parametrize(
    ("total_bytes", "marks"),
    [
        (1024 * GIB, LARGEST_MARKS),
        (50 * GIB, (2 * GIB, GIB, GIB // 2)),
        (4 * GIB, (GIB * 4 // 25, GIB * 2 // 25, GIB // 25)),
    ],
)
def test_the_default_marks_are_shares_up_to_what_any_host_needs(
    total_bytes: int, marks: tuple[int, int, int]
) -> None:
    """A large host needs no more than others to stay alive, and a small one has less to give."""
    assert marks_of(Bound(total_bytes, 0), None) == pytest.approx(marks, abs=1)


@pytest.mark.parametrize(("total_gib", "is_given"), [(100, True), (5, True), (4, False)])
def test_marks_that_no_reading_can_be_above_are_not_those_of_a_limit(
    total_gib: int, *, is_given: bool
) -> None:
    """Marks for a host would close a small container without end."""
    marks = marks_of(Bound(total_gib * GIB, 0), MARKS)
    assert (marks == MARKS) is is_given
    assert marks[0] < total_gib * GIB


def test_a_level_that_is_off_is_off_in_a_small_container() -> None:
    """Which has default marks for the others."""
    first, second, third = marks_of(Bound(4 * GIB, 0), (MARKS[0], MARKS[1], 0))
    assert first > second > third == 0


def test_a_level_can_be_left_within_its_limit() -> None:
    """Also where an eighth more than its mark is more than there is."""
    total_bytes = int(1.1 * MARKS[0])
    judge = Judge(MARKS)
    for available_bytes, level in ((MARKS[0] - 1, Level.HOLD), (total_bytes - 1, Level.AMPLE)):
        found = judge.judge([Bound(total_bytes, available_bytes)])
        assert found is not None
        assert found.level is level


@pytest.mark.parametrize("marks", [None, MARKS])
@pytest.mark.parametrize("total_bytes", [GIB, 5 * GIB, 128 * GIB])
def test_every_level_is_left_where_enough_is_available(
    marks: Marks | None, total_bytes: int
) -> None:
    """And with a byte less, the last of them is not."""
    judge = Judge(marks)
    enough_bytes = ample_bytes(Bound(total_bytes, 0), marks)
    for left_bytes, level in ((0, 3), (enough_bytes - 1, 1), (enough_bytes, 0)):
        found = judge.judge([Bound(total_bytes, left_bytes)])
        assert found is not None
        assert found.level == level


def test_what_is_enough_is_enough_for_the_host(tmp_path: Path) -> None:
    """A device that shares its memory takes nothing from that of a container."""
    host = FakeHost(tmp_path)
    host.join("0::/small")
    host.bound("small", str(GIB), 0)
    guard = MemoryGuard(root=host.root)
    assert guard.ample_bytes() == ample_bytes(Bound(host.total_bytes, 0), None)


def test_nothing_is_enough_where_nothing_can_be_read(tmp_path: Path) -> None:
    """The guard does nothing there either, as with marks of 0."""
    assert MemoryGuard(root=tmp_path).ample_bytes() == 0
    assert MemoryGuard((0, 0, 0), root=FakeHost(tmp_path).root).ample_bytes() == 0


def test_the_limit_that_leaves_the_least_decides() -> None:
    """A container may have room on a host that has none, and the other way round."""
    roomy, short = Bound(4 * GIB, 3 * GIB), Bound(128 * GIB, GIB)
    for bounds in ([roomy, short], [short, roomy]):
        found = Judge(None).judge(bounds)
        assert found is not None
        assert (found.level, found.mark_bytes) == (Level.GIVE_UP, 2 * GIB)
        assert (found.available_bytes, found.total_bytes) == (GIB, 128 * GIB)


@pytest.mark.parametrize("host_bytes", [(3 * GIB,), (3 * GIB, LARGEST_MARKS[0] + MIB)])
def test_a_reading_is_of_the_limit_that_calls_for_the_level(host_bytes: tuple[int, ...]) -> None:
    """Also while that is left, although a small container leaves less and has more than it needs.

    The log would otherwise name the mark of one limit and what is left below another.
    """
    judge, container = Judge(None), Bound(4 * GIB, 2 * GIB)
    readings = [judge.judge([Bound(128 * GIB, left), container]) for left in host_bytes]
    found = readings[-1]
    assert found is not None
    assert (found.level, found.mark_bytes) == (Level.HOLD, LARGEST_MARKS[0])
    assert (found.available_bytes, found.total_bytes) == (host_bytes[-1], 128 * GIB)


def test_a_machine_that_says_nothing_is_not_judged() -> None:
    """Nothing is known, so nothing is done."""
    assert Judge(MARKS).judge([]) is None


@dataclass
class Heard:
    """What a guard told, in its order, and what had become of a process by then."""

    readings: list[Reading] = field(default_factory=list)
    victim: subprocess.Popen[bytes] | None = None
    was_alive: bool = False

    def __call__(self, reading: Reading) -> None:
        self.readings.append(reading)
        if reading.has_ended_engine:
            self.was_alive = self.victim is not None and self.victim.poll() is None

    def until(self, level: Level) -> Reading:
        """Wait until a level is told, and return its last reading."""
        return wait_until(
            lambda: next((r for r in self.readings[::-1] if r.level is level), None),
            deadline_seconds=DEADLINE_SECONDS,
            what=lambda: f"only {self.readings[-3:]} was told",
        )


@contextmanager
def guarding(host: FakeHost) -> Iterator[tuple[MemoryGuard, Heard]]:
    """A guard of a fake host that looks often."""
    heard = Heard()
    guard = MemoryGuard(MARKS, root=host.root, interval_seconds=0.01)
    with guard.running(heard):
        yield guard, heard


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    """A host that has all its memory left."""
    return FakeHost(tmp_path)


def test_only_what_calls_for_action_is_told(host: FakeHost) -> None:
    """And the first reading that does not any more; the metrics have every one."""
    with guarding(host) as (guard, heard):
        wait_until(lambda: guard.last, deadline_seconds=DEADLINE_SECONDS, what=lambda: "no look")
        assert heard.readings == []
        host.leave(3 * GIB)
        assert heard.until(Level.HOLD).available_bytes == 3 * GIB
        host.leave(50 * GIB)
        heard.until(Level.AMPLE)
        host.leave(60 * GIB)
        wait_until(
            lambda: guard.last is not None and guard.last.available_bytes == 60 * GIB,
            deadline_seconds=DEADLINE_SECONDS,
            what=lambda: f"{guard.last}",
        )
    assert [reading.level for reading in heard.readings].count(Level.AMPLE) == 1


def test_the_engine_is_ended_at_the_last_mark(host: FakeHost) -> None:
    """By a signal that cannot be ignored, and with the reason told before, once."""
    with sleeping() as process, guarding(host) as (guard, heard):
        heard.victim = process
        with guard.protecting_from([process.pid]):
            host.leave(GIB // 2)
            assert process.wait(DEADLINE_SECONDS) == -signal.SIGKILL
            told = len(heard.readings)
            wait_until(
                lambda: len(heard.readings) > told + 3,
                deadline_seconds=DEADLINE_SECONDS,
                what=lambda: "no further reading",
            )
    assert heard.was_alive
    assert sum(reading.has_ended_engine for reading in heard.readings) == 1


def test_single_readings_below_the_last_mark_do_not_end_the_engine(host: FakeHost) -> None:
    """The level stays at the last one in between, but the memory is back above the mark."""
    readings = list[Reading]()

    def tell(reading: Reading) -> None:
        readings.append(reading)
        host.leave(GIB + MIB if reading.available_bytes < GIB else GIB // 2)

    guard = MemoryGuard(MARKS, root=host.root, interval_seconds=0.01)
    with sleeping() as process, guard.running(tell), guard.protecting_from([process.pid]):
        host.leave(GIB // 2)
        wait_until(
            lambda: len(readings) >= 10,
            deadline_seconds=DEADLINE_SECONDS,
            what=lambda: f"{readings}",
        )
        assert {reading.level for reading in readings} == {Level.END}
        assert not any(reading.has_ended_engine for reading in readings)
        assert process.poll() is None


@pytest.mark.parametrize("error", [MemoryError, ValueError])
def test_the_engine_is_ended_although_nobody_can_be_told(
    host: FakeHost, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    """Even that may need memory that is not there; the reason is told as soon as it can be."""
    told = list[Reading]()

    def tell(reading: Reading) -> None:
        if reading.has_ended_engine:
            told.append(reading)
            if len(told) == 1:
                raise error

    guard = MemoryGuard(MARKS, root=host.root, interval_seconds=0.01)
    with sleeping() as process, guard.running(tell), guard.protecting_from([process.pid]):
        host.leave(GIB // 2)
        assert process.wait(DEADLINE_SECONDS) == -signal.SIGKILL
        wait_until(
            lambda: len(told) == 2, deadline_seconds=DEADLINE_SECONDS, what=lambda: f"{told}"
        )
    assert len(caplog.records) == (error is not MemoryError)


def test_a_process_that_is_not_guarded_lives(host: FakeHost) -> None:
    """Before it is entrusted to the guard and after that, whatever the host has left."""
    with sleeping() as process, guarding(host) as (guard, heard):
        with guard.protecting_from([process.pid]):
            pass
        host.leave(GIB // 2)
        heard.until(Level.END)
        assert process.poll() is None
    assert not any(reading.has_ended_engine for reading in heard.readings)


def test_a_process_that_has_ended_already_does_no_harm(host: FakeHost) -> None:
    """Neither one that ended before, nor one that ends at the same moment as others."""
    with sleeping() as gone, sleeping() as process, guarding(host) as (guard, _):
        gone.kill()
        gone.wait(DEADLINE_SECONDS)
        with guard.protecting_from([gone.pid, process.pid]):
            host.leave(0)
            assert process.wait(DEADLINE_SECONDS) == -signal.SIGKILL


def test_a_guard_that_is_blind_says_so_once(
    host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so again if it was able to see in between: the operator relies on a guard."""
    meminfo = host.root / "proc/meminfo"
    known = meminfo.read_bytes()
    with guarding(host) as (guard, _):
        for times in (1, 2):
            meminfo.write_bytes(b"")
            wait_until(
                lambda: caplog.text.count("nothing guards the memory") == times,  # noqa: B023
                deadline_seconds=DEADLINE_SECONDS,
                what=lambda: caplog.text,
            )
            meminfo.write_bytes(known)
            wait_until(
                lambda: guard.last is not None,
                deadline_seconds=DEADLINE_SECONDS,
                what=lambda: "the guard does not see again",
            )


def test_looking_takes_no_more_and_more_memory(host: FakeHost) -> None:
    """A thousand looks at a host that is short of memory, each of which is told, keep nothing."""
    host.leave(3 * GIB)
    told = {"readings": 0}

    def tell(_: Reading) -> None:
        told["readings"] += 1

    def until_told(readings: int) -> None:
        wait_until(
            lambda: told["readings"] >= readings,
            deadline_seconds=DEADLINE_SECONDS,
            what=lambda: f"{told}",
        )

    with MemoryGuard(MARKS, root=host.root, interval_seconds=0.0).running(tell):
        until_told(10)
        kept, most = least_memory(
            lambda: until_told(told["readings"] + 1000),
            begin=lambda: until_told(told["readings"] + 10),
        )
    assert kept < 4096
    assert most < 16 * 1024


def test_a_loop_is_told_in_its_own_thread(host: FakeHost) -> None:
    """Its futures are for no other thread to touch."""
    guard = MemoryGuard(MARKS, root=host.root, interval_seconds=0.01)

    async def first() -> tuple[Level, threading.Thread]:
        told: asyncio.Future[tuple[Level, threading.Thread]] = (
            asyncio.get_running_loop().create_future()
        )

        def tell(reading: Reading) -> None:
            if not told.done():
                told.set_result((reading.level, threading.current_thread()))

        async with asyncio.timeout(DEADLINE_SECONDS):
            with guard.running_beside_loop(tell):
                return await told

    host.leave(3 * GIB)
    assert asyncio.run(first()) == (Level.HOLD, threading.current_thread())


NEIGHBOUR = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
held = []
while True:
    held.append(bytearray(b"x") * (2 << 20))
    time.sleep(0.1)
"""
GUARD = """
import os, subprocess, sys
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
from holdfast.host_memory.guard import MemoryGuard
mib = 1 << 20
told = []
guard = MemoryGuard((128 * mib, 96 * mib, 64 * mib))
with subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]]) as eater:
    with guard.running(told.append), guard.protecting_from([eater.pid]):
        print(eater.wait(60))
print(*sorted({reading.level.name for reading in told}))
"""


def test_a_neighbour_at_a_real_limit_is_ended_before_the_kernel_must() -> None:
    """A process that eats all the memory of a cgroup, which the guard shares, dies of the guard."""
    with memory_cgroup(256 * MIB) as group:
        done = subprocess.run(
            [sys.executable, "-c", GUARD, str(group.members), NEIGHBOUR],
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS + 30,
            check=False,
        )
        kills = group.oom_kills
    assert done.stdout.split()[:1] == [str(-signal.SIGKILL)], done.stderr
    assert {"HOLD", "GIVE_UP", "END"} <= set(done.stdout.split())
    assert kills == 0
