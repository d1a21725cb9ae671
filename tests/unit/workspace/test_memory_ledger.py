"""The memory ledger of a rank: what it takes from a worker, what it leaves out, how it reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from holdfast.labels import MemoryKind
from holdfast.workspace.memory_ledger import (
    DeviceReading,
    MemoryLedger,
    as_table,
    unexplained_bytes,
)
from holdfast.workspace.plan import MIB
from holdfast.workspace.stats import StatsWriter, read_stats
from workspace_managers import forget_freed_memory

CPU = torch.device("cpu")
PLAIN: Any = {"bias": False, "params_dtype": torch.float32}


class GpuLedger(MemoryLedger):
    """Reads a GPU of 80 GiB, which this machine does not need."""

    used = 0

    def _reading(self) -> DeviceReading:
        return DeviceReading(80 * 1024 * MIB - self.used, 80 * 1024 * MIB)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[StatsWriter]:
    """The stats file of a rank."""
    with StatsWriter(tmp_path, engine=0, rank=0, generation=1) as opened:
        yield opened


def on_file(writer: StatsWriter) -> dict[MemoryKind, int]:
    stats = read_stats(writer.path)
    assert stats is not None
    return dict(stats.memory)


def worker_on(device: str, runner: dict[str, Any], **attributes: Any) -> Any:
    """The attributes of a worker that vLLM sets, and no others."""
    return SimpleNamespace(
        device=SimpleNamespace(type=device), model_runner=SimpleNamespace(**runner), **attributes
    )


def cpu_worker(size_bytes: int) -> Any:
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight = torch.nn.Parameter(torch.ones(size_bytes // 4))
    model.tied = model.weight
    model.register_buffer("table", torch.ones(256))
    return worker_on("cpu", {"get_model": lambda: model}, requested_cpu_memory=8 * 1024 * MIB)


def test_what_was_not_measured_is_absent(writer: StatsWriter) -> None:
    """A worker that keeps none of vLLM's numbers leaves those kinds out, and writes no zero."""
    ledger = GpuLedger(worker_on("cuda", {}), writer)
    ledger.record_weights(made_workspace_bytes=0)
    ledger.record_sizing(workspace_bytes=MIB)
    ledger.record_graphs(None)
    ledger.record_graphs(0)
    ledger.finish(workspace_bytes=MIB)
    assert on_file(writer) == {"workspace": MIB, "total": 80 * 1024 * MIB}


