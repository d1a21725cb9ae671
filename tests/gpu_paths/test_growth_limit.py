"""How much may workspaces grow after the lock? What vLLM itself takes for free on each device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vllm.utils.mem_utils import MemorySnapshot

from gpu_paths.fake_memory import DEVICE, GIB, FakeMemory, gb10
from gpu_paths.hooked_worker import (
    FakeWorker,
    config,
    first_runner,
    followed,
    growth_limit_bytes,
    manager,
    stats,
)
from holdfast.host_memory.guard import LARGEST_MARKS, Judge, Level, ample_bytes
from holdfast.host_memory.reader import Bound
from holdfast.workspace.memory_ledger import MARGIN_BYTES, is_unified_memory, read_device
from holdfast.workspace.plan import MIB
from workspace_managers import view

NO_LIMIT_OF_ITS_OWN_BYTES = 200 * GIB
"""A reservation whose default limit is larger than any of these devices."""
KEPT_BYTES = ample_bytes(Bound(gb10().total_bytes, 0), None)
"""What the guard needs of a GB10's memory, by its own marks."""


def start(worker: FakeWorker) -> None:
    """From the weights to the lock."""
    worker.load_model()
    worker.determine_available_memory()
    worker.compile_or_warm_up_model()


BOARDS = [FakeMemory(), gb10(page_cache_bytes=0), gb10(page_cache_bytes=49 * GIB)]


