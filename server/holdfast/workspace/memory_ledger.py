"""Where did the memory of one rank go? The ledger of its start, checked against the device.

On a GPU, what is in use is the device's own reading, which includes other processes. On the CPU it
is what is resident of the worker's process, because `malloc` keeps no account by user.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from vllm import envs
from vllm.platforms import current_platform
from vllm.utils.mem_utils import MemorySnapshot

from holdfast.labels import MEMORY_KINDS, MemoryKind
from holdfast.workspace.accounting import tensor_bytes
from holdfast.workspace.plan import MIB
from holdfast.workspace.stats import StatsWriter

HELD_KINDS: tuple[MemoryKind, ...] = (
    "weights",
    "kv_cache",
    "workspace",
    "cuda_graphs",
    "non_torch",
)
"""What is held permanently, so its sum explains the reading; `activation_peak` is temporary."""

MARGIN_BYTES = 256 * MIB
"""Left free on the device, at least, when ranks agree on how much each may grow."""
logger = logging.getLogger("vllm.holdfast")


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One reading of a device. On the CPU, what torch keeps is unknown."""

    free_bytes: int
    total_bytes: int
    cached_bytes: int = 0
    """Held by torch's allocator, but used by no tensor; most of the pools of graphs is in it."""
    transient_peak_bytes: int = 0
    """The most that tensors used beyond what they use now, since the peak was reset."""

    @property
    def used_bytes(self) -> int:
        """In use on the device, by any process."""
        return self.total_bytes - self.free_bytes

    def growable_bytes(
        self, activation_peak_bytes: int, *, graph_bytes: int = 0, kept_bytes: int = MARGIN_BYTES
    ) -> int:
        """Return what workspaces may take so that the activations of the largest step still fit.

        Torch's cache serves activations first, but not from the pools of graphs. vLLM empties it
        around their capture, so most of the activations' memory looks free at the lock.
        """
        usable_bytes = max(0, self.cached_bytes - graph_bytes)
        claimed_bytes = max(0, activation_peak_bytes - usable_bytes)
        return max(0, self.free_bytes - claimed_bytes - kept_bytes)


def read_device(device: torch.device) -> DeviceReading:
    """Return the device's own reading; on the CPU, the host's."""
    if device.type == "cpu":
        memory = psutil.virtual_memory()
        return DeviceReading(int(memory.available), int(memory.total))
    snapshot = MemorySnapshot(device=device)
    return DeviceReading(
        free_bytes=int(snapshot.free_memory),
        total_bytes=int(snapshot.total_memory),
        # vLLM's allocator for sleep mode bypasses torch's count of what it holds.
        cached_bytes=max(0, int(snapshot.torch_memory - snapshot.torch_allocated)),
        transient_peak_bytes=max(0, int(snapshot.torch_peak - snapshot.torch_allocated)),
    )


def is_unified_memory(device: torch.device) -> bool:
    """Return whether filling the device's memory fills the host's, as on GB10 and on the CPU."""
    return device.type == "cpu" or bool(current_platform.is_integrated_gpu(device.index))


def kept_bytes(device: torch.device, kept_host_bytes: int) -> int:
    """Return what growth leaves free on the device, if a host is to keep `kept_host_bytes`."""
    return max(MARGIN_BYTES, kept_host_bytes) if is_unified_memory(device) else MARGIN_BYTES


