"""One mapped file per rank: its worker writes it, anyone reads it, even after the worker's death.

A reader sees all of a write or nothing of it, wherever the writer was killed and on any processor;
`layout` says why. Reading never calls into the engine. Knows neither vLLM nor torch.

    layout          what is where in the file, and how a reader knows that it is whole
    writer, reader  write it, and read it
    mapped_files    makes files that a worker writes in each step

To add a number that changes seldom: declare it in `records.RankReport`, or in `RankMemory` to show
it in `/statusz` and in the answers of `/admin/workspace` too; change it with `StatsWriter.update`
where it is counted; export it in `telemetry.metrics`; then run `make reference`. To show it on the
status page as well, add it to `status_page.document`, which names each member that the page has.

A number that every step changes belongs in `layout.StepCounts` and `records.RankStats` instead,
with its place in `layout`'s format of a pulse: `StatsWriter` sets it when a step begins or ends,
and `reader` reads it. Only such a number needs a higher `layout.LAYOUT`, because a report is JSON
that names its fields.
"""

from __future__ import annotations

from holdfast.workspace.stats.layout import (
    MAX_CALLERS,
    MAX_SLOTS,
    NAME_BYTES,
    RECENT_STEPS,
    TEXT_BYTES,
    cut_text,
    stats_path,
)
from holdfast.workspace.stats.reader import read_all, read_stats
from holdfast.workspace.stats.writer import StatsWriter

__all__ = [
    "MAX_CALLERS",
    "MAX_SLOTS",
    "NAME_BYTES",
    "RECENT_STEPS",
    "TEXT_BYTES",
    "StatsWriter",
    "cut_text",
    "read_all",
    "read_stats",
    "stats_path",
]
