"""Reservation, seal, lock and growth of the workspace manager, with real tensors on the CPU."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from vllm.v1.worker import workspace

from holdfast.errors import HoldfastError
from holdfast.records import RankStats
from holdfast.workspace.books import NoStats
from holdfast.workspace.manager import WorkspaceManager, bound_class
from holdfast.workspace.plan import MIB, GrowthPolicy, Reservation, Slot, Term
from holdfast.workspace.stats import StatsWriter, read_stats

CPU = torch.device("cpu")
GRANULE = 2 * MIB
IMPOSSIBLE_BYTES = 1 << 50


class CapturingManager(WorkspaceManager):
    """A manager whose stream can be captured, as only a GPU's can be."""

    is_in_capture = False

    def _is_capturing(self) -> bool:
        return self.is_in_capture


def locked_manager(
    policy: GrowthPolicy,
    *,
    limit_bytes: int | None = None,
    sealed: bool = True,
    size_bytes: int = MIB,
    manager: WorkspaceManager | None = None,
) -> WorkspaceManager:
    manager = manager or WorkspaceManager(CPU)
    manager.bind(NoStats(), policy, limit_bytes)
    view(manager, size_bytes)
    if sealed:
        manager.seal()
    manager.lock()
    return manager


def view(manager: WorkspaceManager, size_bytes: int) -> torch.Tensor:
    (tensor,) = manager.get_simultaneous(((size_bytes,), torch.uint8))
    return tensor


def held(manager: WorkspaceManager, index: int = 0) -> torch.Tensor:
    buffer = manager._current_workspaces[index]
    assert buffer is not None
    return buffer


def reservation(slot: Slot, size_bytes: int) -> Reservation:
    return Reservation(slot, (Term("floor", "test", size_bytes),), size_bytes)


@contextmanager
def stats_of(directory: Path) -> Iterator[StatsWriter]:
    with StatsWriter(directory, engine=0, rank=0, generation=1) as writer:
        yield writer


def written(writer: StatsWriter) -> RankStats:
    stats = read_stats(writer.path)
    assert stats is not None
    return stats


def test_a_reservation_fills_every_slot_from_any_thread() -> None:
    """Slots of other ubatches and lanes are filled although this thread has neither."""
    manager = WorkspaceManager(CPU, num_ubatches=2, num_lanes=2)
    assert manager.slots == ((0, 0), (0, 1), (1, 0), (1, 1))
    manager.reserve(reservation(slot, (1 + i) * GRANULE) for i, slot in enumerate(manager.slots))
    assert list(manager.slot_sizes().values()) == [GRANULE, 2 * GRANULE, 3 * GRANULE, 4 * GRANULE]
    assert [held(manager, index).numel() for index in range(4)] == list(
        manager.slot_sizes().values()
    )
    assert manager.total_size_bytes() == 10 * GRANULE


def test_reserving_again_changes_nothing() -> None:
    """A reservation that is met keeps the buffer, also after the lock, and counts no growth."""
    manager = WorkspaceManager(CPU)
    manager.reserve([reservation((0, 0), GRANULE)])
    address = held(manager).data_ptr()
    manager.reserve([reservation((0, 0), GRANULE)])
    manager.seal()
    manager.lock()
    manager.reserve([reservation((0, 0), MIB)])
    assert held(manager).data_ptr() == address
    assert manager.books.reserved_bytes == [GRANULE]
    assert set(manager.books.growths.values()) == {0}


def test_a_reservation_is_resident_on_the_cpu() -> None:
    """The sizing of the KV cache reads resident memory, so the reserved bytes are touched."""
    manager = WorkspaceManager(CPU)
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
    """What was not reserved before the lock cannot be reserved after it."""
    manager = locked_manager("alongside")
    with pytest.raises(HoldfastError, match="too late") as late:
        manager.reserve([reservation((0, 0), 8 * GRANULE)])
    assert "warm-up" in late.value.remedy


def test_before_the_seal_the_old_buffer_is_freed() -> None:
    """As in vLLM, growth in the warm-up holds no second buffer."""
    manager = WorkspaceManager(CPU)
    view(manager, MIB)
    old = weakref.ref(held(manager))
    view(manager, 3 * MIB)
    gc.collect()
    assert old() is None
    assert manager.books.retired_bytes == 0
    assert manager.books.growths == {"warmup": 2, "sealed": 0, "locked": 0}


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
    assert manager.books.retired_bytes == MIB
    assert manager.books.growths["sealed"] == 1


def test_a_reservation_after_the_seal_keeps_the_old_buffer() -> None:
    """An engine that scales reserves anew while graphs exist."""
    manager = WorkspaceManager(CPU)
    manager.reserve([reservation((0, 0), GRANULE)])
    manager.seal()
    manager.reserve([reservation((0, 0), 2 * GRANULE)])
    assert manager.books.retired_bytes == GRANULE
    assert manager.books.growths["sealed"] == 1


