"""Notices a start of an engine that hangs, though each of its processes is there and runs.

A start may take as long as it moves: a phase begins, its processes read or write files, as they do
while they load weights, or a compiler runs. CPU time tells nothing, since a rank that waits in a
collective spins.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from holdfast.engine.launch.startup import FindProcesses
from holdfast.engine.vllm_errors import start_error
from holdfast.errors import EngineStartError
from holdfast.processes.stacks import is_compiling, is_compiling_in_process, stacks_of
from holdfast.workspace.stats import read_all

logger = logging.getLogger(__name__)

POLL_SECONDS = 5.0
MIN_SECONDS = 600.0
START_FACTOR = 5.0
"""How many times as long as the whole last start one may stand still."""
MOVED_BYTES = 256 * 1024 * 1024
"""More than what hanging processes write and read, such as logs, within the time."""
_BYTES = ("rchar:", "wchar:", "read_bytes:", "write_bytes:")
"""The lines of /proc/PID/io. Calls of read() and pages of mapped files are counted apart."""


class StartTimer:
    """Remembers how long the last start took, and so knows when the next one hangs."""

    def __init__(self) -> None:
        self._last_seconds: float | None = None

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Take the time of a start, unless it fails."""
        began_seconds = time.monotonic()
        yield
        self._last_seconds = time.monotonic() - began_seconds

    async def until_hung(
        self, processes: FindProcesses, directory: Path, *, is_alone: bool
    ) -> EngineStartError:
        """Return the error of a start in which nothing has moved for far too long.

        The log only warns of the first start, and where the node is not alone: another node may
        download its weights first, which is not seen from here.
        """
        may_end = is_alone and self._last_seconds is not None
        limit_seconds = max(MIN_SECONDS, START_FACTOR * (self._last_seconds or 0.0))
        while True:
            phase = await _until_still(processes, directory, limit_seconds)
            stacks = await stacks_of(await asyncio.to_thread(processes), directory)
            if is_compiling_in_process(stacks):
                continue
            reason = f"nothing has moved in the phase {phase!r} for {limit_seconds:.0f} s"
            logger.warning("the start of the engine may hang: %s\n%s", reason, stacks)
            if may_end:
                return start_error(f"it hangs: {reason}")


async def _until_still(processes: FindProcesses, directory: Path, limit_seconds: float) -> str:
    """Return the phase of a start once nothing has moved for `limit_seconds`.

    It counts looks, since this process may have been stopped with the others.
    """
    still_seconds = 0.0
    known = await asyncio.to_thread(_progress, processes, directory)
    while still_seconds < limit_seconds:
        await asyncio.sleep(POLL_SECONDS)
        seen = await asyncio.to_thread(_progress, processes, directory)
        still_seconds += POLL_SECONDS
        if seen.has_moved_since(known):
            known, still_seconds = seen, 0.0
    return known.phase


@dataclass(frozen=True, slots=True)
class _Progress:
    """How far a start has come."""

    phases: tuple[tuple[str, ...], ...]
    """The phases that each rank has begun."""
    moved_bytes: int
    """What all its processes have read and written."""
    may_move_unseen: bool
    """Whether a compiler runs, or what a process reads cannot be told."""

    @property
    def phase(self) -> str:
        """The phase of the rank that has come least far; before the first, processes start."""
        begun = min(self.phases, key=len, default=())
        return begun[-1] if begun else "processes"

    def has_moved_since(self, known: _Progress) -> bool:
        """Whether the start has moved; the count falls when one of the processes ends."""
        return (
            self.may_move_unseen
            or self.phases != known.phases
            or abs(self.moved_bytes - known.moved_bytes) >= MOVED_BYTES
        )


def _progress(processes: FindProcesses, directory: Path) -> _Progress:
    living = processes()
    moved = [_moved_bytes(process) for process in living]
    ranks = read_all(directory, reads_steps=False)
    # The workers of a Ray cluster that was there before are not below this process.
    are_elsewhere = not {rank.pid for rank in ranks} <= {process.pid for process in living}
    return _Progress(
        phases=tuple(tuple(rank.phases) for rank in ranks),
        moved_bytes=sum(each or 0 for each in moved),
        may_move_unseen=are_elsewhere or None in moved or is_compiling(living),
    )


def _moved_bytes(process: psutil.Process) -> int | None:
    """Return how much a process has read and written; None if only the kernel knows."""
    try:
        lines = Path(f"/proc/{process.pid}/io").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0 if Path("/proc/self/io").exists() else None
    except OSError:
        return None
    return sum(int(line.split()[1]) for line in lines if line.startswith(_BYTES))
