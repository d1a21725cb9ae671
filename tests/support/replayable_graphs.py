"""A device with graphs, on the CPU: what a capture recorded is computed again at its addresses.

As on a GPU a graph keeps nothing alive. Where memory was freed, its replay is an error, as it is
one on a GPU that does not happen to be survived.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class IllegalMemoryAccessError(RuntimeError):
    """A graph read or wrote what was freed."""


@dataclass(frozen=True)
class _Address:
    """A tensor, without what keeps it alive."""

    storage: StorageWeakRef
    pointer: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> torch.Tensor:
        """What is there now."""
        if self.storage.expired():
            raise IllegalMemoryAccessError(f"nothing is at {self.pointer:#x} any more")
        size_bytes = self.dtype.itemsize * torch.Size(self.shape).numel()
        memory = (ctypes.c_uint8 * size_bytes).from_address(self.pointer)
        return torch.frombuffer(memory, dtype=self.dtype).view(self.shape)


class _Recorder(TorchDispatchMode):  # type: ignore[misc]  # torch is Any to us
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function._schema.is_mutable:
            self.calls.append((function, [_addressed(argument) for argument in args]))
        return function(*args, **(kwargs or {}))


def recorded(function: Callable[[], None]) -> Callable[[], None]:
    """What replays `function`, which is run before the capture and in it, as on a GPU."""
    function()
    with _Recorder() as recorder:
        function()

    def replay() -> None:
        for operator, arguments in recorder.calls:
            operator(*[a.tensor() if isinstance(a, _Address) else a for a in arguments])

    return replay


def _addressed(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return argument
    storage = StorageWeakRef(argument.untyped_storage())
    return _Address(storage, argument.data_ptr(), tuple(argument.shape), argument.dtype)
