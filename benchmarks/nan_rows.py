"""What does counting the NaNs in the logits cost? Compared with the output head that makes them.

    python benchmarks/nan_rows.py
    python benchmarks/nan_rows.py --pairs 21 --json

The head is the last product of a decode step: a sixteenth of the weights of a model of this size.
So a sixth of the head's time is one percent of a step. Counting is vLLM's, with what Holdfast does
with the counts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import nans_to_dict

import pairs
from holdfast.patches.engine import marked_nan_rows
from holdfast.worker.nan_rows import NanRows
from holdfast.workspace.stats import StatsWriter

HIDDEN, VOCABULARY = 2048, 32_000
"""Those of a model of a billion weights; in larger ones the head grows more than the logits."""
ROWS = (1, 16, 64)
_COUNT, _HEAD = "counting", "output head"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pairs.add_options(parser, pairs=11)
    arguments = pairs.parsed(parser)
    with (
        tempfile.TemporaryDirectory() as directory,
        StatsWriter(Path(directory), engine=0, rank=0, generation=1) as stats,
        torch.inference_mode(),
    ):
        head = torch.randn(VOCABULARY, HIDDEN)
        measures = [_measure(head, rows, NanRows(stats), arguments.pairs) for rows in ROWS]
    title = f"NaNs in logits of {VOCABULARY:,} tokens, hidden size {HIDDEN}, float32"
    pairs.show(pairs.Findings("nan_rows", title, measures), arguments)


def _measure(head: torch.Tensor, rows: int, nan_rows: NanRows, count: int) -> pairs.Measure:
    hidden = torch.randn(rows, HIDDEN)
    logits = hidden @ head.T
    places = {f"request-{number}": number for number in range(rows)}

    def counted() -> None:
        counts = nans_to_dict(marked_nan_rows(logits).tolist(), places)
        nan_rows.check(SimpleNamespace(num_nans_in_logits=counts))

    sides: dict[str, Callable[[], Any]] = {_COUNT: counted, _HEAD: lambda: hidden @ head.T}
    found: dict[str, list[float]] = {side: [] for side in sides}
    for pair in range(count + 1):
        for side in pairs.ordered(pair, list(sides)):
            found[side].append(_microseconds(sides[side]))
    kept = {side: times[1:] for side, times in found.items()}  # the first pair warms up
    return pairs.Measure(f"{rows} rows, µs", kept, 0, "<= 0.16")


def _microseconds(function: Callable[[], Any]) -> float:
    """The least of three, since another process can only add to it."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times) * 1e6


if __name__ == "__main__":
    main()
