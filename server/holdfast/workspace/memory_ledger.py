"""Where did the memory of one rank go? The ledger of its start, checked against the device.

On a GPU the device's own reading is what is in use on it, by whomever; on the CPU it is what is
resident of the worker's process, since `malloc` tells nothing of what it gave to whom.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import psutil
import torch
from vllm import envs

from holdfast.records import MEMORY_KINDS, MemoryKind
from holdfast.workspace.accounting import tensor_bytes
from holdfast.workspace.device import DeviceReading, read_device
from holdfast.workspace.plan import MIB
from holdfast.workspace.stats import StatsWriter

TERMS: tuple[MemoryKind, ...] = ("weights", "kv_cache", "workspace", "cuda_graphs", "non_torch")
"""What is held for good, so that its sum explains the reading; `activation_peak` comes and goes."""

logger = logging.getLogger("vllm.holdfast")


class MemoryLedger:
    """Filled in while a worker starts. A kind that could not be measured stays absent.

    `non_torch` is what is in use beyond weights and workspaces when the KV cache is about to be
    allocated, with torch's own cache emptied: contexts, NCCL, other processes and buffers of the
    runner on a GPU; interpreter, libraries, compiled code and buffers of the runner on the CPU.
    Torch's `memory_reserved` would not do, since vLLM's allocator for sleep mode goes past it.
    """

    def __init__(self, worker: Any, stats: StatsWriter) -> None:
        self._worker = worker
        self._stats = stats
        self._is_peak_reset = False
        self.sizes: dict[MemoryKind, int] = {}

    def loaded(self, *, made_workspace_bytes: int) -> None:
        """Enter the weights; what constructors made of workspaces stands under `workspace`."""
        if self._is_on_cpu:
            self._enter("weights", tensor_bytes(_weights(self._worker)))
            return
        usage_bytes = getattr(self._worker.model_runner, "model_memory_usage", None)
        if usage_bytes is not None:
            self._enter("weights", int(usage_bytes) - made_workspace_bytes)

    @property
    def activation_peak_bytes(self) -> int:
        """What a step takes beyond what is held for good; 0 where nobody measured it."""
        return self.sizes.get("activation_peak", 0)

    def sizing(self) -> None:
        """Told before the KV cache is sized: the peak of the activations counts from here."""
        if not self._is_on_cpu:
            torch.accelerator.reset_peak_memory_stats(self._worker.device)
            self._is_peak_reset = True

    def sized(self, *, workspace_bytes: int) -> None:
        """Enter what the sizing of the KV cache found out."""
        worker = self._worker
        if "weights" in self.sizes:
            if not self._is_on_cpu:
                torch.accelerator.empty_cache()
            known_bytes = self.sizes["weights"] + workspace_bytes
            self._enter("non_torch", self.used_bytes() - known_bytes)
        # vLLM adds its estimate of the graphs to the peak, if it is told to.
        peak_bytes = getattr(worker, "peak_activation_memory", None)
        if peak_bytes is not None:
            self._enter("activation_peak", int(peak_bytes) - _applied_estimate_bytes(worker))
        elif self._is_peak_reset:  # vLLM runs a step, but measures none, for a given KV cache size
            self._enter("activation_peak", self._reading().transient_peak_bytes)

    def captured(self, size_bytes: object) -> None:
        """Enter what `capture_model` says the graphs take; it says 0 if it captured none."""
        if isinstance(size_bytes, int) and size_bytes > 0:
            self._enter("cuda_graphs", size_bytes)

    def closed(self, *, workspace_bytes: int) -> None:
        """Enter what is known once warm-up is over."""
        worker = self._worker
        self._enter("workspace", workspace_bytes)
        if caches := getattr(worker.model_runner, "kv_caches", None):
            # Not `kv_cache_tensors[].size`: vLLM lays those over each other in one allocation.
            self._enter("kv_cache", tensor_bytes([caches]))
        budget_bytes = getattr(
            worker, "requested_cpu_memory" if self._is_on_cpu else "requested_memory", None
        )
        if budget_bytes is not None:
            self._enter("budget", int(budget_bytes))
        self._enter("total", self._reading().total_bytes)

    def used_bytes(self) -> int:
        """The device's own reading; on the CPU what is resident of this process."""
        if self._is_on_cpu:
            return int(psutil.Process().memory_info().rss)
        return self._reading().used_bytes

    @property
    def _is_on_cpu(self) -> bool:
        return bool(self._worker.device.type == "cpu")

    def _reading(self) -> DeviceReading:
        return read_device(self._worker.device)

    def _enter(self, kind: MemoryKind, size_bytes: int) -> None:
        # A difference of two readings can fall below zero, and a size cannot.
        self.sizes[kind] = max(0, size_bytes)
        self._stats.memory(kind, self.sizes[kind])


def unexplained_bytes(sizes: Mapping[MemoryKind, int], used_bytes: int) -> int:
    """What the device holds beyond the terms of the ledger; negative if they are too large."""
    return used_bytes - sum(sizes.get(kind, 0) for kind in TERMS)


def as_table(title: str, sizes: Mapping[MemoryKind, int], used_bytes: int) -> str:
    """The ledger in MiB, one line a kind, the terms first and then what they leave unexplained."""
    rest_bytes = unexplained_bytes(sizes, used_bytes)
    share = rest_bytes / used_bytes if used_bytes else 0.0
    lines = [
        title,
        *(_line(kind, sizes.get(kind)) for kind in TERMS),
        f"{_line('unexplained', rest_bytes)}  {share:.1%} of what is in use",
        _line("in use", used_bytes),
        *(_line(kind, sizes.get(kind)) for kind in MEMORY_KINDS if kind not in TERMS),
    ]
    return "\n".join(lines)


def _line(name: str, size_bytes: int | None) -> str:
    size = "not measured" if size_bytes is None else f"{size_bytes / MIB:.1f} MiB"
    return f"  {name:<16}{size:>16}"


def _weights(worker: Any) -> list[torch.Tensor]:
    """The parameters and buffers of the model and of a draft model; some share their storage."""
    # Not each of vLLM's runners has both.
    askers = (getattr(worker.model_runner, name, None) for name in ("get_model", "get_draft_model"))
    models = [ask() for ask in askers if ask is not None]
    return [
        tensor
        for model in models
        if model is not None
        for tensor in (*model.parameters(), *model.buffers())
    ]


def _applied_estimate_bytes(worker: Any) -> int:
    if not envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS:
        return 0
    return int(getattr(worker, "cudagraph_memory_estimate", 0))
