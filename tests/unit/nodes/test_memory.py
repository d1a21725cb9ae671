"""Whose processes end, and with which reason, when a follower's host runs out of memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fake_host import GIB, FakeHost
from holdfast.host_memory.guard import Level, MemoryGuard
from holdfast.nodes.memory import NodeMemory
from holdfast.settings import GuardMode, MemorySettings
from sleepers import sleeping

MARKS = (4 * GIB, 2 * GIB, GIB)
DEADLINE_SECONDS = 60.0


def guard_of(host: FakeHost) -> MemoryGuard:
    return MemoryGuard(MARKS, root=host.root, interval_seconds=0.01)


def played(memory: NodeMemory, act: Callable[[], Awaitable[None]]) -> None:
    """Run `act` within a deadline, while the host is watched."""

    async def within_time() -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            with memory.running():
                await act()

    asyncio.run(within_time())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - another thread brings it about
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("mode", "is_unified_memory", "is_guarded"),
    [("auto", True, True), ("auto", False, False), ("on", False, True)],
)
def test_ranks_that_can_take_the_hosts_memory_are_ended(
    tmp_path: Path, mode: GuardMode, *, is_unified_memory: bool, is_guarded: bool
) -> None:
    """The others are not to blame, unless an operator says so."""
    host = FakeHost(tmp_path)
    guard = guard_of(host)
    memory = NodeMemory(MemorySettings(mode), guard)

    async def act() -> None:
        with sleeping() as rank, memory.guarding() as death:
            memory.protect_from([rank.pid], is_unified_memory=is_unified_memory)
            host.leave(GIB // 2)
            await until(lambda: guard.last is not None and guard.last.level is Level.END)
            if is_guarded:
                assert (await death).cause == "host_memory"
                await until(lambda: rank.poll() is not None)
            assert (death.done(), rank.poll() is not None) == (is_guarded, is_guarded)

    played(memory, act)


@pytest.mark.parametrize(
    ("mode", "kept_bytes"), [("auto", 4.5 * GIB), ("on", 4.5 * GIB), ("off", 0)]
)
def test_ranks_leave_what_the_guard_needs(
    tmp_path: Path, mode: GuardMode, kept_bytes: float
) -> None:
    """Only where it would act."""
    guard = guard_of(FakeHost(tmp_path))
    assert NodeMemory(MemorySettings(mode), guard).kept_bytes() == kept_bytes


def test_a_host_has_enough_well_above_the_first_mark(tmp_path: Path) -> None:
    """As the head waits for it on its own host."""
    host = FakeHost(tmp_path)
    memory = NodeMemory(MemorySettings("on"), guard_of(host))

    async def act() -> None:
        assert memory.is_ample()
        host.leave(GIB // 2)
        await until(lambda: not memory.is_ample())
        host.leave(5 * GIB)
        await until(memory.is_ample)

    played(memory, act)


def test_the_processes_that_were_named_last_are_ended(tmp_path: Path) -> None:
    """A rank reports after the process that starts it."""
    host = FakeHost(tmp_path)
    memory = NodeMemory(MemorySettings("on"), guard_of(host))

    async def act() -> None:
        with sleeping() as executor, sleeping() as rank, memory.guarding():
            memory.protect_from([executor.pid], is_unified_memory=True)
            memory.protect_from([executor.pid, rank.pid], is_unified_memory=True)
            host.leave(GIB // 2)
            await until(lambda: None not in {executor.poll(), rank.poll()})

    played(memory, act)


def test_no_process_is_ended_after_its_generation(tmp_path: Path) -> None:
    """The memory that it gave back may be that of another program by then."""
    host = FakeHost(tmp_path)
    guard = guard_of(host)
    memory = NodeMemory(MemorySettings("on"), guard)

    async def act() -> None:
        with sleeping() as rank:
            with memory.guarding() as death:
                memory.protect_from([rank.pid], is_unified_memory=True)
            host.leave(GIB // 2)
            await until(lambda: guard.last is not None and guard.last.level is Level.END)
            assert death.cancelled()
            assert rank.poll() is None

    played(memory, act)


def test_a_guard_that_is_off_reads_nothing(tmp_path: Path) -> None:
    """Whatever is left."""
    host = FakeHost(tmp_path)
    guard = guard_of(host)
    memory = NodeMemory(MemorySettings("off"), guard)

    async def act() -> None:
        host.leave(0)
        with memory.guarding() as death:
            memory.protect_from([1], is_unified_memory=True)
            assert not death.done()

    played(memory, act)
    assert guard.last is None
