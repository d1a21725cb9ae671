"""Writes down, in each worker, what happens to its workspaces and in which order.

A plug-in of vLLM, loaded after Holdfast's, that does nothing without the variable below. It also
asks twice what could not be seen otherwise: for the KV budget before and after a further
reservation, and for more workspace right after the seal, as a kernel between two captures does.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY_VARIABLE = "HOLDFAST_GPU_CHECK_EVENTS"
ADDED_BYTES = 16 << 20
"""By this much the reservation rises between two sizings of the KV cache.

It and what was reserved before are above 10 MiB: below, torch's allocator takes 20 MiB of a GPU for
a buffer and keeps the rest for others, so that no byte could be compared (`kMinLargeAlloc`).
"""
_SUFFIX = ".events"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened in a worker."""

    pid: int
    rank: int
    name: str
    """`reserve`, `sized`, `seal`, `retire`, `lock`."""
    at_seconds: float
    """Of `time.monotonic()`."""
    sizes: dict[str, int]


def read(directory: Path) -> list[Event]:
    """What every worker has written, in the order of time."""
    lines = [
        line for path in directory.glob(f"*{_SUFFIX}") for line in path.read_text().split("\n")
    ]
    events = [Event(**json.loads(line)) for line in lines if line]
    return sorted(events, key=lambda event: event.at_seconds)


def register() -> None:
    """Watch the worker of this process, if one is made."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: PLC0415 - in a worker alone

    init_device = WorkerWrapperBase.init_device

    def watched(wrapper: Any) -> None:
        book = _Book(Path(directory) / f"{os.getpid()}{_SUFFIX}", wrapper)
        _watch_manager(book)
        init_device(wrapper)
        _watch_sizing(wrapper.worker, book)

    WorkerWrapperBase.init_device = watched


@dataclass(frozen=True, slots=True)
class _Book:
    path: Path
    wrapper: Any

    def tell(self, name: str, **sizes: int) -> None:
        rank = getattr(self.wrapper.worker, "rank", 0)
        record = {
            "pid": os.getpid(),
            "rank": rank,
            "name": name,
            "at_seconds": time.monotonic(),
            "sizes": sizes,
        }
        with self.path.open("a") as file:
            file.write(f"{json.dumps(record)}\n")


def _watch_manager(book: _Book) -> None:
    """Note what is done to managers of Holdfast, of whatever class derived from ours."""
    from holdfast.workspace import accounting, manager  # noqa: PLC0415 - they import vLLM

    ours: Any = manager.WorkspaceManager
    retained_class: Any = accounting.RetainedMemory
    reserve, seal, lock, retire = ours.reserve, ours.seal, ours.lock, retained_class.retire

    def noted_reserve(manager: Any, reservations: Iterable[Any]) -> None:
        reserve(manager, reservations)
        book.tell("reserve", held_bytes=sum(manager.slot_sizes().values()))

    def noted_seal(manager: Any) -> None:
        was_sealed = manager.is_sealed
        seal(manager)
        if not was_sealed:
            book.tell("seal", held_bytes=sum(manager.slot_sizes().values()))
            _ask_for_more(manager)

    def noted_lock(manager: Any, limit_bytes: int | None = None) -> None:
        was_locked = manager.is_locked()
        lock(manager, limit_bytes)
        if not was_locked:
            book.tell("lock", held_bytes=sum(manager.slot_sizes().values()))

    def noted_retire(retained: Any, tensors: Iterable[Any]) -> None:
        kept = tuple(tensors)
        before = len(retained.retired)
        retire(retained, kept)
        if len(retained.retired) > before:
            book.tell("retire", retired_bytes=sum(t.nbytes for t in retained.retired))

    ours.reserve, ours.seal, ours.lock = noted_reserve, noted_seal, noted_lock
    retained_class.retire = noted_retire


def _ask_for_more(manager: Any) -> None:
    import torch  # noqa: PLC0415 - in a worker alone

    manager.get_simultaneous(((manager.slot_sizes()[0, 0] + 1,), torch.uint8))


def _watch_sizing(worker: Any, book: _Book) -> None:
    """Size the KV cache three times: to warm up, with what is reserved, and with more."""
    from vllm.v1.worker import workspace  # noqa: PLC0415 - in a worker alone

    from holdfast.workspace.plan import Reservation  # noqa: PLC0415 - as above

    determine: Callable[[], int] = worker.determine_available_memory
    runner = worker.model_runner

    def sized() -> int:
        available_bytes = determine()
        manager = workspace.current_workspace_manager()
        told = {
            "consumed_bytes": getattr(worker, "total_consumed", None),
            "peak_bytes": getattr(worker, "peak_activation_memory", None),
        }
        book.tell(
            "sized",
            available_bytes=available_bytes,
            workspace_bytes=sum(manager.slot_sizes().values()),
            **{name: int(size) for name, size in told.items() if size is not None},
        )
        return available_bytes

    def sized_thrice() -> int:
        determine()  # what is allocated once and for all is there from now on
        # vLLM captures graphs to estimate their memory; that once is enough, and the same.
        if estimate := getattr(runner, "profile_cudagraph_memory", None):
            estimate_bytes = getattr(worker, "cudagraph_memory_estimate", 0)
            runner.profile_cudagraph_memory = lambda: estimate_bytes
        sized()
        manager = workspace.current_workspace_manager()
        held_bytes = manager.slot_sizes()[0, 0]
        manager.reserve([Reservation((0, 0), (), held_bytes + ADDED_BYTES)])
        available_bytes = sized()
        if estimate:
            runner.profile_cudagraph_memory = estimate
        return available_bytes

    worker.determine_available_memory = sized_thrice