def test_alongside_grows_after_the_lock_and_keeps_the_old() -> None:
    """The request is met in whole MiB pairs, and a view from before keeps its content."""
    manager = locked_manager("alongside")
    before = view(manager, MIB).fill_(7)
    assert view(manager, GRANULE + 1).fill_(9).numel() == GRANULE + 1
    assert held(manager).numel() == 2 * GRANULE
    assert bool((before == 7).all())
    assert manager.books.growths["locked"] == 1
    assert manager.books.retired_bytes == MIB


def test_alongside_refuses_beyond_the_limit() -> None:
    """Retired and current may not exceed the size at the lock by more than the limit."""
    manager = locked_manager("alongside", limit_bytes=5 * MIB)
    view(manager, 2 * MIB)  # 2 MiB above
    with pytest.raises(AssertionError, match=r"growth limit is 5\.00 MB"):
        view(manager, 4 * MIB)  # would be 6 MiB above
    assert held(manager).numel() == 2 * MIB
    assert manager.books.rejections["scratch"] == 1


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
    """Without a limit one growth of the largest slot always fits."""
    manager = locked_manager("alongside")
    assert view(manager, 256 * MIB).numel() == 256 * MIB
    with pytest.raises(AssertionError, match=r"growth limit is 257\.00 MB"):
        view(manager, 258 * MIB)


def test_without_a_seal_alongside_only_counts() -> None:
    """Where nothing was captured the old buffer is freed and no limit holds."""
    manager = locked_manager("alongside", limit_bytes=0, sealed=False)
    old = weakref.ref(held(manager))
    view(manager, 8 * MIB)
    gc.collect()
    assert old() is None
    assert manager.books.retired_bytes == 0
    assert manager.books.growths["locked"] == 1


def test_deny_refuses_also_without_a_seal() -> None:
    """The policy holds after the lock on every path."""
    manager = locked_manager("deny", sealed=False)
    with pytest.raises(AssertionError, match=r"requires 2\.00 MB, current size is 1\.00 MB"):
        view(manager, 2 * MIB)


def test_the_policy_can_change_after_the_lock() -> None:
    """What was refused is granted once the policy says so."""
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
    assert manager.books.rejections == {"scratch": 1, "persistent": 1, "permute": 0}


@pytest.mark.parametrize("sealed", [True, False])
def test_nothing_grows_during_a_capture_before_the_lock(*, sealed: bool) -> None:
    """The graphs that are captured before it have the old address; a need that fits is served."""
    manager = CapturingManager(CPU)
    manager.bind(NoStats(), "alongside")
    kept = view(manager, MIB).data_ptr()
    if sealed:
        manager.seal()
    manager.is_in_capture = True
    assert view(manager, MIB).data_ptr() == kept
    with pytest.raises(AssertionError, match="captured into a graph") as refused:
        view(manager, 2 * MIB)
    assert ("sealed" if sealed else "being captured") in str(refused.value)
    assert view(manager, MIB).data_ptr() == kept
    assert manager.books.rejections["scratch"] == 1


@pytest.mark.parametrize("sealed", [True, False])
def test_out_of_memory_leaves_the_old_buffer(*, sealed: bool) -> None:
    """A growth that the allocator cannot serve is a rejection, and the old buffer serves on."""
    manager = locked_manager("alongside", limit_bytes=1 << 60, sealed=sealed)
    address = view(manager, MIB).data_ptr()
    with pytest.raises(AssertionError, match="out of memory"):
        view(manager, IMPOSSIBLE_BYTES)
    assert view(manager, MIB).data_ptr() == address
    assert manager.books.last_rejection is not None
    assert manager.books.last_rejection.reason.startswith("out of memory: ")


def test_out_of_memory_before_the_lock_is_the_allocators_error() -> None:
    """A start that runs out of memory says so in the allocator's own words."""
    manager = WorkspaceManager(CPU)
    view(manager, MIB)
    with pytest.raises(RuntimeError, match="allocate"):
        view(manager, IMPOSSIBLE_BYTES)
    assert manager.slot_sizes() == {(0, 0): 0}
    assert view(manager, MIB).numel() == MIB


def test_a_refusal_is_written_before_it_is_raised(tmp_path: Path) -> None:
    """Who reads the file of a dead rank finds kind, caller, need and holding."""
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
    assert stats.last_rejection.caller.startswith("test_workspace_manager.py:")
    assert f"allocation from '{stats.last_rejection.caller}'" in str(refused.value)
    assert (stats.last_rejection.needed_bytes, stats.last_rejection.held_bytes) == (3 * MIB, MIB)
    assert stats.slots[0].high_water_bytes == 3 * MIB
    assert stats.slots[0].high_water_caller == stats.last_rejection.caller
    assert max(stats.callers.values()) == 3 * MIB


