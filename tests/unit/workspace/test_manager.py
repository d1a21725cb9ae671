"""Reservation, seal, lock and growth of the workspace manager, with real tensors on the CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from vllm.v1.worker import workspace

from holdfast.errors import HoldfastError
from holdfast.workspace.manager import WorkspaceManager
from holdfast.workspace.plan import MIB
from workspace_managers import (
    CPU,
    GRANULE,
    CapturingManager,
    forget_freed_memory,
    held,
    locked_manager,
    reservation,
    stats_of,
    view,
    written,
)

IMPOSSIBLE_BYTES = 1 << 50


def test_a_reservation_fills_every_slot_from_any_thread() -> None:
    """Slots of other ubatches and lanes are filled, although this thread has neither."""
    manager = WorkspaceManager(CPU, num_ubatches=2, num_lanes=2)
    assert manager.slots == ((0, 0), (0, 1), (1, 0), (1, 1))
    manager.reserve(reservation(slot, (1 + i) * GRANULE) for i, slot in enumerate(manager.slots))
    assert list(manager.slot_sizes().values()) == [GRANULE, 2 * GRANULE, 3 * GRANULE, 4 * GRANULE]
    assert [held(manager, index).numel() for index in range(4)] == list(
        manager.slot_sizes().values()
    )
    assert sum(manager.slot_sizes().values()) == 10 * GRANULE


def test_reserving_again_changes_nothing() -> None:
    """A reservation that fits keeps the buffer, even after the lock, and counts no growth."""
    manager = WorkspaceManager(CPU)
    manager.reserve([reservation((0, 0), GRANULE)])
    address = held(manager).data_ptr()
    manager.reserve([reservation((0, 0), GRANULE)])
    manager.seal()
    manager.lock()
    manager.reserve([reservation((0, 0), MIB)])
    assert held(manager).data_ptr() == address
    assert manager.accounting.reserved_bytes == [GRANULE]
    assert set(manager.accounting.growths.values()) == {0}


def test_a_reservation_is_resident_on_the_cpu() -> None:
    """The sizing of the KV cache reads resident memory, so the reserved bytes are touched."""
    manager = WorkspaceManager(CPU)
    forget_freed_memory()
    before = psutil.Process().memory_info().rss
    manager.reserve([reservation((0, 0), 96 * MIB)])
    assert psutil.Process().memory_info().rss - before > 90 * MIB


def test_a_reservation_is_made_in_the_allocation_context() -> None:
    """vLLM's sleep mode tags the workspace by the context that it is allocated in."""
    entered = []

    @contextmanager
    def pool() -> Iterator[None]:
        entered.append(True)
        yield

    manager = WorkspaceManager(CPU, alloc_context=pool)
    manager.reserve([reservation((0, 0), GRANULE)])
    view(manager, 2 * GRANULE)
    assert len(entered) == 2


def test_a_reservation_after_the_lock_is_an_error() -> None:
    """A slot cannot be reserved after the lock."""
    manager = locked_manager("alongside")
    with pytest.raises(HoldfastError, match="too late") as late:
        manager.reserve([reservation((0, 0), 8 * GRANULE)])
    assert "warm-up" in late.value.remedy


def test_before_the_seal_the_old_buffer_is_freed() -> None:
    """As in vLLM, growth during warm-up keeps no second buffer."""
    manager = WorkspaceManager(CPU)
    view(manager, MIB)
    old = weakref.ref(held(manager))
    view(manager, 3 * MIB)
    gc.collect()
    assert old() is None
    assert manager.accounting.retired_bytes == 0
    assert manager.accounting.growths == {"warmup": 2, "sealed": 0, "locked": 0}


def test_before_the_seal_the_old_buffer_is_freed_first() -> None:
    """The larger buffer may need the memory of the smaller one."""
    buffers: list[weakref.ref[torch.Tensor]] = []
    alive_at_allocation: list[int] = []

    @contextmanager
    def watch() -> Iterator[None]:
        alive_at_allocation.append(sum(buffer() is not None for buffer in buffers))
        yield

    manager = WorkspaceManager(CPU, alloc_context=watch)
    for size_bytes in (MIB, 2 * MIB, 3 * MIB):
        view(manager, size_bytes)
        buffers.append(weakref.ref(held(manager)))
    assert alive_at_allocation == [0, 0, 0]


def test_after_the_seal_the_old_buffer_is_kept() -> None:
    """A graph may have captured its address, whatever the policy is."""
    manager = WorkspaceManager(CPU)
    view(manager, MIB)
    old = weakref.ref(held(manager))
    manager.seal()
    view(manager, 3 * MIB)
    gc.collect()
    assert old() is not None
    assert manager.accounting.retired_bytes == MIB
    assert manager.accounting.growths["sealed"] == 1


