"""How often did the kernel kill for lack of memory? Compared before and after a death."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def oom_kills(root: Path = Path("/")) -> int:
    """The kills in the memory cgroup of this process; where it has none, those of the machine.

    A container's own count leaves its neighbours' kills out (cgroup v2 and v1).
    """
    for path in (*_cgroup_files(root), root / "proc/vmstat"):
        count = _count(path)
        if count is not None:
            return count
    return 0


def _cgroup_files(root: Path) -> Iterator[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, group = line.split(":", 2)
        # Within a container the mount shows the own group at its root.
        for below in (group.lstrip("/"), ""):
            if number == "0":
                yield mounts / below / "memory.events"
            elif "memory" in controllers.split(","):
                yield mounts / "memory" / below / "memory.oom_control"


def _count(path: Path) -> int | None:
    """The line `oom_kill N`, which all these files have."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    return next((int(word[1]) for word in words if word[:1] == ["oom_kill"]), None)
