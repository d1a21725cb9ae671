"""The steps of one rank, each from its launch to its output.

With asynchronous scheduling, vLLM's default on GPUs, `execute_model` and `sample_tokens` return
when the kernels are launched; the device is done when `get_output` of their result returns (0.32,
0.33). One or two further steps are launched before that. So a step ends with its output, and begins
when it was launched or when the step before it ended, whichever came later.

A rank that returns no such output, or whose output the executor does not ask for, knows only its
launches: its steps end with them.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput

from holdfast.worker.nan_rows import NanRows
from holdfast.worker.step_requests import StepRequests
from holdfast.workspace.stats import StatsWriter

MAX_LAUNCHED = 64
"""More than vLLM launches before it asks for the first output (`max_concurrent_batches`): a step
whose output it never asks for ends with its launch."""

logger = logging.getLogger("vllm.holdfast")


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """One step whose output has not arrived yet."""

    scheduled_tokens: int
    requests: int
    launched_seconds: float = 0.0
    """When the last of its launches returned."""
    number: int = 0
    """The number of the step in this rank, as `StepRequests` counts."""


class StepTracker:
    """Counts and times the steps of one rank, and records their requests.

    vLLM launches from one thread, and may ask for outputs from another.
    """

    def __init__(
        self,
        vllm_config: Any,
        rank: int,
        stats: StatsWriter,
        requests: StepRequests,
        record_fatal_error: Callable[[BaseException], None],
    ) -> None:
        self._vllm_config = vllm_config
        self._rank = rank
        self._stats = stats
        self._requests = requests
        self._nan_rows = NanRows(stats)
        self._record_fatal_error = record_fatal_error
        self._has_warned = False
        self._launched: deque[LaunchedStep] = deque()
        self._unsampled: LaunchedStep | None = None
        """The step that `sample_tokens` will complete."""
        self._changing = threading.Lock()

    def execute(self, scheduler_output: Any, execute_model: Callable[[], Any]) -> Any:
        """Return the result of `execute_model`, wrapped in `StepOutput` if its output is due."""
        step = LaunchedStep(
            scheduler_output.total_num_scheduled_tokens, len(scheduler_output.num_scheduled_tokens)
        )
        self._begin(step, scheduler_output)
        answer = execute_model()
        step.launched_seconds = time.monotonic()
        if answer is None and not self._is_pooling:
            self._unsampled = step
            return None
        return self._tracked(step, answer)

    def sample(self, sample_tokens: Callable[[], Any]) -> Any:
        """Return the result of `sample_tokens`, wrapped as in `execute`."""
        answer = sample_tokens()
        step, self._unsampled = self._unsampled, None
        if step is None:  # nothing was scheduled
            return answer
        step.launched_seconds = time.monotonic()
        return self._tracked(step, answer)

    def end(self, step: LaunchedStep, output: Any) -> None:
        """Note that the output of a step has arrived.

        Raises:
            NanLogitsError: nothing in it is right; the step still counts as running.
        """
        if self._is_output_rank:
            self._nan_rows.check(output)
        with self._changing:
            if step in self._launched:
                self._end(step)

    def fail(self, error: BaseException) -> None:
        """Note that getting an output failed; its step still counts as running."""
        self._record_fatal_error(error)

    def _begin(self, step: LaunchedStep, scheduler_output: Any) -> None:
        with self._changing:
            if self._unsampled is not None or len(self._launched) >= MAX_LAUNCHED:
                forgotten = self._unsampled or self._launched[0]
                self._unsampled = None
                self._end(forgotten, forgotten.launched_seconds)
            self._launched.append(step)
            self._record_requests(scheduler_output)
            step.number = self._requests.begun
            self._stats.step_started()

    def _tracked(self, step: LaunchedStep, answer: Any) -> Any:
        if self._is_output_rank and isinstance(answer, AsyncModelRunnerOutput):
            return StepOutput(answer, step, self)
        self.end(step, answer)
        return answer

    def _end(self, step: LaunchedStep, ended_seconds: float | None = None) -> None:
        self._launched.remove(step)
        self._stats.step_ended(
            scheduled_tokens=step.scheduled_tokens,
            requests=step.requests,
            ended_seconds=ended_seconds,
            is_next_running=bool(self._launched),
        )
        # If steps end out of order, the first that still runs holds back the others.
        running = self._launched[0].number if self._launched else self._requests.begun + 1
        self._requests.ended(running - 1)

    def _record_requests(self, scheduler_output: Any) -> None:
        try:
            self._requests.began(scheduler_output)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            # vLLM may have changed the scheduler's output; the step itself matters more.
            if not self._has_warned:
                logger.warning("Cannot tell which requests are in a step: %s", error)
            self._has_warned = True

    @functools.cached_property
    def _is_pooling(self) -> bool:
        """Whether `execute_model` is the whole of a step, as in `EngineCore.step`."""
        return bool(self._vllm_config.model_config.runner_type == "pooling")

    @functools.cached_property
    def _is_output_rank(self) -> bool:
        """Whether vLLM asks this rank for its outputs (`MultiprocExecutor._get_output_rank`)."""
        parallel = self._vllm_config.parallel_config
        width = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
        return bool(self._rank == parallel.world_size - width)


@AsyncModelRunnerOutput.register
class StepOutput:
    """Wraps vLLM's output of a step, and ends the step when the output arrives.

    It is not derived from vLLM's class, which has another abstract method in 0.33.
    """

    def __init__(
        self, output: AsyncModelRunnerOutput, step: LaunchedStep, steps: StepTracker
    ) -> None:
        self._output = output
        self._step = step
        self._steps = steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)

    def get_output(self) -> Any:
        """Return vLLM's own output; record a failure before raising it."""
        try:
            output = self._output.get_output()
            self._steps.end(self._step, output)
        except BaseException as error:
            self._steps.fail(error)
            raise
        return output
