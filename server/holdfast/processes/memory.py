"""How much of the host's memory do processes hold? What their end would give back."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def host_memory_bytes(processes: Iterable[psutil.Process]) -> int:
    """Add up the resident memory of processes, without shared memory and mapped files.

    The kernel can drop mapped files, such as weights, and shared memory may outlive a process. A
    page that a fork has not written to yet counts in each process that has it. A process that has
    ended holds nothing.

    Raises:
        OSError: /proc cannot be read, for example because too many files are open.
    """
    total_bytes = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            memory = process.memory_info()
            total_bytes += int(memory.rss) - int(memory.shared)
    return total_bytes
