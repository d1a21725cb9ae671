"""Where does scratch memory come from, and when may it grow? vLLM's manager, with a policy.

Three events restrict changes, in this order: the reservation (before the KV cache is sized), the
seal (a graph has captured addresses, so nothing is freed any more) and the lock (warm-up is over,
so growth follows the policy). Without `bind` it behaves like vLLM's own, including its refusals.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any

import torch
from vllm.v1.worker import workspace as vllm_workspace

from holdfast.workspace.accounting import RetainedMemory, WorkspaceAccounting
from holdfast.workspace.buffers import Allocator, ScratchBuffers, TensorSpec
from holdfast.workspace.growth import GrowthGate
from holdfast.workspace.plan import (
    RESERVE_GRANULE_BYTES,
    GrowthPolicy,
    Reservation,
    Slot,
    Term,
    growth_limit_bytes,
    round_up,
    terms_of,
)
from holdfast.workspace.resources import Resource, Resources
from holdfast.workspace.stats import StatsWriter

# Bound once, because the hot path has a budget of a fraction of a microsecond.
_lane = vllm_workspace._workspace_lane.get  # noqa: SLF001 - vLLM offers no reader of the lane
_is_tracing = torch.compiler.is_dynamo_compiling


class WorkspaceManager(vllm_workspace.WorkspaceManager):  # type: ignore[misc]  # vLLM is Any to us
    """vLLM's workspace manager with reservations, a seal, a growth policy and accounting."""

    _num_lanes: int
    _current_workspaces: list[torch.Tensor | None]
    _persistent_resources: list[dict[Hashable, object]]
    _locked: bool

    def __init__(
        self,
        device: torch.device,
        num_ubatches: int | None = None,
        num_lanes: int = 1,
        alloc_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        super().__init__(device, num_ubatches, num_lanes, alloc_context)
        self.slots: tuple[Slot, ...] = tuple(
            divmod(index, num_lanes) for index in range(len(self._current_workspaces))
        )
        self.accounting = WorkspaceAccounting(self.slots)
        self.declared: dict[tuple[str, tuple[int, ...]], Term] = {}
        """What models requested through `reserve_workspace`, by caller and lanes."""
        # Nothing below refers back to the manager: a dropped manager frees its memory at once.
        self._gate = GrowthGate(self.accounting, partial(_is_capturing, device))
        self._retained = RetainedMemory(self.accounting, self._persistent_resources)
        self._scratch = ScratchBuffers(
            self._current_workspaces,
            self.slots,
            Allocator(device, alloc_context),
            self._gate,
            self._retained,
        )
        self._resources = Resources(self._gate, self._retained, _current_resources)
        self._memos = self._scratch.memos
        self._given_limit_bytes: int | None = None

    def bind(
        self, stats: StatsWriter | None, policy: GrowthPolicy, growth_limit_bytes: int | None = None
    ) -> None:
        """Follow `policy` after the lock, and write what happens to `stats` from now on, if given.

        Without a limit, the lock sets the default: for each ubatch, the largest slot + 256 MiB.
        """
        with self._gate.changing:
            self._gate.rule.policy = policy
            self._given_limit_bytes = growth_limit_bytes
            self._gate.is_bound = True
            self.accounting.bind(stats)

    def set_policy(self, policy: GrowthPolicy) -> None:
        """Follow `policy` from now on, even if the manager is already locked."""
        with self._gate.changing:
            self._gate.rule.policy = policy

    def slot_sizes(self) -> dict[Slot, int]:
        """Return the current size of each slot in bytes."""
        return dict(zip(self.slots, self.accounting.size_bytes, strict=True))

    def unused_bytes(self) -> int:
        """Return what the slots hold beyond the largest request so far in any ubatch of their lane.

        A profile that is not split asks ubatch 0 alone; what the others got with it is not unused.
        """
        needed_bytes = self.accounting.high_water_bytes
        return sum(
            max(0, size_bytes - max(needed_bytes[lane :: self._num_lanes]))
            for (_, lane), size_bytes in self.slot_sizes().items()
        )

    # Life

    def reserve(self, reservations: Iterable[Reservation]) -> None:
        """Make each slot at least as large as its reservation; any thread may call it again.

        On the CPU the new bytes are written: memory that was never touched is not resident, so the
        sizing of the KV cache would miss it.
        """
        for reservation in reservations:
            self._scratch.reserve(self.slots.index(reservation.slot), reservation.size_bytes)

    def declare(self, term: Term) -> None:
        """Reserve `term` for each ubatch of its lanes before the lock, and keep it for the plan."""
        key = term.asked_by, term.lanes
        with self._gate.changing:
            known = self.declared.get(key)
            if known is None or known.needed_bytes < term.needed_bytes:
                self.declared[key] = term
            size_bytes = round_up(term.needed_bytes, RESERVE_GRANULE_BYTES)
            self.reserve(
                Reservation(slot, (term,), size_bytes)
                for slot in self.slots
                if terms_of(slot, (term,))
            )

    def equalize_ubatches(self) -> None:
        """Make the slots of each lane as large as the largest of them, if the manager is bound.

        After the lock it changes nothing, because growth is then for one slot only.
        """
        self._scratch.equalize_ubatches()

    def seal(self) -> None:
        """Free no buffer from now on, because a graph is about to capture addresses.

        After the lock it changes no buffer. What has grown since then counts towards the limit.
        """
        with self._gate.changing:
            self._scratch.equalize_ubatches()
            self.accounting.set_lock(is_sealed=True, is_locked=self._locked)

    @property
    def is_sealed(self) -> bool:
        """Whether buffers may no longer be freed."""
        return self.accounting.is_sealed

    def lock(self, limit_bytes: int | None = None) -> None:
        """Let growth follow the policy from now on; `limit_bytes` overrides the limit of `bind`.

        Locking a locked manager again changes only the limit, if one is given.
        """
        rule = self._gate.rule
        with self._gate.changing:
            if not self._locked:
                self._scratch.equalize_ubatches()
                self._retained.update()
                rule.locked_bytes = self.accounting.held_bytes
                rule.limit_bytes = growth_limit_bytes(self._given_limit_bytes, self.slot_sizes())
            if limit_bytes is not None:
                rule.limit_bytes = limit_bytes
            super().lock()
            self.accounting.set_lock(is_sealed=self.is_sealed, is_locked=True)

    def unlock(self) -> None:
        """Allow growth again until the next lock; the seal stays, so nothing is freed.

        vLLM unlocks around elastic EP, after it has released the graphs of the target model. Those
        of an encoder or a draft model may still exist, so retired buffers stay until the manager
        goes, and the limit of the next lock counts from there.
        """
        with self._gate.changing:
            super().unlock()
            self.accounting.set_lock(is_sealed=self.is_sealed, is_locked=False)

    def is_locked(self) -> bool:
        """Return whether warm-up is over; False in a thread whose permute scratch may grow now."""
        return self._locked and not self._resources.is_admitted()

    # Requests

    def get_simultaneous(self, *shapes_and_dtypes: TensorSpec) -> list[torch.Tensor]:
        """Return views into the slot of this thread and lane, one per spec, that do not overlap.

        A repeated request costs one look-up: the list is new, the tensors are the same. It is not
        counted again, so its size is reported for the caller that made it first.
        """
        if _is_tracing():
            traced: list[torch.Tensor] = super().get_simultaneous(*shapes_and_dtypes)
            return traced
        index = self._get_workspace_id()
        try:
            views = self._memos[index].get(shapes_and_dtypes)
        except TypeError:  # a shape that is a list
            views = None
        return self._scratch.new_views(index, shapes_and_dtypes) if views is None else [*views]

    def get_persistent_resource(self, key: Hashable, factory: Callable[[], Resource]) -> Resource:
        """Do as vLLM; with `alongside` also after the lock, within the limit once sealed.

        What a late resource needs is known once its factory has run for any slot. So the first one
        counts towards the limit of the next growth, and later ones with the same key must fit.
        """
        of_slot = self._persistent_resources[self._get_workspace_id()]
        return self._resources.get(of_slot, key, factory)

    def get_persistent(
        self,
        key: Hashable,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        zero_init: bool = False,
    ) -> torch.Tensor:
        """Do as vLLM; after the lock as `get_persistent_resource`, with a known size."""
        if self._locked:
            self._resources.expect((torch.Tensor, key), prod(shape) * dtype.itemsize)
        tensor: torch.Tensor = super().get_persistent(key, shape, dtype, zero_init=zero_init)
        return tensor

    def _get_workspace_id(self) -> int:
        lane = _lane()
        if lane >= self._num_lanes:
            super()._get_workspace_id()  # raises vLLM's error
        # Looked up each time: tests of vLLM and of ours replace it in vLLM's module.
        index: int = vllm_workspace.dbo_current_ubatch_id() * self._num_lanes + lane
        return index

    def _ensure_workspace_size(self, required_bytes: int) -> torch.Tensor:
        return self._scratch.buffer_of(self._get_workspace_id(), required_bytes)


def bound_class(bind: Callable[[WorkspaceManager], None]) -> type[WorkspaceManager]:
    """Return a manager class that passes each new object to `bind`.

    vLLM makes a new manager without notice whenever an engine is rebuilt in its process.
    """

    class BoundWorkspaceManager(WorkspaceManager):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            bind(self)

    return BoundWorkspaceManager


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def _current_resources() -> Resources | None:
    """Return the resources of this process's manager, if it is one of ours."""
    if not vllm_workspace.is_workspace_manager_initialized():
        return None
    manager = vllm_workspace.current_workspace_manager()
    return manager._resources if isinstance(manager, WorkspaceManager) else None  # noqa: SLF001