def test_the_stats_follow_the_life_of_the_manager(tmp_path: Path) -> None:
    """Sizes, reservations, seal, lock and retired bytes are on file as soon as they hold."""
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
    """A manager that was used before it is bound writes its sizes, needs and callers."""
    manager = WorkspaceManager(CPU)
    view(manager, MIB)
    with stats_of(tmp_path) as writer:
        manager.bind(writer, "deny")
        stats = written(writer)
    assert (stats.slots[0].size_bytes, stats.slots[0].high_water_bytes) == (MIB, MIB)
    assert list(stats.callers.values()) == [MIB]


def test_a_late_resource_is_made_alongside_and_counts() -> None:
    """A missing persistent resource is made after the lock, and its bytes meet the limit."""
    manager = locked_manager("alongside", limit_bytes=4 * MIB)
    tensor = manager.get_persistent("late", (3 * MIB,), torch.uint8)
    assert manager.get_persistent("late", (3 * MIB,), torch.uint8) is tensor
    assert manager.books.persistent_bytes == 3 * MIB
    with pytest.raises(AssertionError, match="growth limit"):
        view(manager, 2 * MIB)


def test_a_resource_is_refused_once_the_limit_is_reached() -> None:
    """The need of a late resource is unknown, so the one after the limit is the one refused."""
    manager = locked_manager("alongside", limit_bytes=MIB)
    manager.get_persistent("first", (2 * MIB,), torch.uint8)
    with pytest.raises(AssertionError, match=r"'second'\) was not allocated .* growth limit"):
        manager.get_persistent("second", (1,), torch.uint8)
    rejection = manager.books.last_rejection
    assert rejection is not None
    assert (rejection.kind, rejection.held_bytes) == ("persistent", 2 * MIB)
    assert rejection.caller.startswith("test_workspace_manager.py:")


def test_persistent_bytes_are_weighed_anew_at_the_lock() -> None:
    """A resource that grew in the warm-up after it was made counts with what it holds then."""
    manager = WorkspaceManager(CPU)
    kept = manager.get_persistent_resource("list", lambda: [torch.empty(1000, dtype=torch.uint8)])
    kept.append(torch.empty(500, dtype=torch.uint8))
    manager.lock()
    assert manager.books.persistent_bytes == 1500


def test_unlocked_growth_after_the_seal_still_keeps_the_old() -> None:
    """Elastic scaling unlocks, but nothing says that no graph is left."""
    manager = locked_manager("deny")
    manager.unlock()
    view(manager, 3 * MIB)
    assert manager.books.retired_bytes == MIB
    manager.lock()
    with pytest.raises(AssertionError, match="not allowed after locking"):
        view(manager, 8 * MIB)


@pytest.mark.parametrize("is_bound", [True, False])
def test_reserving_while_ubatches_request_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, *, is_bound: bool
) -> None:
    """Requests of two ubatch threads and reservations of a third never mix up slots."""
    manager = WorkspaceManager(CPU, num_ubatches=2)
    if is_bound:  # then each thread replaces the buffer of the other one too
        manager.bind(NoStats(), "deny")
    ubatch_of: dict[int, int] = {}
    monkeypatch.setattr(
        workspace, "dbo_current_ubatch_id", lambda: ubatch_of[threading.get_ident()]
    )
    failures: list[str] = []

    def work(ubatch: int) -> None:
        ubatch_of[threading.get_ident()] = ubatch
        for size_bytes in range(1, 400):
            tensor = view(manager, size_bytes * 512).fill_(ubatch + 1)
            if not bool((tensor == ubatch + 1).all()):
                failures.append(f"ubatch {ubatch} saw foreign bytes at {size_bytes}")

    threads = [threading.Thread(target=work, args=(ubatch,)) for ubatch in range(2)]
    for thread in threads:
        thread.start()
    for size_bytes in range(1, 100):
        manager.reserve(reservation(slot, size_bytes * 1024) for slot in manager.slots)
    for thread in threads:
        thread.join(timeout=60)
    assert not failures
    assert min(manager.slot_sizes().values()) == 399 * 512


