"""MoE permute scratch, on vLLM's own class."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe import moe_permute_unpermute
from vllm.v1.worker import workspace

from holdfast.records import Rejection
from holdfast.workspace.accounting import tensor_bytes
from holdfast.workspace.manager import WorkspaceManager
from holdfast.workspace.moe_permute import needed_bytes
from holdfast.workspace.plan import MIB, GrowthPolicy
from holdfast.workspace.stats import StatsWriter, read_stats
from workspace_managers import CPU, CapturingManager

EXPERTS = 8
ROWS = 1024
IMPOSSIBLE_ROWS = 1 << 46
ROW_NAMES = ("permuted_idx", "inv_permuted_idx", "token_expert_indices", "sort_workspace")


@pytest.fixture(scope="module", autouse=True)
def sorter() -> Iterator[None]:
    """The size of vLLM's sorter, which only its CUDA extension knows."""
    library = torch.library.Library("_moe_C", "FRAGMENT")
    if not hasattr(torch.ops._moe_C, "moe_permute_sort_workspace_size"):
        library.define("moe_permute_sort_workspace_size(int rows, int experts) -> int")
        library.impl(
            "moe_permute_sort_workspace_size",
            lambda rows, experts: 8 * rows + 64 * experts,
            "CompositeExplicitAutograd",
        )
    yield
    library._destroy()


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[CapturingManager]:
    """The manager of this process, as vLLM's modules find it."""
    monkeypatch.setattr(workspace, "WorkspaceManager", CapturingManager)
    workspace.init_workspace_manager(CPU)
    made = workspace.current_workspace_manager()
    made.bind(None, "deny")
    yield made
    workspace.reset_workspace_manager()


def scratch_of(rows: int) -> Any:
    scratch = moe_permute_unpermute.get_moe_permute_scratch(
        num_experts=EXPERTS, num_local_experts=EXPERTS, device=CPU
    )
    scratch.reserve(rows)
    return scratch


def close(
    manager: WorkspaceManager,
    policy: GrowthPolicy,
    *,
    limit_bytes: int = MIB,
    sealed: bool = True,
) -> None:
    manager.set_policy(policy)
    if sealed:
        manager.seal()
    manager.lock(limit_bytes=limit_bytes)


def rejected(manager: WorkspaceManager) -> Rejection:
    assert manager.accounting.last_rejection is not None
    return manager.accounting.last_rejection


@pytest.mark.parametrize("rows", [1, 1000, ROWS])
def test_the_need_is_what_vllm_allocates(rows: int, manager: WorkspaceManager) -> None:
    """Our arithmetic is that of vLLM's class, which keeps one small tensor from the start."""
    scratch = scratch_of(0)
    before = manager.accounting.persistent_bytes
    scratch.reserve(rows)
    assert manager.accounting.persistent_bytes - before == needed_bytes(scratch, rows)
    assert manager.accounting.persistent_bytes == tensor_bytes([scratch])


def test_deny_refuses_in_vllms_words_and_writes_it_first(
    manager: WorkspaceManager, tmp_path: Path
) -> None:
    """The kind, the caller, the need and what was held are in the file before the engine dies."""
    with StatsWriter(tmp_path, engine=0, rank=0, generation=1) as writer:
        manager.bind(writer, "deny")
        scratch = scratch_of(ROWS)
        held_bytes = tensor_bytes([scratch])
        close(manager, "deny")
        scratch.reserve(ROWS)
        with pytest.raises(AssertionError) as refused:
            scratch.reserve(2 * ROWS)
        stats = read_stats(writer.path)
    assert str(refused.value) == (
        "Workspace is locked but MoE permute scratch requires 2048 rows, current capacity is "
        "1024 rows. Scratch growth is not allowed after locking."
    )
    assert stats is not None
    assert stats.rejections == {"scratch": 0, "persistent": 0, "permute": 1}
    assert stats.last_rejection is not None
    assert stats.last_rejection.kind == "permute"
    assert stats.last_rejection.caller.startswith(f"{Path(__file__).name}:")
    assert stats.last_rejection.needed_bytes == needed_bytes(scratch, 2 * ROWS)
    assert stats.last_rejection.held_bytes == held_bytes
    assert stats.last_rejection.reason == ("needs 2048 rows, holds 1024: the growth policy is deny")
    assert scratch.max_expanded_rows == ROWS


