"""vLLM's V2 runner, the default on GPUs, under our hooks: its own methods on stubs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.elastic_ep import elastic_execute
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.mm_encoder_model_runner import MMEncoderModelRunner

from gpu_paths.fake_memory import GIB, FakeMemory
from gpu_paths.hooked_worker import FakeWorker, first_runner, followed, manager, stats
from holdfast.workspace.plan import MIB

Capture = Callable[[], object]


@pytest.fixture(name="memory", autouse=True)
def memory_fixture(monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    """Of an H100, on which nothing else runs."""
    memory = FakeMemory()
    memory.install(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(model_runner, "create_lora_capture_hook", lambda *_: None)
    return memory


def second_runner(
    capture: Capture, draft: Capture | None = None, *, has_graphs: bool = True
) -> Any:
    """One with vLLM's own `capture_model`, whose graphs are captured by `capture` and `draft`."""
    speculator = SimpleNamespace(capture=draft) if draft else None
    runner = SimpleNamespace(
        _draft_workspace_lane=1,
        adaptive_verification=None,
        attn_groups=None,
        block_tables=None,
        cudagraph_manager=SimpleNamespace(
            needs_capture=lambda: has_graphs, capture=lambda *_given, **_named: capture()
        ),
        input_buffers=None,
        intermediate_tensors=None,
        kv_cache_config=None,
        kv_connector=SimpleNamespace(reset_capture_state=lambda: None),
        lora_config=None,
        maybe_setup_dummy_loras=lambda _: nullcontext(),
        model=torch.nn.Module(),
        model_memory_usage=0,
        model_state=SimpleNamespace(
            supports_mm_inputs=False, capture_inner_cudagraphs=lambda *_: None
        ),
        pcp_manager=None,
        speculator=speculator,
        use_aux_hidden_state_outputs=False,
    )
    for name in ("capture_model", "needs_cudagraph_capture"):
        setattr(runner, name, MethodType(getattr(model_runner.GPUModelRunner, name), runner))
    return runner


def encoder_runner(capture: Capture, *, has_graphs: bool) -> Any:
    """vLLM's runner for encoders alone, with its own methods around graphs."""
    encoder = SimpleNamespace(
        capture=capture,
        cudagraph_manager=SimpleNamespace(get_num_graphs_to_capture=lambda: 1),
        has_cudagraph=lambda: has_graphs,
    )
    state = SimpleNamespace(encoder_runner=encoder, supports_mm_inputs=True)
    runner = SimpleNamespace(model_memory_usage=0, model_state=state)
    for name in ("capture_model", "needs_cudagraph_capture"):
        setattr(runner, name, MethodType(getattr(MMEncoderModelRunner, name), runner))
    return runner


def ask(size_bytes: int) -> torch.Tensor:
    """What a layer does in a step."""
    (view,) = manager().get_simultaneous(((size_bytes,), torch.uint8))
    return view


def started(worker: FakeWorker) -> None:
    """The start of vLLM's worker, to its lock."""
    worker.load_model()
    worker.determine_available_memory()
    worker.compile_or_warm_up_model()


def test_graphs_are_captured_sealed_and_locked_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: FakeMemory
) -> None:
    """Sealed before the first, locked after the last, and the ledger has what they take."""
    seen = []

    def capture() -> None:
        seen.append((manager().is_sealed, manager().is_locked()))
        memory.free_bytes -= GIB

    with followed(tmp_path, monkeypatch, runner=second_runner(capture)) as worker:
        started(worker)
        assert seen == [(True, False)]
        assert (manager().is_sealed, manager().is_locked()) == (True, True)
        assert stats(tmp_path).memory["cuda_graphs"] == GIB


@pytest.mark.parametrize(
    ("runner", "is_sealed"),
    [
        (first_runner(CUDAGraphMode.PIECEWISE), True),
        (first_runner(CUDAGraphMode.NONE), False),
        (second_runner(lambda: None), True),
        (second_runner(lambda: None, has_graphs=False), False),
        (encoder_runner(lambda: None, has_graphs=True), True),
        (encoder_runner(lambda: None, has_graphs=False), False),
    ],
    ids=["v1", "v1-none", "v2", "v2-none", "encoder", "encoder-none"],
)
def test_only_a_graph_seals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, runner: Any, is_sealed: bool
) -> None:
    """vLLM asks for graphs also where it is told to capture none; the lock comes in either case."""
    with followed(tmp_path, monkeypatch, runner=runner) as worker:
        started(worker)
        assert (manager().is_sealed, manager().is_locked()) == (is_sealed, True)


