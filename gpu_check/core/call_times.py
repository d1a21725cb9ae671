"""What does a request for workspace cost a layer, beside vLLM's own manager?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from gpu_check.core.bench import Bench, view
from gpu_check.records import Measured
from holdfast.workspace.plan import MIB

_CALLS, _REPEATS = 5_000, 5


def check(bench: Bench) -> Sequence[Measured]:
    """A known spec of two tensors, after the lock. It measures, and fails at no number."""
    return [
        Measured("a call of Holdfast's manager", _call_ns(bench.manager("alongside")), "ns"),
        Measured("a call of vLLM's manager", _call_ns(bench.vllm_manager()), "ns"),
    ]


def _call_ns(manager: Any) -> float:
    view(manager, 4 * MIB)
    manager.lock()
    specs = (((256, 128), torch.float16), ((1024,), torch.uint8))
    return round(statistics.median(_repeat_ns(manager, specs) for _ in range(_REPEATS)), 1)


def _repeat_ns(manager: Any, specs: tuple[object, ...]) -> float:
    began_ns = time.perf_counter_ns()
    for _ in range(_CALLS):
        manager.get_simultaneous(*specs)
    return (time.perf_counter_ns() - began_ns) / _CALLS
