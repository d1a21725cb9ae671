"""A worker with asynchronous scheduling, as GPUs have it, on a device that a test commands."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker import workspace

from holdfast.records import RankStats
from holdfast.worker.hooks import WorkerHooks
from holdfast.worker.steps import StepOutput
from holdfast.workspace.plan import WorkspaceSpec
from holdfast.workspace.stats import read_stats


class DeviceOutput(AsyncModelRunnerOutput):  # type: ignore[misc]  # vLLM is Any to us
    """The output of a step that the device takes `seconds` for, or fails at."""

    def __init__(
        self, seconds: float = 0.0, error: Exception | None = None, output: Any = "tokens"
    ) -> None:
        self._seconds = seconds
        self._error = error
        self._output = output
        self.is_asked = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def get_output(self) -> Any:
        """Waits for the device, as an event of CUDA does."""
        self.is_asked.set()
        time.sleep(self._seconds)
        self.may_end.wait()
        if self._error is not None:
            raise self._error
        return self._output

    def get_kv_connector_output(self) -> str:
        """What vLLM 0.33 asks for besides, where an output failed."""
        return "KV cache"


@dataclass
class Worker:
    """What the hooks wrap: what is launched returns at once, with what a test has put there."""

    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    executed: list[Any] = field(default_factory=list)
    """What `execute_model` answers, one after the other; None once it is empty."""
    sampled: list[Any] = field(default_factory=list)
    model_runner: Any = field(default_factory=SimpleNamespace)

    def execute_model(self, _: Any) -> Any:
        """Launch the model."""
        return self.executed.pop(0) if self.executed else None

    def sample_tokens(self, _: Any) -> Any:
        """Launch the sampler."""
        return self.sampled.pop(0) if self.sampled else None

    def execute_dummy_batch(self) -> None:
        """Nothing."""


@dataclass
class Rank:
    """One followed rank, asked as an executor asks it."""

    worker: Worker
    hooks: WorkerHooks
    directory: Path

    def execute(self, *names: str, tokens: int = 8) -> Any:
        """The answer to a step of these requests."""
        said = scheduled(*(names or ("one",)), tokens=tokens)
        return self.hooks.step(said, lambda: self.worker.execute_model(said))

    def sample(self) -> Any:
        """The answer to the rest of the step."""
        return self.worker.sample_tokens(None)

    def launch(self, output: DeviceOutput, *names: str, tokens: int = 8) -> StepOutput:
        """A step whose output comes from the device."""
        self.worker.sampled.append(output)
        assert self.execute(*names, tokens=tokens) is None
        answer = self.sample()
        assert isinstance(answer, StepOutput)
        return answer

    @property
    def stats(self) -> RankStats:
        """What the rank has written."""
        (path,) = self.directory.glob("*.stats")
        found = read_stats(path)
        assert found is not None
        return found


def scheduled(*names: str, tokens: int = 8) -> Any:
    """What vLLM's scheduler says of a step in which these requests decode."""
    count = len(names)
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        num_scheduled_tokens=dict.fromkeys(names, 1),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(names), num_computed_tokens=[10] * count, num_output_tokens=[3] * count
        ),
    )


def steps_in_flight(pipeline_parallel_size: int) -> int:
    """What vLLM says of its second model runner, the default on GPUs."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline_parallel_size),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        use_v2_model_runner=True,
    )
    return int(VllmConfig.max_concurrent_batches.fget(config))


@contextmanager
def followed_rank(
    directory: Path,
    *,
    rank: int = 0,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    runner_type: str = "generate",
) -> Iterator[Rank]:
    """A rank that is followed from its device on."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            tensor_parallel_size=tensor_parallel_size,
            prefill_context_parallel_size=1,
            world_size=tensor_parallel_size * pipeline_parallel_size,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        model_config=SimpleNamespace(runner_type=runner_type),
        max_concurrent_batches=steps_in_flight(pipeline_parallel_size),
    )
    spec = WorkspaceSpec(
        stats_directory=str(directory),
        generation=1,
        floor_bytes=0,
        headroom=0.0,
        growth="alongside",
        growth_limit_bytes=None,
    )
    worker = Worker(rank)
    managers = workspace.WorkspaceManager
    hooks = WorkerHooks(worker, config, spec)
    try:
        with hooks.device_initialised():
            pass
        yield Rank(worker, hooks, directory)
    finally:
        workspace.WorkspaceManager = managers
        workspace.reset_workspace_manager()
