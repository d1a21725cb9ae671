"""Where does scratch memory come from, and when may it grow? vLLM's manager, with a policy.

Three moments close it to change, in this order: the reservation (before the KV cache is sized), the
seal (a graph has captured addresses: nothing is freed any more) and the lock (warm-up is over:
growth follows the policy). Without `bind` it behaves as vLLM's own, refusals included.

Two ubatches run the same layers, but vLLM's metadata builders and its unsplit dummy runs ask in
slot 0 alone. So once it is bound, what one ubatch needs before the lock every ubatch of its lane
gets, at once: early enough for the sizing of the KV cache and for the addresses of the graphs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from math import prod
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast

import torch
from vllm.v1.worker import workspace as vllm_workspace

from holdfast.errors import HoldfastError
from holdfast.records import GrowthPhase, Rejection
from holdfast.workspace import permute
from holdfast.workspace.books import Books
from holdfast.workspace.callers import first_frame
from holdfast.workspace.footprint import tensor_bytes
from holdfast.workspace.growth import GrowthRule, resource_message, scratch_message
from holdfast.workspace.plan import (
    MIB,
    RESERVE_GRANULE_BYTES,
    GrowthPolicy,
    Reservation,
    Slot,
    Term,
    growth_limit_bytes,
    round_up,
)
from holdfast.workspace.stats import StatsSink

logger = logging.getLogger(__name__)

Resource = TypeVar("Resource")
Spec = tuple[tuple[int, ...], torch.dtype]
MEMO_ENTRIES = 1024
"""Most specs that a slot remembers; its memo starts afresh beyond, at a few MiB of host memory."""
_ALIGNMENT_BYTES = 256

# Bound once, because the hot path has a budget of a fraction of a microsecond.
_lane = vllm_workspace._workspace_lane.get  # noqa: SLF001 - vLLM offers no reader of the lane
_is_tracing = torch.compiler.is_dynamo_compiling


def spec_bytes(specs: Iterable[Spec]) -> int:
    """What `get_simultaneous` needs for `specs`: each aligned to 256 bytes, as in vLLM."""
    return sum(round_up(prod(shape) * dtype.itemsize, _ALIGNMENT_BYTES) for shape, dtype in specs)


class WorkspaceManager(vllm_workspace.WorkspaceManager):  # type: ignore[misc]  # vLLM is Any to us
    """vLLM's workspace manager with reservations, a seal, a growth policy and books.

    It has vLLM's name because vLLM skips frames of `WorkspaceManager.` when it looks for a caller.
    """

    _device: torch.device
    _alloc_context: Callable[[], AbstractContextManager[object]]
    _num_ubatches: int
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
        self.declared: dict[str, Term] = {}
        """What models asked for through `reserve_workspace`, by caller."""
        self._memos: list[dict[tuple[Spec, ...], tuple[torch.Tensor, ...]]] = [
            {} for _ in self.slots
        ]
        self._retired: list[torch.Tensor] = []
        self._resource_bytes: dict[Hashable, int] = {}
        """What a resource held when it was made, by key: what it will need in another slot."""
        self._rule = GrowthRule()
        self._given_limit_bytes: int | None = None
        self._is_bound = False
        # Ubatches run in threads of their own. Reentrant: an allocation may end in a callback.
        self._changing = threading.RLock()
        self._admitted_thread: int | None = None

    def bind(
        self, stats: StatsSink, policy: GrowthPolicy, growth_limit_bytes: int | None = None
    ) -> None:
        """Follow `policy` after the lock, and keep the books in `stats` from now on.

        Without a limit, the lock sets the default: the largest slot and 256 MiB.
        """
        with self._changing:
            self._rule.policy = policy
            self._given_limit_bytes = growth_limit_bytes
            self._is_bound = True
            self.books.bind(stats)

    def set_policy(self, policy: GrowthPolicy) -> None:
        """Follow `policy` from now on, also if the manager is locked already."""
        with self._changing:
            self._rule.policy = policy

    def slot_sizes(self) -> dict[Slot, int]:
        """The current size of each slot in bytes."""
        return dict(zip(self.slots, self.books.size_bytes, strict=True))

    def total_size_bytes(self) -> int:
        """The current size of all slots together."""
        return sum(self.books.size_bytes)

    # Life

    def reserve(self, reservations: Iterable[Reservation]) -> None:
        """Make each slot at least as large as its reservation, whichever thread asks.

        On the CPU the new bytes are written, because memory that was never touched is not resident
        and so not seen by the sizing of the KV cache. Doing it again changes nothing.
        """
        for reservation in reservations:
            with self._changing:
                index = self.slots.index(reservation.slot)
                if self.books.size_bytes[index] < reservation.size_bytes:
                    self._fill(index, reservation.size_bytes)
                self.books.reserved(index, reservation.size_bytes)

    def declare(self, term: Term) -> None:
        """Reserve `term` in every slot before the lock, and keep it for the plan."""
        with self._changing:
            known = self.declared.get(term.asked_by)
            if known is None or known.needed_bytes < term.needed_bytes:
                self.declared[term.asked_by] = term
            size_bytes = round_up(term.needed_bytes, RESERVE_GRANULE_BYTES)
            self.reserve(Reservation(slot, (term,), size_bytes) for slot in self.slots)

    def level(self) -> None:
        """Make the ubatches of each lane alike, if it is bound: as large as the largest of them.

        After the lock it changes nothing: growth is then for the slot that asks, see `lock`.
        """
        with self._changing:
            for index in range(len(self.slots)):
                size_bytes = self._levelled_bytes(index)
                if self.books.size_bytes[index] < size_bytes:
                    self._replace(index, size_bytes, is_touched=True)

    def seal(self) -> None:
        """From now on no buffer is freed: a graph is about to capture addresses.

        After the lock it changes no buffer, and what grew since the lock counts towards the limit.
        """
        with self._changing:
            self.level()
            self.books.closed(is_sealed=True, is_locked=self._locked)

    @property
    def is_sealed(self) -> bool:
        """Whether buffers may no longer be freed."""
        return self.books.is_sealed

    def lock(self, limit_bytes: int | None = None) -> None:
        """From now on growth follows the policy; `limit_bytes` wins over the limit of `bind`.

        Locking a locked manager again changes the limit only, if one is given.
        """
        with self._changing:
            if not self._locked:
                self.level()
                self._weigh_holdings()
                self._rule.locked_bytes = self.books.held_bytes
                self._rule.limit_bytes = growth_limit_bytes(
                    self._given_limit_bytes, self.slot_sizes()
                )
            if limit_bytes is not None:
                self._rule.limit_bytes = limit_bytes
            super().lock()
            self.books.closed(is_sealed=self.is_sealed, is_locked=True)

    def unlock(self) -> None:
        """Growth is free again until the next lock, but the seal stays: nothing is freed.

        vLLM unlocks around elastic EP, after it released the graphs of the target model; those of
        an encoder or of a draft model may live. So what is retired stays so as long as the manager
        lives, on the books, and the limit of the next lock counts from there.
        """
        with self._changing:
            super().unlock()
            self.books.closed(is_sealed=self.is_sealed, is_locked=False)

    def is_locked(self) -> bool:
        """Whether warm-up is over; not for the thread whose growth is admitted, see `growing`."""
        return self._locked and self._admitted_thread != threading.get_ident()

    # Requests

    def get_simultaneous(self, *shapes_and_dtypes: Spec) -> list[torch.Tensor]:
        """Views into the slot of this thread and lane, one per spec, that do not overlap.

        A spec that was asked before costs one look-up: the list is new, the tensors are the same.
        So nothing is entered in the books then: its need stands with the caller that first had it.
        """
        if _is_tracing():
            traced: list[torch.Tensor] = super().get_simultaneous(*shapes_and_dtypes)
            return traced
        try:
            views = self._memos[self._get_workspace_id()].get(shapes_and_dtypes)
        except TypeError:  # a shape that is a list
            views = None
        return self._new_views(shapes_and_dtypes) if views is None else [*views]

    def get_persistent_resource(self, key: Hashable, factory: Callable[[], Resource]) -> Resource:
        """As in vLLM; under `alongside` also after the lock, within the limit once sealed.

        What a late resource needs is known once its factory ran for any slot: the first one counts
        towards the limit of the next growth, and under the same key the next one is held to it. The
        factory runs outside of our lock, because it is foreign code.
        """
        resources = self._persistent_resources[self._get_workspace_id()]
        if key not in resources:
            if self._locked:
                self._check_late_resource(key)
            try:
                made = factory()
            except torch.OutOfMemoryError as error:
                if self._locked:
                    self._refuse_resource(key, f"out of memory: {error}")
                raise
            permute.follow(made, _current)
            with self._changing:
                resources[key] = made
                self._resource_bytes[key] = tensor_bytes([made])
                self._weigh_holdings()
                if self._locked:
                    self.books.grew(self.phase)
        return cast("Resource", resources[key])

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
            self._resource_bytes[torch.Tensor, key] = prod(shape) * dtype.itemsize
        tensor: torch.Tensor = super().get_persistent(key, shape, dtype, zero_init=zero_init)
        return tensor

    @contextmanager
    def growing(self, request: Rejection, message: Callable[[str], str]) -> Iterator[None]:
        """Entered around growth outside of the slots; refused if what `request` needs may not be.

        `request` becomes the rejection: its reason names what is needed, and why not is added.
        `message` makes of the latter what is raised.
        """
        with self._changing:
            reason = self._reason_against(request.needed_bytes)
            if reason:
                self.refuse(_because(request, reason), message(reason))
            self._admitted_thread = threading.get_ident()
            try:
                yield
            except RuntimeError as error:  # the allocator's, torch.OutOfMemoryError among them
                if not self._locked:
                    raise
                reason = f"out of memory: {error}"
                self.refuse(_because(request, reason), message(reason))
            finally:
                self._admitted_thread = None
                self._weigh_holdings()

    def replaced(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count a growth outside of the slots; once sealed, `tensors` are kept alive."""
        with self._changing:
            if self.is_sealed:
                self._retired.extend(tensors)
            self._weigh_holdings()
            self.books.grew(self.phase)

    def refuse(self, rejection: Rejection, message: str) -> NoReturn:
        """Write the refusal to the stats, then raise what vLLM raises, with `message`."""
        self.books.refused(rejection)
        raise AssertionError(message)

    def _get_workspace_id(self) -> int:
        lane = _lane()
        if lane >= self._num_lanes:
            super()._get_workspace_id()  # raises vLLM's error
        # Not bound once: tests of vLLM and of ours replace it in vLLM's module.
        index: int = vllm_workspace.dbo_current_ubatch_id() * self._num_lanes + lane
        return index

    def _new_views(self, specs: tuple[Spec, ...]) -> list[torch.Tensor]:
        index = self._get_workspace_id()
        ends = [*accumulate((spec_bytes((spec,)) for spec in specs), initial=0)]
        self.books.asked(index, ends[-1], _caller())
        buffer = self._ensure_workspace_size(ends[-1])
        with torch.inference_mode(mode=False):  # remembered views must serve in either mode
            views = tuple(
                buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
                for (shape, dtype), start in zip(specs, ends, strict=False)
            )
        self._remember(index, buffer, specs, views)
        return [*views]

    def _remember(
        self,
        index: int,
        buffer: torch.Tensor,
        specs: tuple[Spec, ...],
        views: tuple[torch.Tensor, ...],
    ) -> None:
        # In this order: a slot changes its buffer first and its memo second, so that views of a
        # buffer that another thread replaces meanwhile end in no memo, or in one that is dropped.
        memo = self._memos[index]
        if self._current_workspaces[index] is not buffer:
            return
        if len(memo) >= MEMO_ENTRIES:
            memo.clear()
        with contextlib.suppress(TypeError):  # a shape that is a list
            memo[specs] = views

    def _ensure_workspace_size(self, required_bytes: int) -> torch.Tensor:
        index = self._get_workspace_id()
        current = self._current_workspaces[index]
        if current is not None and current.numel() >= required_bytes:
            return current
        del current  # else its memory could not serve the larger one
        if not required_bytes:  # nothing asked is no reason to grow, nor to refuse
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        return self._grow(index, required_bytes, _caller())

    # Growth

    def _grow(self, index: int, required_bytes: int, caller: str) -> torch.Tensor:
        with self._changing:
            self.books.asked(index, required_bytes, caller)
            current = self._current_workspaces[index]
            if current is not None and current.numel() >= required_bytes:
                return current  # reserved meanwhile by another thread
            del current
            reason = self._reason_against(required_bytes)
            if reason:
                self._refuse_growth(index, required_bytes, caller, reason)
            held_bytes = self.books.size_bytes[index]
            # At once what levelling would make of it, which would else retire a buffer just made.
            grown_bytes, levelled_bytes = (
                self._growth_bytes(required_bytes),
                self._levelled_bytes(index),
            )
            try:
                buffer = self._replace(
                    index,
                    max(grown_bytes, levelled_bytes),
                    is_touched=levelled_bytes > grown_bytes,
                )
            except RuntimeError as error:  # the allocator's, torch.OutOfMemoryError among them
                if self.phase == "warmup":
                    raise
                self._refuse_growth(index, required_bytes, caller, f"out of memory: {error}")
            self._note_growth(index, held_bytes, caller)
            self.level()
            return buffer

    @property
    def phase(self) -> GrowthPhase:
        """How far it is closed to change."""
        if self._locked:
            return "locked"
        return "sealed" if self.is_sealed else "warmup"

    def _reason_against(self, more_bytes: int) -> str:
        return self._rule.reason_against(
            self.books.held_bytes + more_bytes,
            is_locked=self._locked,
            is_sealed=self.is_sealed,
            is_capturing=self._is_capturing(),
        )

    def _growth_bytes(self, required_bytes: int) -> int:
        if self.phase == "warmup":
            return required_bytes
        return self._rule.size_bytes(
            required_bytes,
            self.books.held_bytes,
            is_limited=self._locked and self.is_sealed,
        )

    def _levelled_bytes(self, index: int) -> int:
        """The least size of a slot beside the ubatches of its lane; 0 where it is on its own."""
        if self._locked or not self._is_bound:
            return 0
        return max(self.books.size_bytes[index % self._num_lanes :: self._num_lanes])

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())

    def _note_growth(self, index: int, held_bytes: int, caller: str) -> None:
        self.books.grew(self.phase)
        logger.log(
            logging.INFO if self.phase == "warmup" else logging.WARNING,
            "Workspace %s grew for '%s' (%s): %.2f MB -> %.2f MB",
            self.slots[index],
            caller,
            self.phase,
            held_bytes / MIB,
            self.books.size_bytes[index] / MIB,
        )

    def _replace(self, index: int, size_bytes: int, *, is_touched: bool = False) -> torch.Tensor:
        """Put a buffer of `size_bytes` into the slot; on an error a kept old one stays there.

        Before the seal and the lock the old one is freed first, as in vLLM, for the lower peak.
        """
        if self.phase == "warmup":
            self._install(index, None)
            if self._device.type != "cpu":
                torch.accelerator.empty_cache()
        with self._alloc_context(), torch.inference_mode(mode=False):
            buffer = torch.empty((size_bytes,), dtype=torch.uint8, device=self._device)
        if is_touched and self._device.type == "cpu":  # to be resident, see `reserve`
            buffer.zero_()
        old = self._current_workspaces[index]
        self._install(index, buffer)
        if old is not None and self.is_sealed:
            self._retired.append(old)
        self._weigh_holdings()
        return buffer

    def _install(self, index: int, buffer: torch.Tensor | None) -> None:
        self._current_workspaces[index] = buffer
        self._memos[index] = {}
        self.books.resized(index, self._workspace_size_bytes(buffer))

    def _fill(self, index: int, size_bytes: int) -> None:
        if self._locked:
            raise HoldfastError(
                f"Workspace {self.slots[index]} holds {self.books.size_bytes[index]} bytes and is "
                f"locked: a reservation of {size_bytes} bytes comes too late.",
                remedy="reserve in the constructor or the warm-up of the model.",
            )
        is_growth = self._current_workspaces[index] is not None
        self._replace(index, size_bytes, is_touched=True)
        if is_growth:
            self.books.grew(self.phase)

    def _weigh_holdings(self) -> None:
        self.books.holds(
            retired_bytes=sum(buffer.nbytes for buffer in self._retired),
            persistent_bytes=tensor_bytes(self._persistent_resources),
        )

    # Refusals

    def _check_late_resource(self, key: Hashable) -> None:
        # Where the need is unknown one byte: refused as soon as the limit is reached.
        with self._changing:
            reason = self._reason_against(self._resource_bytes.get(key, 1))
        if reason:
            self._refuse_resource(key, reason)
        logger.warning("Persistent workspace %r is made after the lock for '%s'", key, _caller())

    def _refuse_resource(self, key: Hashable, reason: str) -> NoReturn:
        needed_bytes = self._resource_bytes.get(key, 0)
        rejection = Rejection(
            "persistent", _caller(), needed_bytes, self.books.persistent_bytes, reason
        )
        self.refuse(rejection, resource_message(key, reason))

    def _refuse_growth(self, index: int, required_bytes: int, caller: str, reason: str) -> NoReturn:
        rejection = Rejection(
            "scratch", caller, required_bytes, self.books.size_bytes[index], reason
        )
        self.refuse(rejection, scratch_message(rejection, self.phase))


def bound_class(bind: Callable[[WorkspaceManager], None]) -> type[WorkspaceManager]:
    """A manager class whose objects are handed to `bind` as soon as they are made.

    vLLM makes a new manager whenever an engine is rebuilt in its process, and tells nobody.
    """

    class BoundWorkspaceManager(WorkspaceManager):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            bind(self)

    return BoundWorkspaceManager


def _current() -> WorkspaceManager | None:
    """The manager of this process, if it is one of ours."""
    if not vllm_workspace.is_workspace_manager_initialized():
        return None
    manager = vllm_workspace.current_workspace_manager()
    return manager if isinstance(manager, WorkspaceManager) else None


def _because(request: Rejection, reason: str) -> Rejection:
    return replace(request, reason=f"{request.reason}: {reason}")


def _caller() -> str:
    return first_frame(_is_outside)


def _is_outside(frame: FrameType) -> bool:
    code = frame.f_code
    return code is not _caller.__code__ and not code.co_qualname.startswith("WorkspaceManager.")
