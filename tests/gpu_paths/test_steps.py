"""When a step ends on a GPU: with its output, which comes long after its launch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture
from vllm.v1.outputs import AsyncModelRunnerOutput

from gpu_paths.async_worker import (
    DeviceOutput,
    Rank,
    followed_rank,
    scheduled,
    steps_in_flight,
)
from holdfast.engine.heartbeat import Snapshot, StallDetector
from holdfast.worker.nan_rows import LOST_ROWS, NanLogitsError
from holdfast.worker.step_requests import read_suspects
from holdfast.worker.steps import MAX_LAUNCHED

DEVICE_SECONDS = 0.3
WAIT_SECONDS = 60.0


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    """The only rank of an engine."""
    with followed_rank(tmp_path) as one:
        yield one


def suspects(rank: Rank) -> list[str]:
    """Which requests may have ended the engine, had it ended now."""
    return [one.request_id for one in read_suspects(rank.directory).get(0, ())]


def running(rank: Rank) -> list[str]:
    """Those of them whose steps had not ended."""
    found = read_suspects(rank.directory).get(0, ())
    return [one.request_id for one in found if one.is_in_running_step]


def test_a_step_ends_when_its_output_is_there(rank: Rank) -> None:
    """Also for vLLM's executors, which know the output by its class."""
    output = AsyncOutputFuture(rank.launch(DeviceOutput(DEVICE_SECONDS), tokens=64), True)
    assert rank.stats.steps == 0
    assert rank.stats.running_step_started_seconds is not None
    assert output.result() == "tokens"
    stats = rank.stats
    assert (stats.steps, stats.scheduled_tokens) == (1, 64)
    assert stats.running_step_started_seconds is None
    assert stats.recent_steps[0].duration_seconds >= DEVICE_SECONDS


def nans(*counts: int) -> Any:
    """An output that tells the NaNs in the row of each request."""
    return SimpleNamespace(num_nans_in_logits={str(at): n for at, n in enumerate(counts)})


def test_a_bad_row_is_counted_when_the_output_is_there(rank: Rank) -> None:
    """The device has counted, and nothing waits for it before."""
    output = rank.launch(DeviceOutput(output=nans(0, 5)))
    assert rank.stats.nan_rows == 0
    output.get_output()
    assert rank.stats.nan_rows == 1
    assert not rank.stats.fatal_error


def test_a_step_without_a_sound_row_ends_the_rank(rank: Rank) -> None:
    """Its requests are suspects of the running step, and the cause is on file before it raises."""
    output = rank.launch(DeviceOutput(output=nans(*[1] * LOST_ROWS)), "a", "b")
    with pytest.raises(NanLogitsError):
        output.get_output()
    assert rank.stats.fatal_error.startswith("NanLogitsError: NaNs detected in logits")
    assert running(rank) == ["a", "b"]


def test_so_does_one_whose_output_is_there_at_once(rank: Rank) -> None:
    """Without asynchronous scheduling."""
    rank.worker.sampled.append(nans(*[1] * LOST_ROWS))
    rank.execute()
    with pytest.raises(NanLogitsError):
        rank.sample()
    assert rank.stats.fatal_error.startswith("NanLogitsError: NaNs detected in logits")


def test_only_the_rank_that_answers_counts(tmp_path: Path) -> None:
    """The others compute the same rows."""
    with followed_rank(tmp_path, rank=1, tensor_parallel_size=2) as rank:
        rank.worker.sampled.append(nans(1, 1))
        rank.execute()
        rank.sample()
        assert rank.stats.nan_rows == 0


def test_so_does_one_of_a_model_that_samples_nothing(tmp_path: Path) -> None:
    """`execute_model` has the output."""
    with followed_rank(tmp_path, runner_type="pooling") as rank:
        rank.worker.executed.append(DeviceOutput(DEVICE_SECONDS))
        output = rank.execute()
        assert rank.stats.steps == 0
        output.get_output()
        assert rank.stats.recent_steps[0].duration_seconds >= DEVICE_SECONDS


