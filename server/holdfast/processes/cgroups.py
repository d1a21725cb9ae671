"""Finds the memory cgroups of this process: its own, and those above it that bound it too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """One directory of cgroup v2 or v1; it may not exist."""

    path: Path
    is_v2: bool


def memory_groups(root: Path = Path("/")) -> Iterator[MemoryGroup]:
    """Yield the groups of this process for memory, the nearest first, up to the root of the mount.

    Within a container, the mount shows the container's own group at its root, and the path of the
    group, which is the host's, does not exist below it.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, group = line.split(":", 2)
        is_v2 = number == "0"
        if is_v2 or "memory" in controllers.split(","):
            top = mounts if is_v2 else mounts / "memory"
            own = Path(group.lstrip("/"))
            for below in (own, *own.parents) if own.parts else (own,):
                yield MemoryGroup(top / below, is_v2)