def test_workspaces_made_in_constructors_are_no_weights(
    writer: StatsWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's `model_memory_usage` contains them, and they count once."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    caches = [torch.zeros(3 * MIB, dtype=torch.uint8)]
    runner = {"model_memory_usage": 110 * MIB, "kv_caches": caches}
    worker = worker_on("cuda", runner, requested_memory=70 * MIB, peak_activation_memory=9 * MIB)
    ledger = GpuLedger(worker, writer)
    ledger.record_weights(made_workspace_bytes=10 * MIB)
    ledger.used = 150 * MIB
    ledger.record_sizing(workspace_bytes=12 * MIB)
    ledger.record_graphs(5 * MIB)
    ledger.finish(workspace_bytes=14 * MIB)
    assert on_file(writer) == {
        "weights": 100 * MIB,
        "kv_cache": 3 * MIB,
        "workspace": 14 * MIB,
        "activation_peak": 9 * MIB,
        "cuda_graphs": 5 * MIB,
        "non_torch": 38 * MIB,
        "budget": 70 * MIB,
        "total": 80 * 1024 * MIB,
    }


def test_the_estimate_of_the_graphs_is_no_activation(
    writer: StatsWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM adds it to the peak unless that is turned off."""
    worker = worker_on(
        "cuda", {}, peak_activation_memory=9 * MIB, cudagraph_memory_estimate=4 * MIB
    )
    ledger = GpuLedger(worker, writer)
    for flag, peak_bytes in (("1", 5 * MIB), ("0", 9 * MIB)):
        monkeypatch.setenv("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", flag)
        ledger.record_sizing(workspace_bytes=0)
        assert on_file(writer)["activation_peak"] == peak_bytes


def test_weights_on_the_cpu_are_counted_once(writer: StatsWriter) -> None:
    """Parameters and buffers by their storage, so that tied ones count once."""
    ledger = MemoryLedger(cpu_worker(4 * MIB), writer)
    ledger.record_weights(made_workspace_bytes=MIB)
    assert on_file(writer) == {"weights": 4 * MIB + 1024}


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_vllm_packs_for_the_cpu_are_counted(
    ranks: int, writer: StatsWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves an empty parameter in every linear layer, which each rank may have a part of."""
    for module in (linear, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
    layers = torch.nn.ModuleList(
        [
            ReplicatedLinear(256, 1024, **PLAIN),
            MergedColumnParallelLinear(256, [1024, 512], **PLAIN),
            QKVParallelLinear(256, 64, 8, 2, **PLAIN),
            RowParallelLinear(1024, 256, **PLAIN),
        ]
    )
    sizes_bytes = [layer.weight.nbytes for layer in layers]
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
        assert layer.weight.numel() == 0
    ledger = MemoryLedger(worker_on("cpu", {"get_model": lambda: layers}), writer)
    ledger.record_weights(made_workspace_bytes=0)
    assert on_file(writer) == {"weights": sum(sizes_bytes)}


def test_layers_that_share_one_kv_cache_count_it_once(writer: StatsWriter) -> None:
    """vLLM hands each layer a view of one allocation."""
    allocation = torch.zeros(8 * MIB, dtype=torch.int8)
    worker = cpu_worker(MIB)
    worker.model_runner.kv_caches = [allocation[: 4 * MIB], allocation[4 * MIB :]]
    ledger = MemoryLedger(worker, writer)
    ledger.finish(workspace_bytes=0)
    assert on_file(writer)["kv_cache"] == 8 * MIB


def test_the_ledger_explains_this_process(writer: StatsWriter) -> None:
    """On the CPU, the terms add up to what is resident, within a few percent."""
    forget_freed_memory()
    worker = cpu_worker(64 * MIB)
    ledger = MemoryLedger(worker, writer)
    workspace = torch.zeros(32 * MIB, dtype=torch.uint8)
    ledger.record_weights(made_workspace_bytes=0)
    ledger.record_sizing(workspace_bytes=workspace.nbytes)
    worker.model_runner.kv_caches = [torch.zeros(96 * MIB, dtype=torch.int8)]
    ledger.finish(workspace_bytes=workspace.nbytes)
    sizes = on_file(writer)
    resident_bytes = psutil.Process().memory_info().rss
    assert sizes["budget"] == 8 * 1024 * MIB
    assert sizes["total"] == psutil.virtual_memory().total
    assert abs(unexplained_bytes(sizes, resident_bytes)) < 0.05 * resident_bytes


def test_the_table_shows_each_kind_and_the_rest() -> None:
    """A term that was not measured says so, and the unexplained rest follows the terms."""
    sizes: dict[MemoryKind, int] = {
        "weights": 60 * MIB,
        "kv_cache": 20 * MIB,
        "workspace": 10 * MIB,
    }
    lines = as_table("Memory of rank 3:", sizes, 100 * MIB).splitlines()
    assert lines[0] == "Memory of rank 3:"
    assert [line.split()[0] for line in lines[1:6]] == [
        "weights",
        "kv_cache",
        "workspace",
        "cuda_graphs",
        "non_torch",
    ]
    assert lines[1].split() == ["weights", "60.0", "MiB"]
    assert lines[4].split() == ["cuda_graphs", "not", "measured"]
    assert lines[6].split() == [
        "unexplained",
        "10.0",
        "MiB",
        "10.0%",
        "of",
        "what",
        "is",
        "in",
        "use",
    ]


def test_activations_explain_nothing() -> None:
    """Their peak is over when the device is read."""
    assert unexplained_bytes({"weights": 4, "activation_peak": 3, "budget": 9}, 10) == 6