def test_a_step_that_was_launched_behind_another_begins_when_that_ends(rank: Rank) -> None:
    """The device has one at a time: the times of both together are those that passed."""
    first = rank.launch(DeviceOutput(DEVICE_SECONDS), tokens=1)
    second = rank.launch(DeviceOutput(), tokens=2)
    first.get_output()
    assert rank.stats.running_step_started_seconds is not None
    second.get_output()
    one, two = rank.stats.recent_steps
    assert (one.scheduled_tokens, two.scheduled_tokens) == (1, 2)
    assert two.started_seconds == pytest.approx(one.started_seconds + one.duration_seconds)
    assert rank.stats.running_step_started_seconds is None


def test_a_rank_that_returns_no_output_keeps_the_launch(tmp_path: Path) -> None:
    """One of a pipeline's earlier stages, which samples nothing."""
    with followed_rank(tmp_path, pipeline_parallel_size=2) as rank:
        assert rank.execute() is None
        assert rank.stats.steps == 0
        assert rank.sample() is None
        assert rank.stats.steps == 1
        assert not suspects(rank)


def test_a_rank_whose_output_nobody_asks_for_keeps_the_launch(tmp_path: Path) -> None:
    """vLLM takes the answer of one rank of those that compute the same."""
    with followed_rank(tmp_path, rank=1, tensor_parallel_size=2) as rank:
        rank.worker.sampled.append(output := DeviceOutput())
        rank.execute()
        assert rank.sample() is output
        assert rank.stats.steps == 1


def test_an_output_that_is_there_at_once_ends_its_step(rank: Rank) -> None:
    """Without asynchronous scheduling."""
    rank.worker.sampled.append("tokens")
    rank.execute()
    assert rank.stats.steps == 0
    assert rank.sample() == "tokens"
    assert rank.stats.steps == 1


def test_a_step_that_nobody_goes_on_with_is_ended_by_the_next(rank: Rank) -> None:
    """Its launch is all that is known of it, and the time until the next is none of its own."""
    rank.execute(tokens=3)
    output = rank.launch(DeviceOutput(DEVICE_SECONDS), tokens=4)
    assert [step.scheduled_tokens for step in rank.stats.recent_steps] == [3]
    output.get_output()
    assert [step.scheduled_tokens for step in rank.stats.recent_steps] == [3, 4]


def test_outputs_that_nobody_asks_for_are_not_kept(rank: Rank) -> None:
    """What was launched long ago counts as ended."""
    for _ in range(MAX_LAUNCHED + 5):
        rank.launch(DeviceOutput())
    assert rank.stats.steps == 5


def test_what_an_output_raises_is_written_down(rank: Rank) -> None:
    """A kernel fails long after its launch; its requests stay the suspects."""
    output = rank.launch(DeviceOutput(error=RuntimeError("CUDA error: misaligned")), "guilty")
    with pytest.raises(RuntimeError, match="misaligned"):
        output.get_output()
    assert rank.stats.fatal_error == "RuntimeError: CUDA error: misaligned"
    assert rank.stats.steps == 0
    assert suspects(rank) == ["guilty"]


def test_what_else_vllm_asks_of_an_output_is_answered(rank: Rank) -> None:
    """0.33 saves what went through a KV connector; its class has another abstract method."""
    output = rank.launch(DeviceOutput())
    assert isinstance(output, AsyncModelRunnerOutput)
    assert output.get_kv_connector_output() == "KV cache"
    assert AsyncModelRunnerOutput not in type(output).__mro__


def test_requests_are_suspects_until_their_output_is_there(rank: Rank) -> None:
    """What crashes the device does so after the launch."""
    first, second = rank.launch(DeviceOutput(), "one"), rank.launch(DeviceOutput(), "two")
    assert suspects(rank) == running(rank) == ["two", "one"]
    first.get_output()
    assert suspects(rank) == ["two", "one"]
    assert running(rank) == ["two"]
    second.get_output()
    assert suspects(rank) == []


def test_of_steps_that_end_out_of_turn_none_is_forgotten(rank: Rank) -> None:
    """One that nobody went on with is ended by the next, while that before it still runs."""
    first = rank.launch(DeviceOutput(), "one")
    rank.execute("dropped")
    last = rank.launch(DeviceOutput(), "three")
    assert "three" in running(rank)
    first.get_output()
    assert running(rank) == ["three"]
    last.get_output()
    assert suspects(rank) == []


