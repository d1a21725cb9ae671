"""The third refusal: MoE permute scratch, which vLLM keeps beside the workspaces and grows by rows.

vLLM's `MoEPermuteScratch.reserve` knows the lock but neither the growth policy nor the seal: before
the lock it frees tensors whose addresses graphs may hold, and after it nothing is ever granted.
Importing its module costs seconds, so the class is met when a manager first makes one of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Protocol

import torch

from holdfast.records import GrowthPhase, Rejection
from holdfast.workspace.buffers import first_frame
from holdfast.workspace.growth import permute_message

MODULE = "vllm.model_executor.layers.fused_moe.moe_permute_unpermute"
CLASS_NAME = "MoEPermuteScratch"
_MARK = "_is_followed_by_holdfast"
_ROW_TENSORS = 7
_ROW_ITEM_BYTES = 4


class Owner(Protocol):
    """What this needs of a manager; `WorkspaceManager` says what each does."""

    @property
    def phase(self) -> GrowthPhase:
        """How far the manager is closed to change."""

    def growing(
        self, request: Rejection, message: Callable[[str], str]
    ) -> AbstractContextManager[None]:
        """Entered around growth outside of the slots, or refused."""

    def replaced(self, tensors: list[torch.Tensor]) -> None:
        """Count a growth outside of the slots, and keep `tensors` where that is due."""


def follow(made: object, owner_of: Callable[[], Owner | None]) -> None:
    """If `made` is MoE permute scratch, its class asks the owner from now on before it grows.

    The owner is asked for at each growth, since vLLM may replace its manager. Without one the class
    stays vLLM's own.
    """
    kind: Any = type(made)
    if (kind.__module__, kind.__name__) == (MODULE, CLASS_NAME) and _MARK not in vars(kind):
        kind.reserve = _followed(kind.reserve, owner_of)
        setattr(kind, _MARK, True)


def needed_bytes(scratch: Any, rows: int) -> int:
    """What `scratch` allocates to hold `rows`: seven tensors of int32, and room for the sorter."""
    sorter: int = torch.ops._moe_C.moe_permute_sort_workspace_size(  # noqa: SLF001 - so it is called
        rows, scratch.num_experts
    )
    return rows * _ROW_TENSORS * _ROW_ITEM_BYTES + sorter


def _followed(
    reserve: Callable[[Any, int], None], owner_of: Callable[[], Owner | None]
) -> Callable[[Any, int], None]:
    @functools.wraps(reserve)
    def followed(scratch: Any, expanded_rows: int) -> None:
        held_rows = scratch.max_expanded_rows
        if expanded_rows <= held_rows:
            return
        owner = owner_of()
        if owner is None:
            reserve(scratch, expanded_rows)
            return
        _grow(scratch, expanded_rows, owner, reserve)

    return followed


def _grow(scratch: Any, rows: int, owner: Owner, reserve: Callable[[Any, int], None]) -> None:
    held_rows: int = scratch.max_expanded_rows
    before = _tensors(scratch) if held_rows else {}
    request = Rejection(
        "permute",
        first_frame(_is_outside),
        needed_bytes(scratch, rows),
        sum(tensor.nbytes for tensor in before.values()),
        f"needs {rows} rows, holds {held_rows}",
    )
    message = functools.partial(permute_message, rows, held_rows, owner.phase)
    with owner.growing(request, message):
        try:
            reserve(scratch, rows)
        finally:
            # Also after half of it: what is no longer referenced may stand in a graph.
            after = _tensors(scratch)
            old = [tensor for name, tensor in before.items() if after[name] is not tensor]
            if old:
                owner.replaced(old)


def _tensors(scratch: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(scratch).items() if isinstance(value, torch.Tensor)}


def _is_outside(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") not in {__name__, MODULE}
