"""Watches the host's memory in a thread, and ends the engine before the host freezes.

On a machine whose GPU shares the host's memory, nothing ends a process when memory runs out: the
kernel's killer does not see what the GPU holds, and the machine stops answering until someone
cuts its power. There are seconds before that, in which the event loop may be stuck already. So
the thread needs nothing of the loop to end the engine: it holds descriptors of its processes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from holdfast.host_memory.reader import Bound, MemoryReader, memory_reader
from holdfast.processes.exits import pidfd

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.2
READINGS_TO_END = 2
"""The engine is ended at this many readings in a row below the last mark, not at a single one."""
HIGH_PRESSURE = 0.5
"""If some task below a limit waits for memory for this share of the time, what is available is out
of reach: the level is one deeper."""
RETURN_FACTOR = 1.125
"""A level is left when this many times its mark is available again."""
MIB = 1 << 20

Marks = tuple[int, int, int]
"""Bytes, none larger than the one before it."""

SHARES = (0.04, 0.02, 0.01)
"""The default marks, as shares of the memory that a limit allows."""
LARGEST_MARKS: Marks = (4 << 30, 2 << 30, 1 << 30)
"""No default is larger: what a host needs to stay alive does not grow with it."""


class Level(IntEnum):
    """What is to be done; each level includes those before it."""

    AMPLE = 0
    """Nothing."""
    HOLD = 1
    """New long prompts wait."""
    GIVE_UP = 2
    """Long prompts are given up, one after another."""
    END = 3
    """The engine is ended."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one look at the host's memory found."""

    level: Level
    found_level: Level
    """What this look alone calls for; `level` is left later than it is entered."""
    available_bytes: int
    """What is left below the limit that calls for the level, or else the one that leaves least."""
    total_bytes: int
    """What that limit allows in all."""
    mark_bytes: int
    """The mark of that limit at which the level begins; 0 if none was passed."""
    pressure_ratio: float | None = None
    """See `Bound.pressure_ratio`."""
    has_ended_engine: bool = False

    def __str__(self) -> str:
        parts = [f"{self.available_bytes // MIB} MiB were available"]
        if self.mark_bytes:
            parts.append(f"the mark is {self.mark_bytes // MIB} MiB")
        if self.pressure_ratio is not None:
            parts.append(f"tasks waited for memory {self.pressure_ratio:.0%} of the time")
        return ", ".join(parts)


def marks_of(bound: Bound, given: Marks | None) -> Marks:
    """Return the marks for a limit: those that were given, or shares of what it allows.

    Those that were given for a host are not for a cgroup that is smaller than the first of them:
    nothing would ever be left above it. What is 0 stays 0.
    """
    if given is not None and given[0] < bound.total_bytes:
        return given
    first, second, third = (
        min(most, int(share * bound.total_bytes)) if is_wanted else 0
        for share, most, is_wanted in zip(
            SHARES, LARGEST_MARKS, given or LARGEST_MARKS, strict=True
        )
    )
    return first, second, third


def ample_bytes(bound: Bound, given: Marks | None) -> int:
    """Return the least that must be available below a limit for every level to be left."""
    return math.ceil(_line_bytes(bound, marks_of(bound, given)[0], RETURN_FACTOR))


def _line_bytes(bound: Bound, mark_bytes: int, factor: float) -> float:
    # Above a mark near the limit there may be less than an eighth of it.
    return min(factor * mark_bytes, (mark_bytes + bound.total_bytes) / 2)


class Judge:
    """Turns readings into levels."""

    def __init__(self, marks: Marks | None) -> None:
        self._marks = marks
        self._level = Level.AMPLE

    def judge(self, bounds: Sequence[Bound]) -> Reading | None:
        """Return the level that the worst limit calls for; None if nothing is known."""
        if not bounds:
            return None
        deepest = _worst(bounds, self._found_level)
        found = self._found_level(deepest)
        # A level is entered at its mark and left above it, or the line would open and close.
        last = _worst(bounds, self._left_depth)
        staying = Level(min(self._level, self._left_depth(last)))
        self._level = max(found, staying)
        told = deepest if found >= staying else last
        mark_bytes = marks_of(told, self._marks)[self._level - 1] if self._level else 0
        return Reading(
            self._level,
            found,
            told.available_bytes,
            told.total_bytes,
            mark_bytes,
            told.pressure_ratio,
        )

    def _found_level(self, bound: Bound) -> Level:
        """Return the level of one limit now, one deeper under pressure unless its mark is 0."""
        level, marks = self._depth(bound), marks_of(bound, self._marks)
        if level and (bound.pressure_ratio or 0.0) >= HIGH_PRESSURE:
            level += any(marks[level : level + 1])
        return Level(level)

    def _left_depth(self, bound: Bound) -> int:
        """Count the marks that are not far enough below what is available to be left."""
        return self._depth(bound, RETURN_FACTOR)

    def _depth(self, bound: Bound, factor: float = 1.0) -> int:
        return sum(
            bound.available_bytes < _line_bytes(bound, mark, factor)
            for mark in marks_of(bound, self._marks)
        )