def test_the_caller_is_the_code_that_called_vllms_function(manager: WorkspaceManager) -> None:
    """The caller is the layer, not a frame of vLLM's own module."""
    scratch = scratch_of(ROWS)
    close(manager, "deny")
    with pytest.raises(AssertionError):
        moe_permute_unpermute.moe_prepare_scatter(
            torch.zeros(ROWS, 2, dtype=torch.int32), None, scratch
        )
    assert rejected(manager).caller.startswith(f"{Path(__file__).name}:")


def test_alongside_replaces_the_scratch_and_keeps_the_old(manager: WorkspaceManager) -> None:
    """A graph may hold the old addresses, so they stay valid and count towards the limit."""
    scratch = scratch_of(ROWS)
    old = {name: getattr(scratch, name) for name in ROW_NAMES}
    addresses = {name: tensor.data_ptr() for name, tensor in old.items()}
    kept = [weakref.ref(tensor) for tensor in old.values()]
    del old
    close(manager, "alongside")
    scratch.reserve(2 * ROWS)
    gc.collect()
    assert all(reference() is not None for reference in kept)
    assert {n: r().data_ptr() for n, r in zip(ROW_NAMES, kept, strict=True)} == addresses  # type: ignore[union-attr]  # just checked
    assert scratch.max_expanded_rows == 2 * ROWS
    assert scratch.permuted_idx.numel() == 2 * ROWS
    assert manager.accounting.retired_bytes == needed_bytes(scratch, ROWS)
    assert manager.accounting.persistent_bytes == tensor_bytes([scratch])
    assert manager.accounting.growths["locked"] == 1
    assert manager.is_locked()


def test_alongside_refuses_beyond_the_limit(manager: WorkspaceManager) -> None:
    """The need is known beforehand, so nothing is allocated if it is too large."""
    scratch = scratch_of(ROWS)
    limit_bytes = needed_bytes(scratch, 2 * ROWS)
    close(manager, "alongside", limit_bytes=limit_bytes)
    with pytest.raises(AssertionError, match=r"requires 2049 rows.* growth limit is"):
        scratch.reserve(2 * ROWS + 1)
    assert (scratch.max_expanded_rows, manager.accounting.retired_bytes) == (ROWS, 0)
    scratch.reserve(2 * ROWS)
    assert scratch.max_expanded_rows == 2 * ROWS


@pytest.mark.parametrize("closed", ["warmup", "sealed", "locked"])
def test_the_scratch_never_grows_during_a_capture(closed: str, manager: CapturingManager) -> None:
    """Memory that is allocated then would belong to the graph."""
    scratch = scratch_of(ROWS)
    if closed == "sealed":
        manager.seal()
    if closed == "locked":
        close(manager, "alongside")
    manager.is_in_capture = True
    scratch.reserve(ROWS)
    with pytest.raises(AssertionError, match="captured into a graph"):
        scratch.reserve(2 * ROWS)
    assert rejected(manager).kind == "permute"
    assert scratch.max_expanded_rows == ROWS


def test_growth_between_capture_and_lock_keeps_the_old(manager: WorkspaceManager) -> None:
    """vLLM would silently free what the first graphs hold."""
    scratch = scratch_of(ROWS)
    old = weakref.ref(scratch.sort_workspace)
    manager.seal()
    scratch.reserve(2 * ROWS)
    gc.collect()
    assert old() is not None
    assert manager.accounting.growths["sealed"] == 1


