"""Reads how much memory is left: on the host, and within each cgroup that bounds this process.

The sources are MemAvailable of `/proc/meminfo`, the limits of cgroup v2 and v1, and pressure stall
information (PSI, https://docs.kernel.org/accounting/psi.html), as far as the kernel has them.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.host_memory.kept_files import KeptFile, kept_file
from holdfast.processes.cgroups import MemoryGroup, memory_groups

PRESSURE_SECONDS = 2.0
"""The pressure is the share of this time: the kernel's own averages are over ten seconds."""

_TOTAL = re.compile(rb"^MemTotal: +(\d+) kB", re.MULTILINE)
_AVAILABLE = re.compile(rb"^MemAvailable: +(\d+) kB", re.MULTILINE)
_BARE = re.compile(rb"^(\d+)\s*$")
_STALLED = re.compile(rb"^some .*total=(\d+)$", re.MULTILINE)
_RECLAIMABLE = tuple(
    re.compile(rb"^%b (\d+)$" % name, re.MULTILINE)
    for name in (b"inactive_file", b"active_file", b"slab_reclaimable")
)
_RECLAIMABLE_V1 = tuple(
    re.compile(rb"^%b (\d+)$" % name, re.MULTILINE)
    for name in (b"total_inactive_file", b"total_active_file")
)
"""What the kernel takes back before a cgroup is out of memory, in `memory.stat` of v2 and v1."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What is left below one limit: the host's memory, or that of a cgroup."""

    total_bytes: int
    available_bytes: int
    pressure_ratio: float | None = None
    """The share of the last two seconds in which some task below it waited; None if unknown."""


class Pressure:
    """The share of the last seconds in which some task waited for memory, from the kernel's sum."""

    def __init__(self, file: KeptFile, clock: Callable[[], float]) -> None:
        self._file = file
        self._clock = clock
        self._sums: deque[tuple[float, int]] = deque()

    def ratio(self) -> float | None:
        """Read the sum of all waits until now, and return the share, from 0 to 1."""
        stalled_microseconds = self._file.number(_STALLED) if self._file.read() else None
        if stalled_microseconds is None:
            return None
        now_seconds = self._clock()
        while len(self._sums) > 1 and self._sums[1][0] <= now_seconds - PRESSURE_SECONDS:
            self._sums.popleft()
        self._sums.append((now_seconds, stalled_microseconds))
        since_seconds, before_microseconds = self._sums[0]
        # Over a shorter time a single wait would look like constant pressure.
        seconds = max(now_seconds - since_seconds, PRESSURE_SECONDS)
        return min(1.0, max(0.0, (stalled_microseconds - before_microseconds) / 1e6 / seconds))


@dataclass(frozen=True, slots=True)
class _Group:
    """The files of one cgroup."""

    limit: KeptFile
    usage: KeptFile
    stat: KeptFile | None
    reclaimable: Sequence[re.Pattern[bytes]]
    pressure: Pressure | None

    def bound(self) -> Bound | None:
        """Return what the group has left; None if it has no limit."""
        limit_bytes = self.limit.number(_BARE) if self.limit.read() else None
        if limit_bytes is None or not self.usage.read():
            return None
        left_bytes = limit_bytes - (self.usage.number(_BARE) or 0)
        if self.stat is not None and self.stat.read():
            left_bytes += sum(self.stat.number(pattern) or 0 for pattern in self.reclaimable)
        available_bytes = min(limit_bytes, max(0, left_bytes))
        return Bound(limit_bytes, available_bytes, _ratio(self.pressure))


class MemoryReader:
    """Reads one host after another time; `memory_reader` makes it. Belongs to one thread."""

    def __init__(
        self, host: KeptFile | None, pressure: Pressure | None, groups: Sequence[_Group]
    ) -> None:
        """Take the pressure of the host, too."""
        self._host = host
        self._pressure = pressure
        self._groups = groups

    def bounds(self) -> list[Bound]:
        """Return what is left below each limit; empty if nothing can be read."""
        host = self._host_bound()
        found = [] if host is None else [host]
        for group in self._groups:
            bound = group.bound()
            # A limit above all there is bounds nothing: v1 has a number for "no limit", too.
            if bound is not None and (host is None or bound.total_bytes < host.total_bytes):
                found.append(bound)
        return found

    def _host_bound(self) -> Bound | None:
        if self._host is None or not self._host.read():
            return None
        total, available = self._host.number(_TOTAL), self._host.number(_AVAILABLE)
        if total is None or available is None:
            return None
        return Bound(total * 1024, available * 1024, _ratio(self._pressure))


@contextmanager
def memory_reader(
    root: Path = Path("/"), clock: Callable[[], float] = time.monotonic
) -> Iterator[MemoryReader]:
    """Keep the files of the host at `root` open while entered."""
    with ExitStack() as kept:

        def opened(path: Path) -> KeptFile | None:
            return kept.enter_context(kept_file(path))

        def pressure(path: Path) -> Pressure | None:
            file = opened(path)
            return None if file is None else Pressure(file, clock)

        groups = (_opened_group(group, opened, pressure) for group in memory_groups(root))
        yield MemoryReader(
            opened(root / "proc/meminfo"),
            pressure(root / "proc/pressure/memory"),
            tuple(filter(None, groups)),
        )


def _opened_group(
    group: MemoryGroup,
    opened: Callable[[Path], KeptFile | None],
    pressure: Callable[[Path], Pressure | None],
) -> _Group | None:
    limit_name = "memory.max" if group.is_v2 else "memory.limit_in_bytes"
    usage_name = "memory.current" if group.is_v2 else "memory.usage_in_bytes"
    limit, usage = opened(group.path / limit_name), opened(group.path / usage_name)
    if limit is None or usage is None:
        return None
    patterns = _RECLAIMABLE if group.is_v2 else _RECLAIMABLE_V1
    stat, waits = opened(group.path / "memory.stat"), pressure(group.path / "memory.pressure")
    return _Group(limit, usage, stat, patterns, waits)


def _ratio(pressure: Pressure | None) -> float | None:
    return None if pressure is None else pressure.ratio()
