"""Persistent resources of the workspace manager: what they hold, and when they come too late."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm.v1.worker import workspace

from holdfast.workspace.manager import WorkspaceManager
from holdfast.workspace.plan import MIB, GrowthPolicy
from workspace_managers import (
    CPU,
    locked_manager,
    view,
)


def test_a_late_resource_is_made_alongside_and_counts() -> None:
    """A missing persistent resource is created after the lock, and counts towards the limit."""
    manager = locked_manager("alongside", limit_bytes=4 * MIB)
    tensor = manager.get_persistent("late", (3 * MIB,), torch.uint8)
    assert manager.get_persistent("late", (3 * MIB,), torch.uint8) is tensor
    assert manager.accounting.persistent_bytes == 3 * MIB
    with pytest.raises(AssertionError, match="growth limit"):
        view(manager, 2 * MIB)


def test_a_resource_of_unknown_size_is_refused_once_the_limit_is_reached() -> None:
    """The need of a first one is unknown, so the next one beyond the limit is refused."""
    manager = locked_manager("alongside", limit_bytes=MIB)
    manager.get_persistent_resource("first", two_mib)
    with pytest.raises(AssertionError, match=r"'second' was not allocated .* growth limit"):
        manager.get_persistent_resource("second", two_mib)
    rejection = manager.accounting.last_rejection
    assert rejection is not None
    assert (rejection.kind, rejection.needed_bytes) == ("persistent", 0)
    assert rejection.held_bytes == 2 * MIB
    assert rejection.caller.startswith(f"{Path(__file__).name}:")


def test_a_resource_whose_size_was_measured_is_held_to_the_limit() -> None:
    """It needs in every slot what it held in the first, which is known without allocating."""
    manager = WorkspaceManager(CPU, num_lanes=2)
    manager.get_persistent_resource("key", two_mib)
    locked_manager("alongside", limit_bytes=2 * MIB - 1, manager=manager)
    with (
        workspace.use_workspace_lane(1),
        pytest.raises(
            AssertionError,
            match=r"hold 2\.00 MB more than at the lock, .* growth limit is 2\.00 MB",
        ),
    ):
        manager.get_persistent_resource("key", pytest.fail)
    rejection = manager.accounting.last_rejection
    assert rejection is not None
    assert (rejection.needed_bytes, rejection.held_bytes) == (2 * MIB, 2 * MIB)


@pytest.mark.parametrize("policy", ["deny", "alongside"])
def test_a_tensor_says_its_size_before_it_is_made(policy: GrowthPolicy) -> None:
    """A persistent tensor beyond the limit is refused at once, and its need is written."""
    manager = locked_manager(policy, limit_bytes=MIB)
    with pytest.raises(AssertionError, match=r"'locks'\) was not allocated during warmup"):
        manager.get_persistent("locks", (MIB,), torch.int32)
    rejection = manager.accounting.last_rejection
    assert rejection is not None
    assert (rejection.needed_bytes, rejection.held_bytes) == (4 * MIB, 0)
    assert manager.accounting.persistent_bytes == 0


@pytest.mark.parametrize("policy", ["deny", "alongside"])
def test_without_a_seal_a_first_use_is_never_too_late(policy: GrowthPolicy) -> None:
    """Warm-up without graphs skips some layers, and no reservation can stand for theirs."""
    manager = locked_manager(policy, limit_bytes=0, sealed=False)
    assert manager.get_persistent("late", (MIB,), torch.uint8).numel() == MIB
    assert manager.accounting.growths["locked"] == 1
    assert manager.accounting.last_rejection is None


def test_a_resource_counts_as_growth_if_it_is_late() -> None:
    """Warm-up creates resources; after the lock they take memory that was not planned."""
    manager = WorkspaceManager(CPU)
    manager.get_persistent("early", (1,), torch.uint8)
    locked_manager("alongside", manager=manager)
    before = manager.accounting.growths["locked"]
    for _ in range(2):
        manager.get_persistent("late", (1,), torch.uint8)
    assert (before, manager.accounting.growths["locked"]) == (0, 1)


def test_a_resource_that_cannot_be_allocated_is_a_refusal() -> None:
    """After the lock the allocator's error becomes the reason; before it, it is passed on."""

    def factory() -> torch.Tensor:
        return torch.empty(1 << 50, dtype=torch.uint8)

    def exhausted() -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory is left")

    manager = WorkspaceManager(CPU)
    with pytest.raises(RuntimeError, match="allocate"):
        manager.get_persistent_resource("early", factory)
    locked_manager("alongside", limit_bytes=1 << 60, manager=manager)
    with pytest.raises(AssertionError, match="out of memory: no memory is left"):
        manager.get_persistent_resource("late", exhausted)
    assert manager.accounting.rejections["persistent"] == 1
    assert manager.accounting.growths["locked"] == 0
    assert manager.get_persistent_resource("late", list) == []


def two_mib() -> list[torch.Tensor]:
    """Creates a resource of unknown size."""
    return [torch.empty(2 * MIB, dtype=torch.uint8)]


def test_persistent_bytes_are_weighed_anew_at_the_lock() -> None:
    """A resource that grew during warm-up counts with its present size."""
    manager = WorkspaceManager(CPU)
    kept = manager.get_persistent_resource("list", lambda: [torch.empty(1000, dtype=torch.uint8)])
    kept.append(torch.empty(500, dtype=torch.uint8))
    manager.lock()
    assert manager.accounting.persistent_bytes == 1500