def _worst(bounds: Sequence[Bound], depth: Callable[[Bound], int]) -> Bound:
    """Return the limit with the greatest depth; of several, the one that leaves the least."""
    return max(bounds, key=lambda bound: (depth(bound), -bound.available_bytes))


class MemoryGuard:
    """Looks at the memory five times a second while it runs, and tells of what calls for action.

    Any thread may read `last`.
    """

    def __init__(
        self,
        marks: Marks | None = None,
        *,
        root: Path = Path("/"),
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self._marks = marks
        self._judge = Judge(marks)
        self._root = root
        self._interval_seconds = interval_seconds
        self._lock = threading.Lock()
        self._victims: tuple[int, ...] | None = None
        """Descriptors of the processes to end; None while there is nothing to end."""
        self._readings_at_end = 0
        self._has_ended_engine = False
        self.last: Reading | None = None
        """What was found last; None before the first look, and if nothing can be read."""

    def is_ample(self) -> bool:
        """Whether nothing has to give way on this host, as far as is known."""
        reading = self.last
        return reading is None or reading.level is Level.AMPLE

    def ample_bytes(self) -> int:
        """Return what the host must have available for every level to be left; 0 if unknown."""
        with memory_reader(self._root) as reader:
            host = max(reader.bounds(), key=lambda bound: bound.total_bytes, default=None)
        return 0 if host is None else ample_bytes(host, self._marks)

    @contextmanager
    def running(self, tell: Callable[[Reading], None]) -> Iterator[None]:
        """Watch while entered.

        `tell` is called in the thread, with every reading that is below a mark and with the first
        that is not any more.
        """
        stopping = threading.Event()
        with memory_reader(self._root) as reader:
            thread = threading.Thread(
                target=self._watch, args=(reader, stopping, tell), name="host memory", daemon=True
            )
            thread.start()
            try:
                yield
            finally:
                stopping.set()
                thread.join()

    @contextmanager
    def running_beside_loop(self, tell: Callable[[Reading], None]) -> Iterator[None]:
        """Watch while entered, like `running`, but `tell` is called in the running event loop."""
        loop = asyncio.get_running_loop()

        def tell_in_loop(reading: Reading) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell, reading)

        with self.running(tell_in_loop):
            yield

    @contextmanager
    def protecting_from(self, pids: Iterable[int]) -> Iterator[None]:
        """While entered, kill these processes at the last mark, once."""
        opened = tuple(found for pid in pids if (found := pidfd(pid)) is not None)
        self._aim(opened)
        try:
            yield
        finally:
            self._aim(None)
            for descriptor in opened:
                os.close(descriptor)

    def _aim(self, victims: tuple[int, ...] | None) -> None:
        with self._lock:
            self._victims, self._readings_at_end, self._has_ended_engine = victims, 0, False

    def _watch(
        self, reader: MemoryReader, stopping: threading.Event, tell: Callable[[Reading], None]
    ) -> None:
        has_failed = is_blind = False
        while not stopping.wait(self._interval_seconds):
            try:
                self._look(reader, tell)
            except MemoryError:
                continue  # without memory for even a small object: the next look may find some
            except Exception:
                if not has_failed:  # it may fail five times a second
                    logger.exception("cannot read the memory of the host; trying again")
                has_failed = True
                continue
            if self.last is None and not is_blind:
                logger.warning(
                    "nothing guards the memory of the host, because nothing says how much is left: "
                    "/proc/meminfo cannot be read; trying again"
                )
            is_blind = self.last is None

    def _look(self, reader: MemoryReader, tell: Callable[[Reading], None]) -> None:
        before, found = self.last, self._judge.judge(reader.bounds())
        self.last = found
        if found is None or found.level is Level.AMPLE:
            self._readings_at_end = 0
            if before is not None and before.level is not Level.AMPLE:
                tell(replace(found or before, level=Level.AMPLE))
            return
        with self._lock:
            must_end = self._must_end(found.found_level)
            try:
                # Report first, so that the reason is known when the processes are seen to end.
                tell(replace(found, has_ended_engine=must_end))
                self._has_ended_engine |= must_end
            finally:
                if must_end:
                    self._kill()

    def _must_end(self, found_level: Level) -> bool:
        if found_level is not Level.END or self._victims is None:
            self._readings_at_end = 0
            return False
        self._readings_at_end += 1
        return self._readings_at_end >= READINGS_TO_END and not self._has_ended_engine

    def _kill(self) -> None:
        for descriptor in self._victims or ():
            with suppress(OSError):  # it has ended already
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
