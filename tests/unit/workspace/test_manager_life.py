"""The life of a workspace manager: sleep, elastic scaling, and the manager after it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from vllm.v1.worker import workspace

from holdfast.workspace.manager import WorkspaceManager, bound_class
from holdfast.workspace.plan import MIB
from workspace_managers import (
    CPU,
    GRANULE,
    held,
    locked_manager,
    reservation,
    stats_of,
    view,
    written,
)


def test_sleep_and_wake_change_neither_sizes_nor_views() -> None:
    """vLLM discards the content of a workspace and keeps its address, so the memo stays valid."""
    entered: list[bool] = []

    @contextmanager
    def pool() -> Iterator[None]:
        entered.append(True)
        yield

    manager = WorkspaceManager(CPU, alloc_context=pool)
    locked_manager("alongside", manager=manager)
    before = view(manager, MIB)
    sizes, held_bytes = manager.slot_sizes(), manager.accounting.held_bytes
    held(manager).fill_(0)  # as another owner of the physical memory leaves it
    after = view(manager, MIB)
    assert after.data_ptr() == before.data_ptr()
    assert (manager.slot_sizes(), manager.accounting.held_bytes) == (sizes, held_bytes)
    view(manager, 2 * MIB)
    assert len(entered) == 2


def test_unlocked_growth_after_the_seal_still_keeps_the_old() -> None:
    """Elastic scaling unlocks, but graphs may be left."""
    manager = locked_manager("deny")
    manager.unlock()
    view(manager, 3 * MIB)
    assert manager.accounting.retired_bytes == MIB
    manager.lock()
    with pytest.raises(AssertionError, match="not allowed after locking"):
        view(manager, 8 * MIB)


def test_unlocked_growth_moves_the_base_of_the_limit() -> None:
    """Elastic scaling unlocks, grows and locks: retired bytes count, from the new lock on."""
    manager = locked_manager("alongside", limit_bytes=4 * MIB)
    manager.unlock()
    view(manager, 16 * MIB)
    manager.lock()
    assert (manager.accounting.held_bytes, manager.accounting.retired_bytes) == (17 * MIB, MIB)
    with pytest.raises(
        AssertionError, match=r"hold 18\.00 MB more than at the lock, .* limit is 4\.00 MB"
    ):
        view(manager, 18 * MIB)
    assert manager.accounting.growths == {"warmup": 1, "sealed": 1, "locked": 0}


def test_what_is_retired_outlives_elastic_scaling() -> None:
    """vLLM releases the target's graphs before it unlocks, but not those of an encoder."""
    manager = locked_manager("alongside")
    old: list[tuple[weakref.ref[torch.Tensor], int]] = []
    for round_number in range(1, 3):
        old.append((weakref.ref(held(manager)), held(manager).data_ptr()))
        manager.unlock()
        view(manager, 4 * round_number * MIB)
        manager.lock()
    gc.collect()
    assert all((buffer := ref()) is not None and buffer.data_ptr() == at for ref, at in old)
    assert (manager.accounting.retired_bytes, sum(manager.slot_sizes().values())) == (
        5 * MIB,
        8 * MIB,
    )
    assert manager.accounting.held_bytes == 13 * MIB


def test_a_replaced_manager_is_bound_and_knows_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM resets its manager when an engine is rebuilt: the new one writes to the same file."""
    with stats_of(tmp_path) as writer:
        bound = bound_class(lambda manager: manager.bind(writer, "alongside", 4 * MIB))
        monkeypatch.setattr(workspace, "WorkspaceManager", bound)
        for size_bytes in (8 * MIB, MIB):
            workspace.init_workspace_manager(CPU)
            manager = workspace.current_workspace_manager()
            assert not written(writer).is_locked
            view(manager, size_bytes)
            manager.seal()
            manager.lock()
            assert (written(writer).is_sealed, written(writer).is_locked) == (True, True)
            assert written(writer).slots[0].size_bytes == size_bytes
            workspace.reset_workspace_manager()
        assert view(manager, 2 * MIB).numel() == 2 * MIB
        assert written(writer).growths["locked"] == 1
        assert written(writer).retired_bytes == MIB


def test_a_manager_that_was_reset_frees_what_it_held() -> None:
    """Retired buffers are freed with their manager, without a garbage collection."""
    manager = locked_manager("alongside")
    first = weakref.ref(held(manager))
    view(manager, 2 * MIB)
    assert first() is not None
    gc.disable()
    del manager
    is_freed = first() is None
    gc.enable()
    assert is_freed


def test_a_second_manager_starts_its_own_books(tmp_path: Path) -> None:
    """Sizes are those of the new manager; counts and the high water are those of the rank."""
    with stats_of(tmp_path) as writer:
        first = WorkspaceManager(CPU)
        first.bind(writer, "alongside")
        view(first, MIB)
        first.lock()
        WorkspaceManager(CPU, num_lanes=2).bind(writer, "alongside")
        stats = written(writer)
    assert [slot.size_bytes for slot in stats.slots] == [0, 0]
    assert not stats.is_locked
    assert stats.growths["warmup"] == 1
    assert stats.slots[0].high_water_bytes == MIB


def test_what_came_before_the_bind_is_told_by_it(tmp_path: Path) -> None:
    """A manager that was used before it is bound writes its sizes and its largest needs."""
    manager = WorkspaceManager(CPU)
    view(manager, MIB)
    view(manager, MIB // 2)
    with stats_of(tmp_path) as writer:
        manager.bind(writer, "deny")
        stats = written(writer)
    assert (stats.slots[0].size_bytes, stats.slots[0].high_water_bytes) == (MIB, MIB)
    assert list(stats.callers.values()) == [MIB]


def test_the_stats_follow_the_life_of_the_manager(tmp_path: Path) -> None:
    """Sizes, reservations, seal, lock and retired bytes are in the file as soon as they apply."""
    with stats_of(tmp_path) as writer:
        manager = WorkspaceManager(CPU, num_lanes=2)
        manager.bind(writer, "alongside")
        manager.reserve([reservation((0, 1), GRANULE)])
        assert [(s.ubatch, s.lane, s.size_bytes) for s in written(writer).slots] == [
            (0, 0, 0),
            (0, 1, GRANULE),
        ]
        assert written(writer).slots[1].reserved_bytes == GRANULE
        manager.seal()
        assert (written(writer).is_sealed, written(writer).is_locked) == (True, False)
        manager.lock()
        assert written(writer).is_locked
        with workspace.use_workspace_lane(1):
            view(manager, 2 * GRANULE)
        assert written(writer).retired_bytes == GRANULE
        assert written(writer).growths["locked"] == 1
        manager.unlock()
        assert (written(writer).is_sealed, written(writer).is_locked) == (True, False)
