"""Managers of workspace for the tests, and what is asked of them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast.records import RankStats
from holdfast.workspace.manager import WorkspaceManager
from holdfast.workspace.plan import MIB, GrowthPolicy, Reservation, Slot, Term
from holdfast.workspace.stats import StatsWriter, read_stats

CPU = torch.device("cpu")
GRANULE = 2 * MIB


class CapturingManager(WorkspaceManager):
    """A manager whose stream can be captured, as only a GPU's can be."""

    is_in_capture = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gate.is_capturing = partial(getattr, weakref.proxy(self), "is_in_capture")


def locked_manager(
    policy: GrowthPolicy,
    *,
    limit_bytes: int | None = None,
    sealed: bool = True,
    size_bytes: int = MIB,
    manager: WorkspaceManager | None = None,
) -> WorkspaceManager:
    manager = manager or WorkspaceManager(CPU)
    manager.bind(None, policy, limit_bytes)
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


def forget_freed_memory() -> None:
    """Make what is resident of this process what is in use, whatever other tests have freed.

    The C heap keeps the pages of freed buffers, so new ones would be resident before their first
    use.
    """
    ctypes.CDLL(None).malloc_trim(0)
