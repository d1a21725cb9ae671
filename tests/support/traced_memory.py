"""How much memory of Python something takes, in a process in which other threads take some, too."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

_TIMES = 3


def least_memory(
    work: Callable[[], None], *, begin: Callable[[], None] = lambda: None
) -> tuple[int, int]:
    """Return how many bytes `work` keeps and how many it takes at most, the least of three times.

    Memory is traced for all threads: that of pytest-xdist may be told of the next tests meanwhile.
    `begin` comes before each time.
    """
    kept, most = [], []
    for _ in range(_TIMES):
        tracemalloc.start()
        try:
            begin()
            before, _ = tracemalloc.get_traced_memory()
            work()
            after, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        kept.append(after - before)
        most.append(peak - before)
    return min(kept), min(most)