def test_a_reservation_after_the_seal_keeps_the_old_buffer() -> None:
    """An engine that scales reserves again while graphs exist."""
    manager = WorkspaceManager(CPU)
    manager.reserve([reservation((0, 0), GRANULE)])
    manager.seal()
    manager.reserve([reservation((0, 0), 2 * GRANULE)])
    assert manager.accounting.retired_bytes == GRANULE
    assert manager.accounting.growths["sealed"] == 1


def test_alongside_grows_after_the_lock_and_keeps_the_old() -> None:
    """The request is rounded up to 2 MiB, and an earlier view keeps its content."""
    manager = locked_manager("alongside")
    before = view(manager, MIB).fill_(7)
    assert view(manager, GRANULE + 1).fill_(9).numel() == GRANULE + 1
    assert held(manager).numel() == 2 * GRANULE
    assert bool((before == 7).all())
    assert manager.accounting.growths["locked"] == 1
    assert manager.accounting.retired_bytes == MIB


def test_alongside_refuses_beyond_the_limit() -> None:
    """Retired and current buffers may not exceed the size at the lock by more than the limit."""
    manager = locked_manager("alongside", limit_bytes=5 * MIB)
    view(manager, 2 * MIB)  # 2 MiB above
    with pytest.raises(AssertionError, match=r"growth limit is 5\.00 MB"):
        view(manager, 4 * MIB)  # would be 6 MiB above
    assert held(manager).numel() == 2 * MIB
    assert manager.accounting.rejections["scratch"] == 1


def test_a_growth_that_fits_only_unrounded_is_granted() -> None:
    """Rounding up never costs a request that is within the limit."""
    manager = locked_manager("alongside", limit_bytes=3 * MIB)
    assert view(manager, 3 * MIB).numel() == 3 * MIB
    assert held(manager).numel() == 3 * MIB


def test_the_limit_of_the_lock_wins_and_can_be_lowered() -> None:
    """Ranks agree on a limit once each of them is locked."""
    manager = locked_manager("alongside", limit_bytes=1024 * MIB)
    manager.lock(limit_bytes=MIB)
    with pytest.raises(AssertionError, match=r"growth limit is 1\.00 MB"):
        view(manager, 4 * MIB)
    manager.lock()
    with pytest.raises(AssertionError, match=r"growth limit is 1\.00 MB"):
        view(manager, 4 * MIB)


def test_the_default_limit_is_the_largest_slot_and_256_mib() -> None:
    """Without a given limit, one growth of the largest slot always fits."""
    manager = locked_manager("alongside")
    assert view(manager, 256 * MIB).numel() == 256 * MIB
    with pytest.raises(AssertionError, match=r"growth limit is 257\.00 MB"):
        view(manager, 258 * MIB)


