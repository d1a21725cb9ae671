"""The files of a kernel that says how much memory is left, in a directory of a test."""

from __future__ import annotations

import os
from pathlib import Path

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


class FakeHost:
    """A host with `total_bytes` of memory, which all is available at first."""

    def __init__(self, root: Path, total_bytes: int = 100 * GIB) -> None:
        self.root = root
        self.total_bytes = total_bytes
        self.leave(total_bytes)

    def leave(self, available_bytes: int) -> None:
        """Have this much left."""
        self.write(
            "proc/meminfo",
            f"MemTotal: {self.total_bytes // KIB:>15} kB\nMemFree: {0:>16} kB\n"
            f"MemAvailable: {available_bytes // KIB:>11} kB\n",
        )

    def press(self, stalled_microseconds: int, path: str = "proc/pressure/memory") -> None:
        """Say how long tasks have waited since the start, all together."""
        averages = "avg10=0.00 avg60=0.00 avg300=0.00"
        self.write(
            path,
            f"some {averages} total={stalled_microseconds:015}\nfull {averages} total={0:015}\n",
        )

    def join(self, *lines: str) -> None:
        """Put the reader into these cgroups."""
        self.write("proc/self/cgroup", "".join(f"{line}\n" for line in lines))

    def bound(self, group: str, limit: str, used_bytes: int, cached_bytes: int = 0) -> None:
        """Limit a cgroup v2; of what it uses `cached_bytes` can be reclaimed."""
        self.write(f"sys/fs/cgroup/{group}/memory.max", f"{limit}\n")
        self.write(f"sys/fs/cgroup/{group}/memory.current", f"{used_bytes}\n")
        self.write(
            f"sys/fs/cgroup/{group}/memory.stat",
            f"anon 1\nfile 77\nshmem 7\ninactive_file {cached_bytes}\nactive_file 0\n"
            "slab_reclaimable 0\n",
        )

    def bound_v1(self, group: str, limit_bytes: int, used_bytes: int, cached_bytes: int) -> None:
        """Limit a cgroup v1."""
        below = f"sys/fs/cgroup/memory/{group}"
        self.write(f"{below}/memory.limit_in_bytes", f"{limit_bytes}\n")
        self.write(f"{below}/memory.usage_in_bytes", f"{used_bytes}\n")
        self.write(
            f"{below}/memory.stat",
            f"inactive_file 1\nactive_file 1\ntotal_inactive_file {cached_bytes}\n"
            "total_active_file 0\n",
        )

    def write(self, path: str, text: str) -> None:
        """Write a file in place, at once: the reader has it open, and may read at any moment."""
        at = self.root / path
        at.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(at, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            content = text.encode()
            os.pwrite(descriptor, content, 0)
            if os.fstat(descriptor).st_size > len(content):
                os.ftruncate(descriptor, len(content))
        finally:
            os.close(descriptor)
