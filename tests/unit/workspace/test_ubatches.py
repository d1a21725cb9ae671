"""What one ubatch needs before the lock, every ubatch of its lane gets."""

from __future__ import annotations

import threading

import psutil
import pytest
from torch.multiprocessing.reductions import StorageWeakRef
from vllm.v1.worker import workspace

from holdfast.workspace.manager import WorkspaceManager
from holdfast.workspace.plan import MIB, GrowthPolicy
from memory_pools import Pool
from workspace_managers import (
    CPU,
    GRANULE,
    forget_freed_memory,
    held,
    locked_manager,
    reservation,
    view,
)


@pytest.mark.parametrize("is_bound", [True, False])
def test_reserving_while_ubatches_request_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, *, is_bound: bool
) -> None:
    """Requests of two ubatch threads and reservations of a third never mix up slots."""
    manager = WorkspaceManager(CPU, num_ubatches=2)
    if is_bound:  # then each thread replaces the buffer of the other one too
        manager.bind(None, "deny")
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
    manager.bind(None, "deny")
    view(manager, MIB)
    assert manager.slot_sizes() == {(0, 0): MIB, (0, 1): 0, (1, 0): MIB, (1, 1): 0}
    assert held(manager, 0).data_ptr() != held(manager, 2).data_ptr()
    assert manager.accounting.high_water_bytes == [MIB, 0, 0, 0]
    assert manager.accounting.growths["warmup"] == 1


@pytest.mark.parametrize("is_locking", [True, False])
def test_ubatches_are_alike_at_the_seal_and_at_the_lock(*, is_locking: bool) -> None:
    """Reservations that differ are made alike within each lane before addresses are captured."""
    manager = WorkspaceManager(CPU, num_ubatches=2, num_lanes=2)
    manager.bind(None, "deny")
    manager.reserve([reservation((1, 0), GRANULE), reservation((0, 1), 2 * GRANULE)])
    if is_locking:
        manager.lock()
    else:
        manager.seal()
    assert list(manager.slot_sizes().values()) == [GRANULE, 2 * GRANULE, GRANULE, 2 * GRANULE]
    assert manager.accounting.retired_bytes == 0


def test_a_request_is_served_from_the_buffer_that_equalizing_left() -> None:
    """A slot that grows next to a larger one gets that size, and the view is in its buffer."""
    manager = WorkspaceManager(CPU, num_ubatches=2)
    manager.bind(None, "deny")
    manager.reserve([reservation((1, 0), GRANULE)])
    assert view(manager, MIB).data_ptr() == held(manager).data_ptr()
    assert list(manager.slot_sizes().values()) == [GRANULE, GRANULE]


def test_equalizing_after_the_seal_keeps_the_old_buffer_of_each_ubatch() -> None:
    """Graphs of either ubatch may hold the address of its own buffer."""
    manager = WorkspaceManager(CPU, num_ubatches=2)
    manager.bind(None, "deny")
    view(manager, MIB)
    manager.seal()
    view(manager, 2 * MIB)
    assert list(manager.slot_sizes().values()) == [2 * MIB, 2 * MIB]
    assert manager.accounting.retired_bytes == 2 * MIB


def test_a_growth_retires_no_buffer_that_it_made() -> None:
    """A slot that grows after the seal next to a larger one gets that size at once."""
    manager = WorkspaceManager(CPU, num_ubatches=2)
    manager.bind(None, "deny")
    view(manager, MIB)
    manager.seal()
    manager.reserve([reservation((1, 0), 4 * GRANULE)])
    retired_bytes = manager.accounting.retired_bytes
    view(manager, 2 * MIB)
    assert list(manager.slot_sizes().values()) == [4 * GRANULE, 4 * GRANULE]
    assert manager.accounting.retired_bytes - retired_bytes == MIB
    assert manager.accounting.growths["sealed"] == 2


