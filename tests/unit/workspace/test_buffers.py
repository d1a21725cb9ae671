"""The hot path of the workspace manager: which tensors does a request get?"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.worker import workspace

from holdfast.workspace.buffers import MAX_MEMO_ENTRIES
from holdfast.workspace.manager import WorkspaceManager
from holdfast.workspace.plan import MIB, Reservation
from workspace_managers import CPU, held, view

SPECS = (((4, 128), torch.bfloat16), ((256, 3), torch.int32), ((7,), torch.int32))


class OperationCounter(TorchDispatchMode):  # type: ignore[misc]  # torch is Any to us
    """Counts the calls of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_known_spec_makes_no_tensor() -> None:
    """The second request runs no torch operation and returns the same tensors in a new list."""
    manager = WorkspaceManager(CPU)
    first = manager.get_simultaneous(*SPECS)
    with OperationCounter() as counter:
        second = manager.get_simultaneous(*SPECS)
    assert counter.count == 0
    assert all(a is b for a, b in zip(first, second, strict=True))
    second.clear()
    assert len(manager.get_simultaneous(*SPECS)) == 3


def test_a_growth_invalidates_known_specs() -> None:
    """After growth, a known spec is served from the new buffer."""
    manager = WorkspaceManager(CPU)
    (before,) = manager.get_simultaneous(((16,), torch.int32))
    manager.get_simultaneous(((MIB,), torch.int32))
    (after,) = manager.get_simultaneous(((16,), torch.int32))
    buffer = manager._current_workspaces[0]
    assert buffer is not None
    assert after.data_ptr() == buffer.data_ptr() != before.data_ptr()


def test_a_reservation_invalidates_known_specs() -> None:
    """The memo never keeps a buffer alive that a reservation has replaced."""
    manager = WorkspaceManager(CPU)
    old = weakref.ref(manager.get_simultaneous(((16,), torch.int32))[0])
    manager.reserve([Reservation((0, 0), (), 2 * MIB)])
    gc.collect()
    assert old() is None


def test_views_of_a_buffer_that_was_replaced_meanwhile_are_not_remembered() -> None:
    """A thread that a reservation overtook does not keep the old buffer alive."""
    manager = WorkspaceManager(CPU)
    old = torch.empty(64, dtype=torch.uint8)
    manager.reserve([Reservation((0, 0), (), 2 * MIB)])
    manager._scratch.remember(0, old, (((64,), torch.uint8),), (old,))
    assert manager.get_simultaneous(((64,), torch.uint8))[0] is not old


def test_the_memo_is_bounded() -> None:
    """A stream of new sizes does not fill the host's memory."""
    manager = WorkspaceManager(CPU)
    view(manager, 2 * MAX_MEMO_ENTRIES)  # growth would empty the memo
    for size in range(MAX_MEMO_ENTRIES + 10):
        view(manager, size)
    assert len(manager._memos[0]) <= MAX_MEMO_ENTRIES


def test_shapes_that_are_lists_are_served() -> None:
    """Our manager accepts every spec that vLLM's accepts, known or not."""
    manager = WorkspaceManager(CPU)
    for _ in range(2):
        (view,) = manager.get_simultaneous(([2, 3], torch.float32))  # type: ignore[arg-type]
        assert view.shape == (2, 3)


def test_empty_requests_are_served() -> None:
    """No spec gives no view, and a spec without elements an empty one, even after the lock."""
    manager = WorkspaceManager(CPU)
    manager.lock()
    assert manager.get_simultaneous() == []
    (view,) = manager.get_simultaneous(((0, 4), torch.float32))
    assert view.shape == (0, 4)
    assert manager.accounting.growths["locked"] == 0


def test_a_buffer_made_in_inference_mode_serves_outside_of_it() -> None:
    """An inference tensor could be written only in that mode, not when a sleep discards it."""
    manager = WorkspaceManager(CPU)
    with torch.inference_mode():
        view(manager, MIB)
    assert held(manager).zero_().sum() == 0


def test_views_made_in_inference_mode_serve_outside_of_it() -> None:
    """A remembered view can be written in either mode."""
    manager = WorkspaceManager(CPU)
    manager.reserve([Reservation((0, 0), (), 2 * MIB)])
    with torch.inference_mode():
        manager.get_simultaneous(((4,), torch.float32))[0].fill_(1)
    assert manager.get_simultaneous(((4,), torch.float32))[0].fill_(2).sum() == 8


def test_each_caller_and_slot_has_a_high_water() -> None:
    """The largest need is kept with the line that had it, aligned as vLLM aligns it."""
    manager = WorkspaceManager(CPU)

    def small() -> None:
        manager.get_simultaneous(((10,), torch.uint8))

    def large() -> None:
        manager.get_simultaneous(((1000,), torch.uint8), ((1,), torch.uint8))

    large()
    small()
    assert manager.accounting.high_water_bytes == [1024 + 256]
    assert manager.accounting.high_water_callers[0].endswith(":large")
    assert {name.split(":")[2]: size for name, size in manager.accounting.callers.items()} == {
        "small": 256,
        "large": 1280,
    }


def test_compiled_code_gets_the_same_views() -> None:
    """With torch.compile, a request is served from the buffer of its slot, as without it."""
    manager = WorkspaceManager(CPU, num_lanes=2)
    manager.get_simultaneous(((64,), torch.float32))

    def fill(value: torch.Tensor) -> torch.Tensor:
        (view,) = manager.get_simultaneous(((8,), torch.float32))
        return view.copy_(value)

    with workspace.use_workspace_lane(1):
        (eager,) = manager.get_simultaneous(((8,), torch.float32))
        torch.compile(fill, backend="eager")(torch.full((8,), 3.0))
    assert eager.tolist() == [3.0] * 8