def test_by_default_every_ubatch_may_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ubatches run the same layers, so the step that one of them outgrows, each outgrows."""
    manager = WorkspaceManager(CPU, num_ubatches=2)
    locked_manager("alongside", manager=manager)
    for ubatch in (0, 1):
        monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda ubatch=ubatch: ubatch)
        assert view(manager, 256 * MIB).numel() == 256 * MIB


def test_without_a_seal_alongside_only_counts() -> None:
    """If nothing was captured, the old buffer is freed and no limit applies."""
    manager = locked_manager("alongside", limit_bytes=0, sealed=False)
    old = weakref.ref(held(manager))
    view(manager, 8 * MIB)
    gc.collect()
    assert old() is None
    assert manager.accounting.retired_bytes == 0
    assert manager.accounting.growths["locked"] == 1


def test_deny_refuses_also_without_a_seal() -> None:
    """After the lock, the policy applies on every path."""
    manager = locked_manager("deny", sealed=False)
    with pytest.raises(AssertionError, match=r"requires 2\.00 MB, current size is 1\.00 MB"):
        view(manager, 2 * MIB)


def test_the_policy_can_change_after_the_lock() -> None:
    """A refused request is granted once the policy allows it."""
    manager = locked_manager("deny")
    with pytest.raises(AssertionError):
        view(manager, 2 * MIB)
    manager.set_policy("alongside")
    assert view(manager, 2 * MIB).numel() == 2 * MIB


def test_nothing_grows_during_a_capture() -> None:
    """Memory allocated during a capture would belong to the graph."""
    manager = CapturingManager(CPU)
    locked_manager("alongside", manager=manager)
    manager.is_in_capture = True
    with pytest.raises(AssertionError, match="captured into a graph"):
        view(manager, 2 * MIB)
    with pytest.raises(AssertionError, match="captured into a graph"):
        manager.get_persistent("late", (4,), torch.int32)
    assert manager.accounting.rejections == {"scratch": 1, "persistent": 1, "permute": 0}


@pytest.mark.parametrize("sealed", [True, False])
def test_nothing_grows_during_a_capture_before_the_lock(*, sealed: bool) -> None:
    """Graphs captured before have the old address; a request that fits is served."""
    manager = CapturingManager(CPU)
    manager.bind(None, "alongside")
    kept = view(manager, MIB).data_ptr()
    if sealed:
        manager.seal()
    manager.is_in_capture = True
    assert view(manager, MIB).data_ptr() == kept
    with pytest.raises(AssertionError, match="captured into a graph") as refused:
        view(manager, 2 * MIB)
    assert ("sealed" if sealed else "being captured") in str(refused.value)
    assert view(manager, MIB).data_ptr() == kept
    assert manager.accounting.rejections["scratch"] == 1


@pytest.mark.parametrize("sealed", [True, False])
def test_out_of_memory_leaves_the_old_size(*, sealed: bool) -> None:
    """A growth that the allocator cannot serve is a rejection, and what fitted still does."""
    manager = locked_manager("alongside", limit_bytes=1 << 60, sealed=sealed)
    address = view(manager, MIB).data_ptr()
    with pytest.raises(AssertionError, match="out of memory"):
        view(manager, IMPOSSIBLE_BYTES)
    assert manager.slot_sizes() == {(0, 0): MIB}
    kept = view(manager, MIB)
    assert not sealed or kept.data_ptr() == address
    assert manager.accounting.growths["locked"] == 0
    assert manager.accounting.last_rejection is not None
    assert manager.accounting.last_rejection.reason.startswith("out of memory: ")


class Pool:
    """A device's memory, where one buffer is in use after another."""

    def __init__(self, *, room: int) -> None:
        """Make a pool with room for this many buffers at once."""
        self._room = room
        self.buffers: list[weakref.ref[torch.Tensor]] = []
        self.alive_at_entry: list[int] = []

    @contextmanager
    def used(self) -> Iterator[None]:
        alive = sum(buffer() is not None for buffer in self.buffers)
        self.alive_at_entry.append(alive)
        if alive >= self._room:
            raise torch.OutOfMemoryError("there is no room for both")
        yield


def test_without_a_seal_the_memory_of_the_old_buffer_serves_the_new() -> None:
    """Growth without graphs needs no room for both: what is not enough for two is enough."""
    pool = Pool(room=1)
    manager = WorkspaceManager(CPU, alloc_context=pool.used)
    locked_manager("alongside", manager=manager, sealed=False)
    pool.buffers.append(weakref.ref(held(manager)))
    assert view(manager, 3 * MIB).numel() == 3 * MIB
    assert pool.alive_at_entry == [0, 1, 0]
    assert manager.accounting.last_rejection is None
    assert manager.accounting.held_bytes == 4 * MIB


def test_without_a_seal_the_pool_is_entered_again_without_the_old_buffer() -> None:
    """That of vLLM's sleep mode frees what was dropped when it is entered, and at no other time."""
    pool = Pool(room=2)
    manager = WorkspaceManager(CPU, alloc_context=pool.used)
    locked_manager("alongside", manager=manager, sealed=False)
    pool.buffers.append(weakref.ref(held(manager)))
    view(manager, 3 * MIB)
    assert pool.alive_at_entry == [0, 1, 0]


def test_out_of_memory_before_the_lock_is_the_allocators_error() -> None:
    """A start that runs out of memory says so in the allocator's own words."""
    manager = WorkspaceManager(CPU)
    view(manager, MIB)
    with pytest.raises(RuntimeError, match="allocate"):
        view(manager, IMPOSSIBLE_BYTES)
    assert manager.slot_sizes() == {(0, 0): 0}
    assert view(manager, MIB).numel() == MIB


def test_a_refusal_is_written_before_it_is_raised(tmp_path: Path) -> None:
    """The file of a dead rank has the kind, the caller, the need and what was held."""
    with stats_of(tmp_path) as writer:
        manager = WorkspaceManager(CPU)
        manager.bind(writer, "deny")
        view(manager, MIB)
        manager.lock()
        with pytest.raises(AssertionError) as refused:
            view(manager, 3 * MIB)
        stats = written(writer)
    assert stats.rejections == {"scratch": 1, "persistent": 0, "permute": 0}
    assert stats.last_rejection is not None
    assert stats.last_rejection.caller.startswith("workspace_managers.py:")
    assert f"allocation from '{stats.last_rejection.caller}'" in str(refused.value)
    assert (stats.last_rejection.needed_bytes, stats.last_rejection.held_bytes) == (3 * MIB, MIB)
    assert stats.slots[0].high_water_bytes == 3 * MIB
    assert stats.slots[0].high_water_caller == stats.last_rejection.caller
    assert max(stats.callers.values()) == 3 * MIB