@pytest.mark.parametrize("policy", ["deny", "alongside"])
def test_a_seal_after_the_lock_changes_no_buffer(policy: GrowthPolicy) -> None:
    """Growth after the lock is for one slot, and equalizing would exceed its limit."""
    manager = WorkspaceManager(CPU, num_ubatches=2)
    locked_manager("alongside", limit_bytes=MIB, sealed=False, manager=manager)
    view(manager, 4 * MIB)
    manager.set_policy(policy)
    manager.seal()
    manager.equalize_ubatches()
    manager.lock()
    assert list(manager.slot_sizes().values()) == [4 * MIB, MIB]
    assert manager.is_sealed


def test_what_equalizing_adds_is_resident_on_the_cpu() -> None:
    """The sizing of the KV cache reads resident memory, including that of an equalized slot."""
    manager = WorkspaceManager(CPU, num_ubatches=2)
    manager.bind(None, "deny")
    manager.reserve([reservation((1, 0), 96 * MIB)])
    forget_freed_memory()
    before = psutil.Process().memory_info().rss
    view(manager, MIB)
    assert psutil.Process().memory_info().rss - before > 90 * MIB


def test_a_manager_that_is_not_bound_keeps_vllms_sizes() -> None:
    """In an unbound manager, a slot is empty until its own ubatch uses it."""
    manager = WorkspaceManager(CPU, num_ubatches=2)
    view(manager, MIB)
    assert list(manager.slot_sizes().values()) == [MIB, 0]


def test_growth_after_the_lock_is_for_the_slot_that_asked() -> None:
    """The limit is not spent on slots that may never be used."""
    manager = WorkspaceManager(CPU, num_ubatches=2)
    locked_manager("alongside", manager=manager)
    view(manager, 2 * MIB)
    assert list(manager.slot_sizes().values()) == [2 * MIB, MIB]


def test_a_view_outlives_the_buffer_that_another_ubatch_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ubatches run at a time, and each may hold views across a growth of the other.

    So the memory that vLLM's profile measures has old and new buffer in it: no less than is needed,
    and more by the old one at most, which is gone with the last view. Equalizing when the ubatches
    are done would be too late: the peak that was measured before lacks what it adds.
    """
    pool = Pool()
    manager = WorkspaceManager(CPU, num_ubatches=2, alloc_context=lambda: pool)
    manager.bind(None, "deny")
    monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda: 1)
    held_by_the_other = view(manager, MIB).fill_(7)
    monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda: 0)
    view(manager, 3 * MIB).fill_(9)
    assert list(manager.slot_sizes().values()) == [3 * MIB, 3 * MIB]
    assert bool((held_by_the_other == 7).all())
    old = StorageWeakRef(held_by_the_other.untyped_storage())
    assert not old.expired()
    del held_by_the_other
    assert old.expired()
    assert sum(tensor.nbytes for tensor in pool.tensors()) == 6 * MIB


def test_a_reservation_is_not_replaced_while_ubatches_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second start on, what they need is reserved before they request it."""
    manager = WorkspaceManager(CPU, num_ubatches=2)
    manager.bind(None, "deny")
    manager.reserve([reservation(slot, 2 * GRANULE) for slot in manager.slots])
    addresses = [held(manager, index).data_ptr() for index in range(2)]
    for ubatch in (0, 1):
        monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda ubatch=ubatch: ubatch)
        view(manager, GRANULE)
    assert [held(manager, index).data_ptr() for index in range(2)] == addresses


def test_a_single_slot_is_never_equalized() -> None:
    """With one ubatch, nothing is held beyond what was requested."""
    manager = WorkspaceManager(CPU, num_lanes=2)
    manager.bind(None, "deny")
    view(manager, MIB)
    address = held(manager).data_ptr()
    manager.seal()
    manager.lock()
    assert list(manager.slot_sizes().values()) == [MIB, 0]
    assert held(manager).data_ptr() == address
