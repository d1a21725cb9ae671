"""How much memory does vLLM's build for CPUs find? Read as vLLM reads it, without vLLM.

See https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/utils/cpu_resource_utils.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

_FREE_OR_FREED = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
_CGROUPS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
"""Limit and use, of cgroup v2 and v1."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of one NUMA node, within the limit of the container."""

    total_bytes: int
    available_bytes: int


NO_MEMORY = HostMemory(0, 0)


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """That of the node of the first CPU that this process may use."""
    found = _of_node(root)
    for limit_path, use_path in _CGROUPS:
        limit_bytes = _number(root / limit_path)
        if limit_bytes is not None and limit_bytes < found.total_bytes:
            left_bytes = max(0, limit_bytes - (_number(root / use_path) or 0))
            return HostMemory(limit_bytes, min(found.available_bytes, left_bytes))
    return found


def _of_node(root: Path) -> HostMemory:
    first_cpu = min(os.sched_getaffinity(0))
    nodes = (root / f"sys/devices/system/cpu/cpu{first_cpu}").glob("node[0-9]*")
    name = next((node.name for node in nodes), "node0")
    try:
        lines = (root / f"sys/devices/system/node/{name}/meminfo").read_text().splitlines()
    except OSError:
        whole = psutil.virtual_memory()
        return HostMemory(whole.total, whole.available)
    # `Node 0 MemTotal: 97421888 kB`
    sizes = {words[2].rstrip(":"): int(words[3]) * 1024 for words in map(str.split, lines)}
    return HostMemory(
        sizes["MemTotal"], sum(sizes.get(name_of_size, 0) for name_of_size in _FREE_OR_FREED)
    )


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
