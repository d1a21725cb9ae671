"""What vLLM's layers rely on holds for vLLM's manager and, unbound, for ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker import gpu_worker, workspace

from holdfast.workspace.manager import WorkspaceManager, bound_class
from holdfast.workspace.reservers import reserve_workspace

VLLMS_MANAGER = WorkspaceManager.__bases__[0]
CPU = torch.device("cpu")
BYTES = torch.uint8
KIB = 1024


@pytest.fixture(params=[VLLMS_MANAGER, WorkspaceManager], ids=["vllm", "holdfast"])
def manager_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each class in vLLM's place; on a torch without accelerator vLLM's needs a no-op."""
    if request.param is VLLMS_MANAGER:
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(workspace, "WorkspaceManager", request.param)
    return request.param


BROKEN_IN_VLLM = pytest.mark.xfail(raises=AssertionError, strict=True)


@pytest.fixture(
    params=[pytest.param(VLLMS_MANAGER, marks=BROKEN_IN_VLLM), WorkspaceManager],
    ids=["vllm", "holdfast"],
)
def server_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each class as an engine has it: ours is bound, and vLLM's dies of what the test does."""
    kind = request.param
    if kind is VLLMS_MANAGER:
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    else:
        kind = bound_class(lambda manager: manager.bind(None, "deny"))
    monkeypatch.setattr(workspace, "WorkspaceManager", kind)
    return kind


