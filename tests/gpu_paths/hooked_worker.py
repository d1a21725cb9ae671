"""A worker without a model, on a fake device, under our hooks: its start, one call at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.v1.worker import workspace

from gpu_paths.fake_memory import DEVICE
from holdfast.records import RankStats
from holdfast.worker.hooks import WorkerHooks
from holdfast.workspace.manager import WorkspaceManager
from holdfast.workspace.plan import GrowthPolicy, WorkspaceSpec
from holdfast.workspace.stats import read_stats


def first_runner(mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE) -> Any:
    """What the hooks look at of vLLM's V1 runner."""
    return SimpleNamespace(
        capture_model=lambda: 0,
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        model_memory_usage=0,
    )


class FakeWorker:
    """The methods of vLLM's worker that the hooks wrap; a test says what a profile run does."""

    device = DEVICE
    rank = 0
    peak_activation_memory: int
    """Not there until a profile has measured it, as the next one."""
    cudagraph_memory_estimate: int
    hooks: WorkerHooks
    """Those around it, once it is followed."""

    def __init__(self, config: Any, runner: Any = None) -> None:
        self.vllm_config = config
        self.model_runner = runner or first_runner()
        self.available_bytes = 0
        self.profile: Callable[[], None] = lambda: None
        self.model = torch.nn.Module()
        self.kv_cache_spec: dict[str, Any] = {}

    def get_model(self) -> torch.nn.Module:
        return self.model

    def load_model(self) -> None:
        """Nothing to load."""

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return self.kv_cache_spec

    def determine_available_memory(self) -> int:
        """A given size goes past the profile's own numbers, as in vLLM."""
        self.profile()
        return self.vllm_config.cache_config.kv_cache_memory_bytes or self.available_bytes

    def compile_or_warm_up_model(self) -> None:
        self.model_runner.capture_model()


def config(*, kv_cache_memory_bytes: int | None = None, max_model_len: int = 4096) -> Any:
    """What the hooks and a reserver look at."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=0, decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=8),
        model_config=SimpleNamespace(
            max_model_len=max_model_len, original_max_model_len=max_model_len, hf_config=None
        ),
        cache_config=SimpleNamespace(
            kv_cache_memory_bytes=kv_cache_memory_bytes, cache_dtype="auto"
        ),
        max_concurrent_batches=1,
    )


@contextmanager
def followed(
    directory: Path,
    patches: pytest.MonkeyPatch,
    *,
    vllm_config: Any = None,
    floor_bytes: int = 0,
    kept_host_bytes: int = 0,
    growth: GrowthPolicy = "alongside",
    ubatches: int = 1,
    lanes: int = 1,
    runner: Any = None,
    alloc_context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[FakeWorker]:
    """A worker whose device is initialised and followed."""
    spec = WorkspaceSpec(
        stats_directory=str(directory),
        generation=1,
        floor_bytes=floor_bytes,
        headroom=0.0,
        growth=growth,
        growth_limit_bytes=None,
        kept_host_bytes=kept_host_bytes,
    )
    worker = FakeWorker(vllm_config or config(), runner)
    patches.setattr(workspace, "WorkspaceManager", workspace.WorkspaceManager)
    patches.setattr(parallel_state, "_WORLD", SimpleNamespace(world_size=1))
    try:
        worker.hooks = WorkerHooks(worker, worker.vllm_config, spec)
        with worker.hooks.device_initialised():
            workspace.init_workspace_manager(DEVICE, ubatches, lanes, alloc_context)
        yield worker
    finally:
        workspace.reset_workspace_manager()


def manager() -> WorkspaceManager:
    """That of this process."""
    current = workspace.current_workspace_manager()
    assert isinstance(current, WorkspaceManager)
    return current


def growth_limit_bytes() -> int:
    """The limit that the lock of this process has set."""
    return manager()._gate.rule.limit_bytes


def stats(directory: Path) -> RankStats:
    """What the rank has told its reader."""
    (path,) = directory.glob("*.stats")
    found = read_stats(path)
    assert found is not None
    return found