class Pipeline:
    """Two stages behind vLLM's executor interface; the first output of the last one fails."""

    def __init__(self, stages: tuple[Rank, Rank]) -> None:
        self._stages = stages

    def execute_model(self, said: Any, **_: bool) -> None:
        """Launch a step at both stages."""
        for stage in self._stages:
            stage.hooks.step(said, lambda: None)

    def sample_tokens(self, *_: Any, **__: bool) -> AsyncOutputFuture:
        """The answer of the last stage."""
        first, last = self._stages
        first.sample()
        last.worker.sampled.append(DeviceOutput(error=RuntimeError("CUDA error")))
        return AsyncOutputFuture(last.sample(), True)


def test_each_step_that_vllm_has_in_flight_over_a_pipeline_is_suspect(tmp_path: Path) -> None:
    """EngineCore's own loop launches three before it asks for an output, which never comes."""
    names = (f"step {number}" for number in count(1))
    core = SimpleNamespace(
        batch_queue=deque(),
        batch_queue_size=steps_in_flight(2),
        scheduler=SimpleNamespace(
            has_requests=lambda: True,
            schedule=lambda _: launched(next(names)),
            get_grammar_bitmask=lambda _: None,
        ),
        is_mm_encoder_only=False,
        is_pooling_model=False,
        _should_throttle_prefills=lambda: False,
        log_error_detail=lambda _: nullcontext(),
        capture_iteration_details=lambda _: nullcontext(),
    )
    with (
        followed_rank(tmp_path, pipeline_parallel_size=2) as first,
        followed_rank(tmp_path, rank=1, pipeline_parallel_size=2) as last,
    ):
        core.model_executor = Pipeline((first, last))
        for _ in range(core.batch_queue_size - 1):
            EngineCore.step_with_batch_queue(core)
        with pytest.raises(RuntimeError, match="CUDA error"):
            EngineCore.step_with_batch_queue(core)
    assert suspects(last) == running(last) == ["step 3", "step 2", "step 1"]


def launched(name: str) -> Any:
    """A step as EngineCore has it of its scheduler."""
    said = scheduled(name)
    said.pending_structured_output_tokens = False
    return said


def test_an_output_that_never_comes_is_a_stall(rank: Rank) -> None:
    """The step before it is the last that has ended, however many were launched."""
    rank.launch(DeviceOutput(DEVICE_SECONDS)).get_output()
    hanging = DeviceOutput()
    hanging.may_end.clear()
    output = rank.launch(hanging)
    waiting = threading.Thread(target=output.get_output)
    waiting.start()
    try:
        assert hanging.is_asked.wait(WAIT_SECONDS)
        stats = rank.stats
        assert stats.steps == 1
        ended = stats.last_step_ended_seconds
        assert ended is not None
        assert _is_stalled(ended, ended + 120.5)
    finally:
        hanging.may_end.set()
        waiting.join(WAIT_SECONDS)
    assert rank.stats.steps == 2


def test_a_step_as_slow_as_one_that_was_proven_is_no_stall(rank: Rank) -> None:
    """The proof saw how long the device takes, and not how long a launch does."""
    rank.launch(DeviceOutput(DEVICE_SECONDS)).get_output()
    stats = rank.stats
    slowest = max(step.duration_seconds for step in stats.recent_steps)
    ended = stats.last_step_ended_seconds
    assert ended is not None
    now = ended + 2 * DEVICE_SECONDS
    assert not _is_stalled(ended, now, timeout_seconds=DEVICE_SECONDS / 2, slowest=slowest)
    assert _is_stalled(ended, now, timeout_seconds=DEVICE_SECONDS / 2)


def _is_stalled(
    ended: float, now: float, *, timeout_seconds: float = 120.0, slowest: float = 0.0
) -> bool:
    """Whether an engine with requests is stalled that ended no step since."""
    detector = StallDetector(timeout_seconds)
    snapshot = Snapshot(ended, ended, {0: ended}, {}, {})
    assert not detector.stall_reason(snapshot, slowest)
    while snapshot.now_seconds < now:  # a look is never late
        snapshot = Snapshot(min(now, snapshot.now_seconds + 1.0), ended, {0: ended}, {}, {})
        if detector.stall_reason(snapshot, slowest):
            return True
    return False
