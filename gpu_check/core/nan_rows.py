"""What does counting the NaNs in logits cost a device, beside the output head that makes them?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gpu_check.core.bench import Bench
from gpu_check.records import CheckFailedError, Measured

_HIDDEN, _VOCABULARY = 4096, 151_936
"""Those of a model of eight billion weights. Its head is a thirteenth of them."""
_STEP_SHARE = 13.0
_ROWS = (1, 64)
_WARM_UPS, _REPEATS = 3, 20


def check(bench: Bench) -> Sequence[Measured]:
    """The median time of vLLM's count, and of the head; the count fails above 1 % of a step."""
    kind = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    with torch.inference_mode():
        head = torch.randn(_VOCABULARY, _HIDDEN, device=bench.device, dtype=kind)
        return [one for rows in _ROWS for one in _measured(bench, head, rows)]


def _measured(bench: Bench, head: torch.Tensor, rows: int) -> Iterator[Measured]:
    hidden = torch.randn(rows, _HIDDEN, device=head.device, dtype=head.dtype)
    logits = (hidden @ head.T).float()
    count = _median_us(bench, lambda: logits.isnan().sum(dim=-1, dtype=torch.int32))
    made = _median_us(bench, lambda: hidden @ head.T)
    yield Measured(f"counting the NaNs of {rows} rows", count, "us")
    yield Measured(f"the output head for {rows} rows", made, "us")
    if count > made * _STEP_SHARE / 100:
        raise CheckFailedError(
            f"counting the NaNs of {rows} rows takes {count} us, more than 1 % of a step of "
            f"{made * _STEP_SHARE:.0f} us; set VLLM_COMPUTE_NANS_IN_LOGITS=0."
        )


def _median_us(bench: Bench, function: Callable[[], Any]) -> float:
    """The time until the device is done."""
    times = []
    for number in range(_WARM_UPS + _REPEATS):
        began = time.perf_counter()
        function()
        if bench.device.type == "cuda":
            torch.cuda.synchronize(bench.device)
        if number >= _WARM_UPS:
            times.append(time.perf_counter() - began)
    return round(statistics.median(times) * 1e6, 1)