def test_a_later_graph_that_asks_for_more_leaves_the_earlier_its_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each graph has a warm-up of its own shape, in which it may grow."""
    views = []

    def capture() -> None:
        views.extend([ask(MIB), ask(4 * MIB)])

    with followed(tmp_path, monkeypatch, runner=second_runner(capture)) as worker:
        started(worker)
        told = stats(tmp_path)
        assert told.retired_bytes == views[0].untyped_storage().nbytes() == 2 * MIB
        assert not sum(told.rejections.values())


def test_graphs_of_a_profile_leave_the_manager_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are thrown away before the KV cache is allocated."""
    with followed(tmp_path, monkeypatch, runner=second_runner(lambda: None)) as worker:
        worker.load_model()
        worker.model_runner.capture_model(profile_only=True)
        assert (manager().is_sealed, manager().is_locked()) == (False, False)
        assert "cuda_graphs" not in stats(tmp_path).memory


def test_a_stream_that_is_captured_does_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph would hold an allocation of its own capture, and the start says whose it was."""

    def capture() -> None:
        manager()._gate.is_capturing = lambda: True
        ask(MIB)

    with followed(tmp_path, monkeypatch, runner=second_runner(capture)) as worker:
        with pytest.raises(AssertionError, match="being captured into a graph"):
            started(worker)
        told = stats(tmp_path)
        assert told.rejections["scratch"] == 1
        assert "test_v2_runner.py" in told.fatal_error


def test_graphs_of_a_draft_have_its_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM enters it around the speculator, as in a step."""
    runner = second_runner(lambda: None, partial(ask, 3 * MIB))
    with followed(tmp_path, monkeypatch, runner=runner, lanes=2) as worker:
        started(worker)
        assert manager().slot_sizes() == {(0, 0): 0, (0, 1): 4 * MIB}


class Pool:
    """Stands for vLLM's allocator for sleep mode: what is made while one of its pools is used."""

    uses = 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """vLLM's `use_memory_pool("workspace")`."""
        self.uses += 1
        yield


def test_what_grows_after_the_lock_sleeps_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every buffer is made in the pool that vLLM maps again at wake-up."""
    pool, calls = Pool(), list[object]()
    runner = second_runner(partial(ask, 2 * MIB))
    with followed(tmp_path, monkeypatch, runner=runner, alloc_context=pool.used) as worker:
        started(worker)
        ask(4 * MIB)
        sleeping: Any = worker
        sleeping.sleep_mode_backend = SimpleNamespace(suspend=calls.append, resume=calls.append)
        worker.vllm_config.model_config.enable_nccl_comm_suspend = False
        sleeping._sleep_saved_parameters = sleeping._sleep_saved_buffers = {}
        sleeping._sleep_saved_draft_buffers = {}
        sleeping.synchronize_device = lambda: None
        Worker.sleep(sleeping, 1)
        Worker.wake_up(sleeping, None)
        ask(8 * MIB)
        assert calls == [1, None]
        assert pool.uses == 3
        assert stats(tmp_path).retired_bytes == 6 * MIB


def test_an_elastic_engine_warms_up_open_and_is_locked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM drops the graphs, unlocks, captures again and locks; the new size is that of both."""
    sizes = iter([MIB, 4 * MIB])
    seen = []

    def capture() -> None:
        ask(next(sizes))
        seen.append(manager().is_locked())

    runner = second_runner(capture)
    runner.max_num_tokens = 8
    runner._dummy_run = lambda *_given, **_named: None
    executor: Any = SimpleNamespace(
        _can_reuse_fused_moe_kernel=lambda: False,
        _release_cuda_graphs=lambda: None,
        _suppress_eplb=nullcontext,
    )
    monkeypatch.setattr(elastic_execute, "get_ep_all2all_manager", lambda: None)
    monkeypatch.setattr(elastic_execute, "preserve_serving_state", lambda _: nullcontext())
    with followed(tmp_path, monkeypatch, runner=runner) as worker:
        started(worker)
        executor.worker = worker
        rebuilt: Any = worker
        rebuilt.use_v2_model_runner, rebuilt.randomize_dummy_inputs = True, False
        elastic_execute.ElasticEPScalingExecutor.warm_and_capture(executor)
        assert seen == [False, False]
        assert manager().is_locked()
        assert manager().slot_sizes() == {(0, 0): 4 * MIB}
        assert not stats(tmp_path).fatal_error