def test_what_one_ubatch_needs_before_the_lock_every_ubatch_gets() -> None:
    """Growth in slot (0, 0) fills (1, 0) at once, where the sizing of the KV cache sees it."""
    manager = WorkspaceManager(CPU, num_ubatches=2, num_lanes=2)
    manager.bind(NoStats(), "deny")
    view(manager, MIB)
    assert manager.slot_sizes() == {(0, 0): MIB, (0, 1): 0, (1, 0): MIB, (1, 1): 0}
    assert held(manager, 0).data_ptr() != held(manager, 2).data_ptr()
    assert manager.books.high_water_bytes == [MIB, 0, 0, 0]
    assert manager.books.growths["warmup"] == 1


@pytest.mark.parametrize("is_locking", [True, False])
def test_ubatches_are_alike_at_the_seal_and_at_the_lock(*, is_locking: bool) -> None:
    """Reservations that differ are levelled within each lane before addresses are captured."""
    manager = WorkspaceManager(CPU, num_ubatches=2, num_lanes=2)
    manager.bind(NoStats(), "deny")
    manager.reserve([reservation((1, 0), GRANULE), reservation((0, 1), 2 * GRANULE)])
    if is_locking:
        manager.lock()
    else:
        manager.seal()
    assert list(manager.slot_sizes().values()) == [GRANULE, 2 * GRANULE, GRANULE, 2 * GRANULE]
    assert manager.books.retired_bytes == 0


def test_a_request_is_served_from_the_buffer_that_levelling_left() -> None:
    """A slot that grows beside a larger one gets that one's size, and the view lies in it."""
    manager = WorkspaceManager(CPU, num_ubatches=2)
    manager.bind(NoStats(), "deny")
    manager.reserve([reservation((1, 0), GRANULE)])
    assert view(manager, MIB).data_ptr() == held(manager).data_ptr()
    assert list(manager.slot_sizes().values()) == [GRANULE, GRANULE]


def test_levelling_after_the_seal_keeps_the_old_buffer_of_each_ubatch() -> None:
    """Graphs of either ubatch may hold the address of its own buffer."""
    manager = WorkspaceManager(CPU, num_ubatches=2)
    manager.bind(NoStats(), "deny")
    view(manager, MIB)
    manager.seal()
    view(manager, 2 * MIB)
    assert list(manager.slot_sizes().values()) == [2 * MIB, 2 * MIB]
    assert manager.books.retired_bytes == 2 * MIB


def test_growth_after_the_lock_is_for_the_slot_that_asked() -> None:
    """The limit is not spent on slots that may never ask."""
    manager = WorkspaceManager(CPU, num_ubatches=2)
    locked_manager("alongside", manager=manager)
    view(manager, 2 * MIB)
    assert list(manager.slot_sizes().values()) == [2 * MIB, MIB]


def test_a_single_slot_is_never_levelled() -> None:
    """Where there is one ubatch nothing is held but what was asked for."""
    manager = WorkspaceManager(CPU, num_lanes=2)
    manager.bind(NoStats(), "deny")
    view(manager, MIB)
    address = held(manager).data_ptr()
    manager.seal()
    manager.lock()
    assert list(manager.slot_sizes().values()) == [MIB, 0]
    assert held(manager).data_ptr() == address


def test_sleep_and_wake_change_neither_sizes_nor_views() -> None:
    """vLLM discards what stands in a workspace and keeps its address, so that the memo holds."""
    entered: list[bool] = []

    @contextmanager
    def pool() -> Iterator[None]:
        entered.append(True)
        yield

    manager = WorkspaceManager(CPU, alloc_context=pool)
    locked_manager("alongside", manager=manager)
    before = view(manager, MIB)
    sizes, held_bytes = manager.slot_sizes(), manager.books.held_bytes
    held(manager).fill_(0)  # as another owner of the physical memory leaves it
    after = view(manager, MIB)
    assert after.data_ptr() == before.data_ptr()
    assert (manager.slot_sizes(), manager.books.held_bytes) == (sizes, held_bytes)
    view(manager, 2 * MIB)
    assert len(entered) == 2


def test_unlocked_growth_moves_the_base_of_the_limit() -> None:
    """Elastic scaling unlocks, grows and locks: retired bytes count, from the new lock on."""
    manager = locked_manager("alongside", limit_bytes=4 * MIB)
    manager.unlock()
    view(manager, 16 * MIB)
    manager.lock()
    assert (manager.books.held_bytes, manager.books.retired_bytes) == (17 * MIB, MIB)
    with pytest.raises(AssertionError, match=r"hold 18\.00 MB above .* limit is 4\.00 MB"):
        view(manager, 18 * MIB)
    assert manager.books.growths == {"warmup": 1, "sealed": 1, "locked": 0}


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
    """Retired buffers live as long as their manager, whose graphs end with it."""
    manager = locked_manager("alongside")
    first = weakref.ref(held(manager))
    view(manager, 2 * MIB)
    assert first() is not None
    del manager
    gc.collect()
    assert first() is None
