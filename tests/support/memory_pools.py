"""vLLM's pool for scratch and the graphs that point into it, as far as a test needs them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DISCARDED = 127
"""The bytes of memory after a sleep has discarded its content."""


class Pool(TorchDispatchMode):  # type: ignore[misc]  # torch is Any to us
    """vLLM's pool for scratch: in sleep it discards contents and keeps addresses.

    As in vLLM, memory stays in the pool as long as any view of it lives.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self._made.append(weakref.ref(made.untyped_storage()))
        return made

    def tensors(self) -> list[torch.Tensor]:
        """The bytes of each allocation that lives."""
        storages = [reference() for reference in self._made]
        return [
            torch.empty(0, dtype=torch.uint8).set_(storage)
            for storage in storages
            if storage is not None
        ]

    def sleep(self) -> None:
        """Discard what stands in it."""
        for tensor in self.tensors():
            tensor.fill_(DISCARDED)


class Graphs:
    """What graphs have captured: addresses, which keep nothing alive."""

    def __init__(self) -> None:
        self._captured: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}

    def capture(self, buffer: torch.Tensor) -> None:
        """Remember where the buffer lies."""
        self._captured[buffer.data_ptr()] = (buffer.numel(), weakref.ref(buffer))

    def check(self) -> None:
        """Raise AssertionError if a replay would write into freed memory."""
        for address, (size_bytes, reference) in self._captured.items():
            buffer = reference()
            assert buffer is not None, "a captured buffer is freed"
            assert (buffer.data_ptr(), buffer.numel()) == (address, size_bytes)
