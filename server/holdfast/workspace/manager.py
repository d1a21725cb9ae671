"""Where does scratch memory come from, and when may it grow? vLLM's manager, with a policy.

Three moments close it to change, in this order: the reservation (before the KV cache is sized), the
seal (a graph has captured addresses: nothing is freed any more) and the lock (warm-up is over:
growth follows the policy). Without `bind` it behaves as vLLM's own, refusals included.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from vllm.v1.worker import workspace as vllm_workspace

from holdfast.workspace.accounting import Books, Holdings
from holdfast.workspace.buffers import Allocator, Scratch, Spec
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
from holdfast.workspace.resources import Resources
from holdfast.workspace.stats import StatsWriter

Resource = TypeVar("Resource")

# Bound once, because the hot path has a budget of a fraction of a microsecond.
_lane = vllm_workspace._workspace_lane.get  # noqa: SLF001 - vLLM offers no reader of the lane
_is_tracing = torch.compiler.is_dynamo_compiling


class WorkspaceManager(vllm_workspace.WorkspaceManager):  # type: ignore[misc]  # vLLM is Any to us
    """vLLM's workspace manager with reservations, a seal, a growth policy and books."""

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
        self.books = Books(self.slots)
        self.declared: dict[tuple[str, tuple[int, ...]], Term] = {}
        """What models asked for through `reserve_workspace`, by caller and lanes."""
        # Nothing below refers back to the manager, so that one that is dropped frees at once.
        self._gate = GrowthGate(self.books, partial(_is_capturing, device))
        self._holdings = Holdings(self.books, self._persistent_resources)
        self._scratch = Scratch(
            self._current_workspaces,
            self.slots,
            Allocator(device, alloc_context),
            self._gate,
            self._holdings,
        )
        self._resources = Resources(self._gate, self._holdings, _current_resources)
        self._memos = self._scratch.memos
        self._given_limit_bytes: int | None = None

    def bind(
        self, stats: StatsWriter | None, policy: GrowthPolicy, growth_limit_bytes: int | None = None
    ) -> None:
        """Follow `policy` after the lock, and keep the books in `stats`, if any, from now on.

        Without a limit, the lock sets the default: the largest slot and 256 MiB.
        """
        with self._gate.changing:
            self._gate.rule.policy = policy
            self._given_limit_bytes = growth_limit_bytes
            self._scratch.is_levelled = True
            self.books.bind(stats)

    def set_policy(self, policy: GrowthPolicy) -> None:
        """Follow `policy` from now on, also if the manager is locked already."""
        with self._gate.changing:
            self._gate.rule.policy = policy

    def slot_sizes(self) -> dict[Slot, int]:
        """The current size of each slot in bytes."""
        return dict(zip(self.slots, self.books.size_bytes, strict=True))

    def unasked_bytes(self) -> int:
        """What the slots hold beyond the largest request of each: reserved, and not yet needed."""
        books = self.books
        sizes = zip(books.size_bytes, books.high_water_bytes, strict=True)
        return sum(max(0, size_bytes - needed_bytes) for size_bytes, needed_bytes in sizes)

    # Life

    def reserve(self, reservations: Iterable[Reservation]) -> None:
        """Make each slot at least as large as its reservation, whichever thread asks.

        On the CPU the new bytes are written, because memory that was never touched is not resident
        and so not seen by the sizing of the KV cache. Doing it again changes nothing.
        """
        for reservation in reservations:
            self._scratch.reserve(self.slots.index(reservation.slot), reservation.size_bytes)

    def declare(self, term: Term) -> None:
        """Reserve `term` for each ubatch of its lanes before the lock; kept for the plan."""
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

    def level(self) -> None:
        """Make the ubatches of each lane alike, if it is bound: as large as the largest of them.

        After the lock it changes nothing: growth is then for the slot that asks, see `lock`.
        """
        self._scratch.level()

    def seal(self) -> None:
        """From now on no buffer is freed: a graph is about to capture addresses.

        After the lock it changes no buffer, and what grew since the lock counts towards the limit.
        """
        with self._gate.changing:
            self._scratch.level()
            self.books.closed(is_sealed=True, is_locked=self._locked)

    @property
    def is_sealed(self) -> bool:
        """Whether buffers may no longer be freed."""
        return self.books.is_sealed

    def lock(self, limit_bytes: int | None = None) -> None:
        """From now on growth follows the policy; `limit_bytes` wins over the limit of `bind`.

        Locking a locked manager again changes the limit only, if one is given.
        """
        rule = self._gate.rule
        with self._gate.changing:
            if not self._locked:
                self._scratch.level()
                self._holdings.weigh()
                rule.locked_bytes = self.books.held_bytes
                rule.limit_bytes = growth_limit_bytes(self._given_limit_bytes, self.slot_sizes())
            if limit_bytes is not None:
                rule.limit_bytes = limit_bytes
            super().lock()
            self.books.closed(is_sealed=self.is_sealed, is_locked=True)

    def unlock(self) -> None:
        """Growth is free again until the next lock, but the seal stays: nothing is freed.

        vLLM unlocks around elastic EP, after it released the graphs of the target model; those of
        an encoder or of a draft model may live. So what is retired stays so as long as the manager
        lives, on the books, and the limit of the next lock counts from there.
        """
        with self._gate.changing:
            super().unlock()
            self.books.closed(is_sealed=self.is_sealed, is_locked=False)

    def is_locked(self) -> bool:
        """Whether warm-up is over; not for a thread of permute scratch whose growth is admitted."""
        return self._locked and not self._resources.is_admitted()

    # Requests

    def get_simultaneous(self, *shapes_and_dtypes: Spec) -> list[torch.Tensor]:
        """Views into the slot of this thread and lane, one per spec, that do not overlap.

        A spec that was asked before costs one look-up: the list is new, the tensors are the same.
        So nothing is entered in the books then: its need stands with the caller that first had it.
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
        """As in vLLM; under `alongside` also after the lock, within the limit once sealed.

        What a late resource needs is known once its factory ran for any slot: the first one counts
        towards the limit of the next growth, and under the same key the next one is held to it.
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
        """As in vLLM; after the lock as `get_persistent_resource`, with a need that is known."""
        if self._locked:
            self._resources.will_need((torch.Tensor, key), prod(shape) * dtype.itemsize)
        tensor: torch.Tensor = super().get_persistent(key, shape, dtype, zero_init=zero_init)
        return tensor

    def _get_workspace_id(self) -> int:
        lane = _lane()
        if lane >= self._num_lanes:
            super()._get_workspace_id()  # raises vLLM's error
        # Not bound once: tests of vLLM and of ours replace it in vLLM's module.
        index: int = vllm_workspace.dbo_current_ubatch_id() * self._num_lanes + lane
        return index

    def _ensure_workspace_size(self, required_bytes: int) -> torch.Tensor:
        return self._scratch.buffer_of(self._get_workspace_id(), required_bytes)


def bound_class(bind: Callable[[WorkspaceManager], None]) -> type[WorkspaceManager]:
    """A manager class whose objects are handed to `bind` as soon as they are made.

    vLLM makes a new manager whenever an engine is rebuilt in its process, and tells nobody.
    """

    class BoundWorkspaceManager(WorkspaceManager):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            bind(self)

    return BoundWorkspaceManager


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def _current_resources() -> Resources | None:
    """Those of the manager of this process, if it is one of ours."""
    if not vllm_workspace.is_workspace_manager_initialized():
        return None
    manager = vllm_workspace.current_workspace_manager()
    return manager._resources if isinstance(manager, WorkspaceManager) else None  # noqa: SLF001