@pytest.fixture
def ubatch(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this thread that of an ubatch."""
    active = [0]
    monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda: active[0])
    return lambda index: active.__setitem__(0, index)


@pytest.fixture(autouse=True)
def no_manager_left() -> Iterator[None]:
    """No test sees the manager of another."""
    yield
    workspace.reset_workspace_manager()


def made_by_vllm(ubatches: int = 1, lanes: int = 1) -> Any:
    workspace.init_workspace_manager(CPU, ubatches, lanes)
    return workspace.current_workspace_manager()


def only_view(manager: Any, size_bytes: int) -> torch.Tensor:
    (view,) = manager.get_simultaneous(((size_bytes,), BYTES))
    return view


def test_two_lanes_are_for_dspark_alone() -> None:
    """vLLM asks for a second lane only with the V2 runner and DSpark speculation."""

    def lanes(*, is_second_runner: bool, method: str) -> Any:
        speculation = SimpleNamespace(use_dspark=lambda: method == "dspark")
        config = SimpleNamespace(speculative_config=speculation)
        return gpu_worker._num_workspace_lanes(config, is_second_runner)

    without = SimpleNamespace(speculative_config=None)
    assert gpu_worker._num_workspace_lanes(without, use_v2_model_runner=True) == 1
    assert lanes(is_second_runner=True, method="dspark") == 2
    assert lanes(is_second_runner=True, method="eagle3") == 1
    assert lanes(is_second_runner=False, method="dspark") == 1


@pytest.mark.usefixtures("manager_class")
def test_lanes_do_not_alias_and_the_lane_is_restored() -> None:
    """A lane has memory of its own, and leaving it gives the former lane back."""
    manager = made_by_vllm(ubatches=2, lanes=2)
    assert manager._current_workspaces == [None] * 4
    outer = only_view(manager, 512).fill_(1)
    with workspace.use_workspace_lane(1):
        inner = only_view(manager, 256).fill_(2)
        assert only_view(manager, 8).data_ptr() == inner.data_ptr()
    assert only_view(manager, 8).data_ptr() == outer.data_ptr()
    assert bool((outer == 1).all())
    assert [buffer.numel() for buffer in manager._current_workspaces[:2]] == [512, 256]
    assert manager._current_workspaces[2:] == [None, None]


@pytest.mark.usefixtures("manager_class")
def test_lanes_compose_with_ubatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each (ubatch, lane) pair is a slot, at ubatch x lanes + lane."""
    manager = made_by_vllm(ubatches=2, lanes=2)
    for ubatch in range(2):
        monkeypatch.setattr(workspace, "dbo_current_ubatch_id", partial(int, ubatch))
        for lane in range(2):
            with workspace.use_workspace_lane(lane):
                only_view(manager, 256 * (1 + 2 * ubatch + lane))
    assert [buffer.numel() for buffer in manager._current_workspaces] == [256, 512, 768, 1024]
    assert len({buffer.data_ptr() for buffer in manager._current_workspaces}) == 4


@pytest.mark.usefixtures("manager_class")
def test_the_lock_stops_growth_until_it_is_opened() -> None:
    """A locked manager serves what fits, refuses more in vLLM's words, and grows once unlocked."""
    manager = made_by_vllm()
    address = only_view(manager, 1024 * 1024).data_ptr()
    workspace.lock_workspace()
    assert manager.is_locked()
    assert only_view(manager, 1024 * 1024).data_ptr() == address
    assert only_view(manager, 1000).data_ptr() == address
    with pytest.raises(AssertionError) as refused:
        only_view(manager, 2 * 1024 * 1024)
    text = str(refused.value)
    assert text.startswith("Workspace is locked but allocation from 'test_vllm_workspace.py:")
    assert text.endswith(
        ":only_view' requires 2.00 MB, current size is 1.00 MB. "
        "Workspace growth is not allowed after locking."
    )
    workspace.unlock_workspace()
    assert not manager.is_locked()
    assert only_view(manager, 2 * 1024 * 1024).numel() == 2 * 1024 * 1024


def test_lanes_are_validated(manager_class: Any) -> None:
    """No manager without a lane, no negative lane, no lane beyond those configured."""
    with pytest.raises(ValueError, match="num_lanes must be at least one"):
        manager_class(CPU, num_lanes=0)
    with pytest.raises(ValueError, match="non-negative"), workspace.use_workspace_lane(-1):
        pass
    manager = made_by_vllm()
    only_view(manager, 8)
    with (
        workspace.use_workspace_lane(1),
        pytest.raises(RuntimeError, match=r"lane 1 is not configured; manager has 1 lane"),
    ):
        only_view(manager, 8)


@pytest.mark.usefixtures("manager_class")
def test_persistent_resources_are_lazy_and_isolated(ubatch: Callable[[int], None]) -> None:
    """A factory runs once for each slot and key, at the first request, and no slot shares."""
    manager = made_by_vllm(ubatches=2, lanes=2)
    made: list[torch.Tensor] = []

    def factory() -> torch.Tensor:
        made.append(torch.zeros(8))
        return made[-1]

    for index in range(4):
        ubatch(index // 2)
        with workspace.use_workspace_lane(index % 2):
            assert len(made) == index
            resource = manager.get_persistent_resource("key", factory).fill_(index)
            assert manager.get_persistent_resource("key", factory) is resource is made[index]
    assert [tensor.tolist() for tensor in made] == [[float(index)] * 8 for index in range(4)]


@pytest.mark.usefixtures("manager_class")
def test_the_lock_holds_for_the_resources_of_each_slot() -> None:
    """What one slot made before the lock is missing in another until it is opened again."""
    manager = made_by_vllm(lanes=2)
    kept = manager.get_persistent_resource("key", object)
    manager.lock()
    assert manager.get_persistent_resource("key", object) is kept
    for lane, key in ((0, "other"), (1, "key")):
        with workspace.use_workspace_lane(lane), pytest.raises(AssertionError) as refused:
            manager.get_persistent_resource(key, pytest.fail)
        assert str(refused.value) == (
            f"Workspace is locked but {key!r} was not allocated during warmup for the current "
            "ubatch and lane."
        )
    manager.unlock()
    with workspace.use_workspace_lane(1):
        assert manager.get_persistent_resource("key", object) is not kept
    assert manager.get_persistent_resource("key", object) is kept


@pytest.mark.usefixtures("manager_class")
def test_a_persistent_tensor_keeps_its_content_and_its_shape() -> None:
    """It is zeroed once only, no scratch lies over it, and under its key it never changes."""
    manager = made_by_vllm()
    tensor = manager.get_persistent("key", (4,), torch.int32, zero_init=True)
    assert tensor.tolist() == [0, 0, 0, 0]
    tensor.fill_(7)
    only_view(manager, KIB).zero_()
    assert manager.get_persistent("key", (4,), torch.int32, zero_init=True).tolist() == [7] * 4
    with pytest.raises(ValueError, match="requested shape"):
        manager.get_persistent("key", (5,), torch.int32)
    with pytest.raises(ValueError, match="requested shape"):
        manager.get_persistent("key", (4,), torch.float32)
    manager.lock()
    assert manager.get_persistent("key", (4,), torch.int32) is tensor
    assert tensor.tolist() == [7] * 4
    with pytest.raises(AssertionError, match="was not allocated during warmup"):
        manager.get_persistent("other", (4,), torch.int32)


@pytest.mark.usefixtures("manager_class")
def test_views_are_aligned_and_follow_each_other() -> None:
    """The views of one call lie behind each other, each at a multiple of 256 bytes."""
    first, second = made_by_vllm().get_simultaneous(((3,), torch.int32), ([2, 5], torch.bfloat16))
    assert second.shape == (2, 5)
    assert second.data_ptr() - first.data_ptr() == 256


@pytest.mark.usefixtures("manager_class")
def test_ubatch_threads_have_slots_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of two ubatches never get the same memory."""
    manager = made_by_vllm(ubatches=2)
    ubatch_of: dict[int, int] = {}
    monkeypatch.setattr(
        workspace, "dbo_current_ubatch_id", lambda: ubatch_of[threading.get_ident()]
    )
    views: dict[int, torch.Tensor] = {}

    def work(ubatch: int) -> None:
        ubatch_of[threading.get_ident()] = ubatch
        views[ubatch] = only_view(manager, 4096)

    threads = [threading.Thread(target=work, args=(ubatch,)) for ubatch in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert views[0].data_ptr() != views[1].data_ptr()


@pytest.mark.usefixtures("server_class")
def test_the_second_ubatch_serves_what_the_first_does(ubatch: Callable[[int], None]) -> None:
    """#41858: warm-up was larger in the first, and a request is larger in the second."""
    manager = made_by_vllm(ubatches=2)
    for index, size_bytes in enumerate((8 * KIB, 4 * KIB)):
        ubatch(index)
        only_view(manager, size_bytes)
    workspace.lock_workspace()
    ubatch(1)
    assert only_view(manager, 8 * KIB).numel() == 8 * KIB


@pytest.mark.usefixtures("server_class")
def test_builders_reserve_for_the_ubatch_that_runs(ubatch: Callable[[int], None]) -> None:
    """#58161: the metadata builders of both ubatches run on the main thread, which is slot 0's."""
    manager = made_by_vllm(ubatches=2)
    for index in range(2):  # the forward passes of the warm-up
        ubatch(index)
        only_view(manager, KIB)
    ubatch(0)
    reserve_workspace(((16 * KIB,), BYTES))
    workspace.lock_workspace()
    ubatch(1)
    assert only_view(manager, 16 * KIB).numel() == 16 * KIB


@pytest.mark.usefixtures("server_class")
def test_builders_that_ask_in_slot_0_serve_the_other_ubatch(ubatch: Callable[[int], None]) -> None:
    """#58161, for vLLM's own builders, which know nothing of `reserve_workspace`."""
    manager = made_by_vllm(ubatches=2)
    only_view(manager, 16 * KIB)
    workspace.lock_workspace()
    ubatch(1)
    assert only_view(manager, 16 * KIB).numel() == 16 * KIB


@pytest.mark.usefixtures("server_class")
def test_the_draft_lane_is_reserved_too() -> None:
    """A reservation is made outside of any lane, and the draft model asks in lane 1."""
    manager = made_by_vllm(lanes=2)
    reserve_workspace(((16 * KIB,), BYTES))
    workspace.lock_workspace()
    with workspace.use_workspace_lane(1):
        assert only_view(manager, 16 * KIB).numel() == 16 * KIB
