"""Counts the rows of logits with a NaN, and ends an engine that has no sound row any more.

A token drawn from such a row is arbitrary, and the request that gets it has no other sign of it.
With speculation, the rows of a request in one step count as one.
One bad row is a fault of its request, of one expert or of one block of the KV cache. If every row
is bad, the weights or the device are, and only another engine helps.

vLLM tells them if `VLLM_COMPUTE_NANS_IN_LOGITS` is set (0.32, 0.33); `engine.launch.startup` sets
it, and `patches.engine.mark_nan_rows` makes it cheap.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.workspace.stats import StatsWriter

LOST_ROWS = 8
"""This many rows in a row, over one step or several, and none of them sound: a single request that
overflows on its own does not end the engine of others."""


class NanLogitsError(HoldfastError):
    """Every row of the newest logits has a NaN."""


class NanRows:
    """What one rank has seen of NaNs in its logits."""

    def __init__(self, stats: StatsWriter) -> None:
        self._stats = stats
        self._lost_rows = 0
        """Rows with a NaN since the last step that had a sound one."""

    def check(self, output: Any) -> None:
        """Count the bad rows of a step's output.

        Raises:
            NanLogitsError: the last `LOST_ROWS` rows had a NaN.
        """
        counts = getattr(output, "num_nans_in_logits", None)
        if not counts:
            return
        bad_rows = sum(map(bool, counts.values())) if any(counts.values()) else 0
        if not bad_rows:
            self._lost_rows = 0
            return
        self._stats.update(lambda report: replace(report, nan_rows=report.nan_rows + bad_rows))
        self._lost_rows = self._lost_rows + bad_rows if bad_rows == len(counts) else 0
        if self._lost_rows >= LOST_ROWS:
            raise NanLogitsError(
                f"NaNs detected in logits: none of the last {self._lost_rows} rows is without one"
            )