class MemoryLedger:
    """Records sizes while a worker starts. A kind that could not be measured stays absent.

    `non_torch` is what is in use beyond weights and workspaces just before the KV cache is
    allocated, with torch's own cache emptied: contexts, NCCL, other processes and buffers of the
    runner on a GPU; interpreter, libraries, compiled code and buffers of the runner on the CPU.
    Torch's `memory_reserved` would miss what vLLM's allocator for sleep mode holds.
    """

    def __init__(self, worker: Any, stats: StatsWriter) -> None:
        self._worker = worker
        self._stats = stats
        self._is_peak_reset = False
        self.sizes: dict[MemoryKind, int] = {}

    def record_weights(self, *, made_workspace_bytes: int) -> None:
        """Record the weights, without the workspaces that constructors made."""
        if self._is_on_cpu:
            modules = _modules(self._worker)
            packed_bytes = sum(map(_packed_bytes, modules))
            self._record("weights", tensor_bytes(_weights(modules)) + packed_bytes)
            return
        usage_bytes = getattr(self._worker.model_runner, "model_memory_usage", None)
        if usage_bytes is not None:
            self._record("weights", int(usage_bytes) - made_workspace_bytes)

    def begin_sizing(self) -> None:
        """Begin to measure the peak of the activations, before the KV cache is sized."""
        if not self._is_on_cpu:
            torch.accelerator.reset_peak_memory_stats(self._worker.device)
            self._is_peak_reset = True

    def record_sizing(self, *, workspace_bytes: int) -> None:
        """Record what the sizing of the KV cache has measured."""
        worker = self._worker
        if "weights" in self.sizes:
            if not self._is_on_cpu:
                torch.accelerator.empty_cache()
            known_bytes = self.sizes["weights"] + workspace_bytes
            self._record("non_torch", self.used_bytes() - known_bytes)
        # vLLM adds its estimate of the graphs to the peak if it is configured to.
        peak_bytes = getattr(worker, "peak_activation_memory", None)
        if peak_bytes is not None:
            self._record("activation_peak", int(peak_bytes) - _applied_estimate_bytes(worker))
        elif self._is_peak_reset:  # vLLM runs a step unmeasured if the KV cache size is given
            self._record("activation_peak", self._reading().transient_peak_bytes)

    def record_graphs(self, size_bytes: object) -> None:
        """Record what `capture_model` returned for the graphs; it returns 0 without any."""
        if isinstance(size_bytes, int) and size_bytes > 0:
            self._record("cuda_graphs", size_bytes)

    def growable_bytes(self, kept_bytes: int) -> int:
        """Return what workspaces may take now, if `kept_bytes` of the device stay free."""
        return self._reading().growable_bytes(
            self.sizes.get("activation_peak", 0),
            graph_bytes=self.sizes.get("cuda_graphs", 0),
            kept_bytes=kept_bytes,
        )

    def finish(self, *, workspace_bytes: int) -> None:
        """Record what is known once warm-up is over."""
        worker = self._worker
        self._record("workspace", workspace_bytes)
        if caches := getattr(worker.model_runner, "kv_caches", None):
            # Not `kv_cache_tensors[].size`: vLLM lets those overlap in one allocation.
            self._record("kv_cache", tensor_bytes([caches]))
        budget_bytes = getattr(
            worker, "requested_cpu_memory" if self._is_on_cpu else "requested_memory", None
        )
        if budget_bytes is not None:
            self._record("budget", int(budget_bytes))
        self._record("total", self._reading().total_bytes)

    def used_bytes(self) -> int:
        """Return what is in use on the device; on the CPU, what is resident of this process."""
        if self._is_on_cpu:
            return int(psutil.Process().memory_info().rss)
        return self._reading().used_bytes

    @property
    def _is_on_cpu(self) -> bool:
        return bool(self._worker.device.type == "cpu")

    def _reading(self) -> DeviceReading:
        return read_device(self._worker.device)

    def _record(self, kind: MemoryKind, size_bytes: int) -> None:
        # A difference of two readings can fall below zero, and a size cannot.
        self.sizes[kind] = max(0, size_bytes)
        self._stats.update(lambda report: replace(report, memory=dict(self.sizes)))


def unexplained_bytes(sizes: Mapping[MemoryKind, int], used_bytes: int) -> int:
    """Return what is in use beyond what the ledger explains; negative if that is too much."""
    return used_bytes - sum(sizes.get(kind, 0) for kind in HELD_KINDS)


def as_table(title: str, sizes: Mapping[MemoryKind, int], used_bytes: int) -> str:
    """Return the ledger in MiB, one line per kind: what is held, what is unexplained, the rest."""
    rest_bytes = unexplained_bytes(sizes, used_bytes)
    share = rest_bytes / used_bytes if used_bytes else 0.0
    lines = [
        title,
        *(_line(kind, sizes.get(kind)) for kind in HELD_KINDS),
        f"{_line('unexplained', rest_bytes)}  {share:.1%} of what is in use",
        _line("in use", used_bytes),
        *(_line(kind, sizes.get(kind)) for kind in MEMORY_KINDS if kind not in HELD_KINDS),
    ]
    return "\n".join(lines)


def _line(name: str, size_bytes: int | None) -> str:
    size = "not measured" if size_bytes is None else f"{size_bytes / MIB:.1f} MiB"
    return f"  {name:<16}{size:>16}"


def _modules(worker: Any) -> set[torch.nn.Module]:
    """Return all modules of the model and of a draft model, which may share some."""
    # Not every runner of vLLM has both.
    getters = (
        getattr(worker.model_runner, name, None) for name in ("get_model", "get_draft_model")
    )
    models = [get() for get in getters if get is not None]
    return {module for model in models if model is not None for module in model.modules()}


def _weights(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the parameters and buffers of modules; some share storage."""
    return [
        tensor
        for module in modules
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    ]


def _packed_bytes(module: Any) -> int:
    """Return the bytes of an unquantized weight that vLLM has packed for the CPU; 0 without one.

    The parameter is empty then, and the packed weight is outside torch, or in a tensor that only a
    closure refers to (`dispatch_cpu_unquantized_gemm`, 0.32). What is counted is its size before.
    """
    weight = getattr(module, "weight", None)
    if not hasattr(module, "cpu_linear") or weight is None or weight.numel() > 0:
        return 0
    # What every rank has as a whole has no size of a partition.
    columns = getattr(module, "input_size_per_partition", module.input_size)
    return int(sum(module.output_partition_sizes) * columns * weight.element_size())


def _applied_estimate_bytes(worker: Any) -> int:
    if not envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS:
        return 0
    return int(getattr(worker, "cudagraph_memory_estimate", 0))