@pytest.mark.parametrize("is_locking", [True, False])
def test_without_a_seal_the_old_scratch_is_freed(
    manager: WorkspaceManager, *, is_locking: bool
) -> None:
    """If nothing was captured, `alongside` counts growth and refuses nothing."""
    scratch = scratch_of(ROWS)
    old = weakref.ref(scratch.sort_workspace)
    if is_locking:
        close(manager, "alongside", limit_bytes=0, sealed=False)
    scratch.reserve(2 * ROWS)
    gc.collect()
    assert old() is None
    assert manager.accounting.retired_bytes == 0
    assert manager.accounting.growths == {
        "warmup": not is_locking,
        "sealed": 0,
        "locked": is_locking,
    }


def test_out_of_memory_is_a_refusal_and_the_old_serves_on(manager: WorkspaceManager) -> None:
    """The reason has the allocator's message, and rows that fit are served as before."""
    scratch = scratch_of(ROWS)
    close(manager, "alongside", limit_bytes=1 << 60)
    with pytest.raises(AssertionError, match="out of memory"):
        scratch.reserve(IMPOSSIBLE_ROWS)
    assert rejected(manager).kind == "permute"
    assert rejected(manager).reason.startswith("needs 70368744177664 rows, holds 1024: out of ")
    assert manager.is_locked()
    scratch.reserve(ROWS)
    assert scratch.max_expanded_rows == ROWS


def test_out_of_memory_before_the_lock_is_passed_on(manager: WorkspaceManager) -> None:
    """The start fails with the allocator's error, as without Holdfast; nothing is refused."""
    scratch = scratch_of(ROWS)
    manager.seal()
    with pytest.raises(RuntimeError, match="allocate"):
        scratch.reserve(IMPOSSIBLE_ROWS)
    assert manager.accounting.rejections["permute"] == 0


def test_a_late_scratch_meets_the_limit(manager: WorkspaceManager) -> None:
    """A layer that first runs after the lock creates its scratch and its rows then."""
    manager.get_simultaneous(((MIB,), torch.uint8))
    close(manager, "alongside", limit_bytes=MIB)
    assert scratch_of(ROWS).max_expanded_rows == ROWS
    assert manager.accounting.growths["locked"] == 1
    with pytest.raises(AssertionError, match="growth limit"):
        scratch_of(MIB)
    assert manager.accounting.rejections == {"scratch": 0, "persistent": 0, "permute": 1}


def test_without_a_seal_the_first_rows_are_never_too_late(manager: WorkspaceManager) -> None:
    """Warm-up without graphs skips some layers; scratch that may be created may also be filled."""
    close(manager, "deny", sealed=False)
    scratch = scratch_of(ROWS)
    assert scratch.max_expanded_rows == ROWS
    with pytest.raises(AssertionError, match="Scratch growth is not allowed"):
        scratch.reserve(2 * ROWS)


def test_after_the_seal_deny_refuses_the_first_rows_too(manager: WorkspaceManager) -> None:
    """Warm-up with graphs runs every layer, so what is missing then was not planned."""
    scratch = scratch_of(0)
    close(manager, "deny")
    with pytest.raises(AssertionError, match="current capacity is 0 rows"):
        scratch.reserve(ROWS)


@pytest.mark.usefixtures("manager")
def test_other_managers_keep_vllms_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class stays guarded, and asks the present manager."""
    scratch = scratch_of(ROWS)
    monkeypatch.setattr(workspace, "WorkspaceManager", WorkspaceManager.__bases__[0])
    workspace.init_workspace_manager(CPU)
    workspace.lock_workspace()
    with pytest.raises(AssertionError, match="Scratch growth is not allowed"):
        scratch.reserve(2 * ROWS)
    workspace.reset_workspace_manager()
    scratch.reserve(2 * ROWS)
    assert scratch.max_expanded_rows == 2 * ROWS
