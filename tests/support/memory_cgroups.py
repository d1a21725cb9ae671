"""Real memory cgroups with a limit, for processes that a test starts itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from servers import wait_until

_MOUNTS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)
DEADLINE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """A cgroup with a limit. A process joins it by writing its own pid to `members`."""

    members: Path
    limit_bytes: int

    @property
    def left_bytes(self) -> int:
        """What its processes may still take, now: page cache is given back for it."""
        usage, *_ = self._present("memory.current", "memory.usage_in_bytes")
        stat, *_ = self._present("memory.stat")
        sizes = dict(line.split() for line in stat.read_text().splitlines())
        cached = ("inactive_file", "active_file")
        sums = (sizes.get(f"total_{name}", sizes[name]) for name in cached)
        return self.limit_bytes - int(usage.read_text()) + sum(map(int, sums))

    @property
    def oom_kills(self) -> int:
        """How many of its processes the kernel has killed for lack of memory."""
        counts, *_ = self._present("memory.events", "memory.oom_control")
        return int(dict(line.split() for line in counts.read_text().splitlines())["oom_kill"])

    def _present(self, *names: str) -> list[Path]:
        """Those of these files that this version of cgroups has."""
        paths = [self.members.with_name(name) for name in names]
        return [path for path in paths if path.exists()]


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """A new cgroup, which is removed once its processes have ended.

    The test is skipped where this process may not make one.
    """
    for mount, limit_name in _MOUNTS:
        group = mount / f"holdfast-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if not (group / limit_name).exists():  # the controller is elsewhere
                continue
            (group / limit_name).write_text(str(limit_bytes))
            yield MemoryCgroup(group / "cgroup.procs", limit_bytes)
            return
        finally:
            _remove(group)
    pytest.skip("this process may not make a memory cgroup here")


def _remove(group: Path) -> None:
    def is_removed() -> bool:
        try:
            group.rmdir()
        except OSError:  # a process in it has not ended completely
            return False
        return True

    wait_until(
        is_removed,
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: f"{group} still has {(group / 'cgroup.procs').read_text().split()}",
    )
