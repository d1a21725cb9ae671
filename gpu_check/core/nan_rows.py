"""What does looking for NaNs in logits cost, beside the output head that makes them?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gpu_check.core.bench import Bench, captured
from gpu_check.records import CheckFailedError, Measured
from holdfast.patches.engine import marked_nan_rows

_HIDDEN, _VOCABULARY = 4096, 151_936
"""Those of a model of eight billion weights. Its head is a thirteenth of them."""
_STEP_SHARE = 13.0
_ROWS = (1, 64)
_CALLS, _REPEATS = 10, 20


def check(bench: Bench) -> Sequence[Measured]:
    """The median times of marking rows, and of the head; marking fails above 1 % of a step."""
    with torch.inference_mode():
        head = torch.randn(_VOCABULARY, _HIDDEN, device=bench.device, dtype=torch.bfloat16)
        return [one for rows in _ROWS for one in _measured(head, rows)]


def _measured(head: torch.Tensor, rows: int) -> Iterator[Measured]:
    hidden = torch.randn(rows, _HIDDEN, device=head.device, dtype=head.dtype)
    logits = (hidden @ head.T).float()
    count = _median_us(lambda: marked_nan_rows(logits))
    made = _median_us(lambda: hidden @ head.T)
    yield Measured(f"looking for NaNs in {rows} rows", count, "us")
    yield Measured(f"the output head for {rows} rows", made, "us")
    if count > made * _STEP_SHARE / 100:
        raise CheckFailedError(
            f"looking for NaNs in {rows} rows takes {count} us, more than 1 % of a step of "
            f"{made * _STEP_SHARE:.0f} us; set VLLM_COMPUTE_NANS_IN_LOGITS=0."
        )


def _median_us(function: Callable[[], Any]) -> float:
    """The device's own time for one call, median of some runs of a graph with many calls.

    A step's launches run ahead of the device, so what the host needs to launch and to wait is not
    what a call costs there.
    """

    def calls() -> None:
        for _ in range(_CALLS):
            function()

    run = captured(calls)
    return round(statistics.median(_call_us(run) for _ in range(_REPEATS)), 1)


def _call_us(run: Callable[[], None]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) * 1000 / _CALLS
