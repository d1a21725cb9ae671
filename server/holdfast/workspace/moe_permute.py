"""MoE permute scratch, which vLLM keeps besides the workspaces and grows by rows.

vLLM's `MoEPermuteScratch.reserve` knows the lock but neither the growth policy nor the seal: before
the lock it frees tensors although graphs may hold their addresses, and after it nothing may grow.
Importing its module takes seconds, so the class is changed when a manager first creates an object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Protocol

import torch

from holdfast.labels import GrowthPhase
from holdfast.records import Rejection
from holdfast.workspace.buffers import nearest_caller
from holdfast.workspace.growth import permute_message

MODULE = "vllm.model_executor.layers.fused_moe.moe_permute_unpermute"
CLASS_NAME = "MoEPermuteScratch"
_MARK = "_is_guarded_by_holdfast"
_ROW_TENSORS = 7
_ROW_ITEM_BYTES = 4


class Owner(Protocol):
    """Decides whether permute scratch may grow. `resources.Resources` imports this module."""

    @property
    def phase(self) -> GrowthPhase:
        """Which rules of growth apply now."""

    def growing(
        self, request: Rejection, message: Callable[[str], str], *, is_first_use: bool
    ) -> AbstractContextManager[None]:
        """Admit growth outside the slots while entered, or refuse it."""

    def record_replacement(self, tensors: list[torch.Tensor]) -> None:
        """Count a growth outside the slots; once sealed, keep the old `tensors` alive."""


def guard(resource: object, owner_of: Callable[[], Owner | None]) -> None:
    """If `resource` is MoE permute scratch, have its class ask the owner before it grows.

    The owner is looked up at each growth, because vLLM may replace its manager. Without one, the
    class behaves like vLLM's own.
    """
    kind: Any = type(resource)
    if (kind.__module__, kind.__name__) == (MODULE, CLASS_NAME) and _MARK not in vars(kind):
        kind.reserve = _guarded(kind.reserve, owner_of)
        setattr(kind, _MARK, True)


def needed_bytes(scratch: Any, rows: int) -> int:
    """Return what `scratch` allocates for `rows`: seven int32 tensors, and the sorter's space."""
    sorter: int = torch.ops._moe_C.moe_permute_sort_workspace_size(  # noqa: SLF001 - so it is called
        rows, scratch.num_experts
    )
    return rows * _ROW_TENSORS * _ROW_ITEM_BYTES + sorter


def _guarded(
    reserve: Callable[[Any, int], None], owner_of: Callable[[], Owner | None]
) -> Callable[[Any, int], None]:
    @functools.wraps(reserve)
    def guarded(scratch: Any, expanded_rows: int) -> None:
        held_rows = scratch.max_expanded_rows
        if expanded_rows <= held_rows:
            return
        owner = owner_of()
        if owner is None:
            reserve(scratch, expanded_rows)
            return
        _grow(scratch, expanded_rows, owner, reserve)

    return guarded


def _grow(scratch: Any, rows: int, owner: Owner, reserve: Callable[[Any, int], None]) -> None:
    held_rows: int = scratch.max_expanded_rows
    before = _tensors(scratch) if held_rows else {}
    request = Rejection(
        "permute",
        nearest_caller(_is_outside),
        needed_bytes(scratch, rows),
        sum(tensor.nbytes for tensor in before.values()),
        f"needs {rows} rows, holds {held_rows}",
    )
    message = functools.partial(permute_message, rows, held_rows, owner.phase)
    with owner.growing(request, message, is_first_use=not held_rows):
        try:
            reserve(scratch, rows)
        finally:
            # Even if it failed halfway: a graph may use what is no longer referenced.
            after = _tensors(scratch)
            old = [tensor for name, tensor in before.items() if after[name] is not tensor]
            if old:
                owner.record_replacement(old)


def _tensors(scratch: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(scratch).items() if isinstance(value, torch.Tensor)}


def _is_outside(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") not in {__name__, MODULE}