@pytest.mark.parametrize("memory", BOARDS)
def test_a_reading_is_vllms_snapshot(memory: FakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU that the driver, torch and the host describe."""
    memory = replace(memory, reserved_bytes=9 * GIB, allocated_bytes=7 * GIB, peak_bytes=8 * GIB)
    memory.install(monkeypatch)
    device = torch.device("cuda:0")
    reading, snapshot = read_device(device), MemorySnapshot(device=device)
    assert reading.free_bytes == snapshot.free_memory
    assert reading.total_bytes == snapshot.total_memory
    assert reading.used_bytes == snapshot.cuda_memory
    assert reading.cached_bytes == snapshot.torch_memory - snapshot.torch_allocated
    assert reading.transient_peak_bytes == snapshot.torch_peak - snapshot.torch_allocated


@pytest.mark.parametrize("memory", BOARDS)
def test_the_limit_is_what_vllm_takes_for_free(
    memory: FakeMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less what must stay: on a GB10, where the page cache is free, the guard needs more of it."""
    memory.install(monkeypatch)
    kept_bytes = KEPT_BYTES if memory.is_integrated else MARGIN_BYTES
    with followed(
        tmp_path,
        monkeypatch,
        floor_bytes=NO_LIMIT_OF_ITS_OWN_BYTES,
        kept_host_bytes=KEPT_BYTES,
    ) as worker:
        start(worker)
        free_bytes = MemorySnapshot(device=DEVICE).free_memory
        assert growth_limit_bytes() == free_bytes - kept_bytes
        assert stats(tmp_path).growth_limit_bytes == growth_limit_bytes()


@pytest.mark.parametrize(
    ("available_bytes", "limit_bytes"), [(3 * GIB, 0), (6 * GIB, 6 * GIB - KEPT_BYTES)]
)
def test_a_granted_growth_leaves_the_guard_of_the_host_nothing_to_do(
    available_bytes: int, limit_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workspace never shrinks, so an engine that takes too much ends, or stays on hold."""
    memory = gb10(available_bytes=available_bytes)
    memory.install(monkeypatch)
    with followed(
        tmp_path, monkeypatch, floor_bytes=NO_LIMIT_OF_ITS_OWN_BYTES, kept_host_bytes=KEPT_BYTES
    ) as worker:
        start(worker)
        left_bytes = available_bytes - growth_limit_bytes()
        # What is above the first mark before a growth is above it afterwards.
        if available_bytes > LARGEST_MARKS[0]:
            found = Judge(None).judge([Bound(memory.total_bytes, left_bytes)])
            assert found is not None
            assert found.level is Level.AMPLE
        assert growth_limit_bytes() == limit_bytes


def test_without_a_guard_a_gb10_keeps_as_much_as_any_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing ends the engine before the host is full."""
    memory = gb10()
    memory.install(monkeypatch)
    with followed(tmp_path, monkeypatch, floor_bytes=NO_LIMIT_OF_ITS_OWN_BYTES) as worker:
        start(worker)
        assert growth_limit_bytes() == memory.available_bytes - MARGIN_BYTES


def test_a_rank_that_may_no_longer_grow_reports_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `deny` it may grow until the probe has measured, and not after a later lock either."""
    FakeMemory().install(monkeypatch)
    with followed(tmp_path, monkeypatch, floor_bytes=2 * MIB) as worker:
        worker.hooks.set_growth("alongside")
        assert stats(tmp_path).growth_limit_bytes is None
        start(worker)
        assert stats(tmp_path).growth_limit_bytes == growth_limit_bytes()
        worker.hooks.set_growth("deny")
        assert stats(tmp_path).growth_limit_bytes is None
        worker.compile_or_warm_up_model()
        assert stats(tmp_path).growth_limit_bytes is None
        worker.hooks.set_growth("alongside")
        assert stats(tmp_path).growth_limit_bytes == growth_limit_bytes()


def test_a_gb10_with_a_full_page_cache_still_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver says that nothing is free, and it is."""
    gb10(page_cache_bytes=50 * GIB).install(monkeypatch)
    with followed(tmp_path, monkeypatch, floor_bytes=2 * MIB) as worker:
        start(worker)
        assert view(manager(), 100 * MIB).numel() == 100 * MIB
    assert stats(tmp_path).growths["locked"] == 1


@pytest.mark.parametrize("memory", [FakeMemory(), gb10(page_cache_bytes=49 * GIB)])
def test_the_ledger_counts_as_vllm_does(
    memory: FakeMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache is nobody's memory, so that it does not stand under `non_torch`."""
    memory.install(monkeypatch)
    with followed(tmp_path, monkeypatch) as worker:
        worker.model_runner.model_memory_usage = 5 * GIB
        start(worker)
        in_use_bytes = MemorySnapshot(device=DEVICE).cuda_memory
    assert stats(tmp_path).memory["non_torch"] == in_use_bytes - 5 * GIB
    assert stats(tmp_path).memory["total"] == memory.total_bytes


@pytest.mark.parametrize("is_integrated", [True, False])
def test_the_rank_says_whether_its_memory_is_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_integrated: bool
) -> None:
    """By the property that vLLM's platform reads."""
    FakeMemory(is_integrated=is_integrated).install(monkeypatch)
    assert is_unified_memory(DEVICE) == is_integrated
    with followed(tmp_path, monkeypatch):
        assert stats(tmp_path).is_unified_memory == is_integrated


@pytest.mark.parametrize(
    ("cached_bytes", "claimed_bytes"), [(0, 8 * GIB), (3 * GIB, 5 * GIB), (9 * GIB, 0)]
)
def test_the_limit_leaves_the_activations_their_peak(
    cached_bytes: int, claimed_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the lock it looks free, except what torch's cache still holds of it."""
    memory = FakeMemory(allocated_bytes=20 * GIB, reserved_bytes=20 * GIB + cached_bytes)
    memory.install(monkeypatch)
    with followed(tmp_path, monkeypatch, floor_bytes=NO_LIMIT_OF_ITS_OWN_BYTES) as worker:
        # As vLLM's profile leaves them: the graphs are captured by the time of the lock.
        worker.peak_activation_memory = 10 * GIB
        worker.cudagraph_memory_estimate = 2 * GIB
        start(worker)
        assert growth_limit_bytes() == memory.free_bytes - claimed_bytes - MARGIN_BYTES


def test_the_activations_get_nothing_from_the_pool_of_the_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch holds it and no tensor uses it, but no step outside a graph can have it."""
    memory = FakeMemory(allocated_bytes=20 * GIB, reserved_bytes=20 * GIB)
    memory.install(monkeypatch)

    def capture() -> int:
        memory.reserved_bytes += 3 * GIB
        memory.free_bytes -= 3 * GIB
        return 3 * GIB

    runner = first_runner()
    runner.capture_model = capture
    with followed(
        tmp_path, monkeypatch, floor_bytes=NO_LIMIT_OF_ITS_OWN_BYTES, runner=runner
    ) as worker:
        worker.peak_activation_memory = 10 * GIB
        worker.cudagraph_memory_estimate = 2 * GIB
        start(worker)
        assert growth_limit_bytes() == memory.free_bytes - 8 * GIB - MARGIN_BYTES


def test_the_peak_is_measured_where_vllm_measures_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a given KV cache size vLLM runs the largest step, and looks at nothing."""
    memory = FakeMemory(allocated_bytes=20 * GIB, reserved_bytes=20 * GIB, peak_bytes=70 * GIB)
    memory.install(monkeypatch)

    def profile() -> None:
        memory.peak_bytes = memory.allocated_bytes + 4 * GIB

    given = config(kv_cache_memory_bytes=900 * GIB)
    with followed(
        tmp_path, monkeypatch, vllm_config=given, floor_bytes=NO_LIMIT_OF_ITS_OWN_BYTES
    ) as worker:
        worker.profile = profile
        start(worker)
        assert growth_limit_bytes() == memory.free_bytes - 4 * GIB - MARGIN_BYTES
    assert memory.peak_resets == 1
    assert stats(tmp_path).memory["activation_peak"] == 4 * GIB
