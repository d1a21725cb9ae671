"""One mmap file per rank: written by its worker alone, read by anyone, also after its death.

A reader sees all of a write or nothing of it, wherever the writer was killed and on any processor,
see `layout`. Reading never calls into the engine. Knows neither vLLM nor torch.
"""

from __future__ import annotations

from holdfast.workspace.stats.layout import MAX_CALLERS, MAX_SLOTS, RECENT_STEPS, stats_path
from holdfast.workspace.stats.reader import read_all, read_stats
from holdfast.workspace.stats.writer import StatsWriter

__all__ = [
    "MAX_CALLERS",
    "MAX_SLOTS",
    "RECENT_STEPS",
    "StatsWriter",
    "read_all",
    "read_stats",
    "stats_path",
]
