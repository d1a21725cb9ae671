"""What did a workspace manager do, and what does it hold beside the current buffers?

Kept on the object, and told to the stats of the rank at once. How much the tensors of an object
hold is best effort, because resources have no interface. Knows neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch

from holdfast.records import (
    GROWTH_PHASES,
    REJECTION_KINDS,
    GrowthPhase,
    Rejection,
    RejectionKind,
)
from holdfast.workspace.plan import Slot
from holdfast.workspace.stats import StatsWriter

_DEEPEST = 4
_MOST_OBJECTS = 10_000


class Holdings:
    """What a manager keeps alive beside its current buffers."""

    def __init__(self, books: Books, resources: Sequence[Mapping[Hashable, object]]) -> None:
        self._books = books
        self._resources = resources
        self.retired: list[torch.Tensor] = []

    def retire(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep `tensors`, whose addresses graphs may hold, once the manager is sealed."""
        if self._books.is_sealed:
            self.retired.extend(tensors)
        self.weigh()

    def weigh(self) -> None:
        """Enter in the books what is held now; resources may have grown since."""
        self._books.holds(
            retired_bytes=sum(tensor.nbytes for tensor in self.retired),
            persistent_bytes=tensor_bytes(self._resources),
        )


def tensor_bytes(things: Iterable[object]) -> int:
    """Bytes of the distinct storages that `things` keep in attributes, slots and containers.

    Modules are left out: a resource that knows a layer does not own the weights of it. What lies
    deeper than a few levels, or outside of torch, is not seen.
    """
    storages: dict[int, int] = {}
    seen: set[int] = set()
    level: list[object] = list(things)
    for _ in range(_DEEPEST):
        fresh = [thing for thing in level if id(thing) not in seen]
        seen.update(map(id, fresh))
        for thing in fresh:
            if isinstance(thing, torch.Tensor):
                storages.update(_storage(thing))
        level = [part for thing in fresh for part in _parts(thing)][:_MOST_OBJECTS]
    return sum(storages.values())


def _storage(tensor: torch.Tensor) -> Mapping[int, int]:
    """The storage of `tensor` by its address; nothing for a tensor that has none of its own."""
    try:
        storage = tensor.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    except (NotImplementedError, RuntimeError):
        return {}


def _parts(thing: object) -> Iterable[object]:
    if isinstance(thing, (torch.Tensor, torch.nn.Module, type, str, bytes)):
        return ()
    if isinstance(thing, Mapping):
        return tuple(thing.values())
    if isinstance(thing, (list, tuple, set, frozenset)):
        return tuple(thing)
    attributes = tuple(getattr(thing, "__dict__", {}).values())
    names = (name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()))
    return attributes + tuple(getattr(thing, name, None) for name in names)


class Books:
    """Counters and sizes of one manager. Every entry reaches the stats before the call returns."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._stats: StatsWriter | None = None
        self._slots = tuple(slots)
        self.size_bytes = [0] * len(slots)
        self.reserved_bytes = [0] * len(slots)
        self.high_water_bytes = [0] * len(slots)
        self.high_water_callers = [""] * len(slots)
        self.callers: dict[str, int] = {}
        self.growths: dict[GrowthPhase, int] = dict.fromkeys(GROWTH_PHASES, 0)
        self.rejections: dict[RejectionKind, int] = dict.fromkeys(REJECTION_KINDS, 0)
        self.last_rejection: Rejection | None = None
        self.retired_bytes = 0
        self.persistent_bytes = 0
        self.is_sealed = False
        self.is_locked = False

    @property
    def phase(self) -> GrowthPhase:
        """How far the manager is closed to change."""
        if self.is_locked:
            return "locked"
        return "sealed" if self.is_sealed else "warmup"

    @property
    def held_bytes(self) -> int:
        """Everything that the manager keeps alive."""
        return sum(self.size_bytes) + self.retired_bytes + self.persistent_bytes

    def bind(self, stats: StatsWriter | None) -> None:
        """Write to `stats` how things stand, and everything from now on; with None nowhere.

        Earlier growths and rejections are not told again: they are counted there, where another
        manager's may be too. A need of zero is not told either, because the high water of a rank
        outlives its managers.
        """
        self._stats = stats
        if stats is None:
            return
        stats.slot_count(len(self._slots))
        for index, size_bytes in enumerate(self.size_bytes):
            self.resized(index, size_bytes)
            self.reserved(index, self.reserved_bytes[index])
            if self.high_water_bytes[index]:
                stats.high_water(
                    index, self.high_water_bytes[index], self.high_water_callers[index]
                )
        for caller, needed_bytes in self.callers.items():
            stats.caller(caller, needed_bytes)
        self.holds(retired_bytes=self.retired_bytes, persistent_bytes=self.persistent_bytes)
        self.closed(is_sealed=self.is_sealed, is_locked=self.is_locked)

    def resized(self, index: int, size_bytes: int) -> None:
        """Enter the current size of a slot."""
        ubatch, lane = self._slots[index]
        self.size_bytes[index] = size_bytes
        if self._stats is not None:
            self._stats.slot(index, ubatch=ubatch, lane=lane, size_bytes=size_bytes)

    def reserved(self, index: int, size_bytes: int) -> None:
        """Enter what was reserved for a slot; the largest stands."""
        self.reserved_bytes[index] = max(self.reserved_bytes[index], size_bytes)
        if self._stats is not None:
            self._stats.reserved(index, self.reserved_bytes[index])

    def asked(self, index: int, needed_bytes: int, caller: str) -> None:
        """Enter a need, whether it will be met or not."""
        if needed_bytes > self.callers.get(caller, -1):
            self.callers[caller] = needed_bytes
            if self._stats is not None:
                self._stats.caller(caller, needed_bytes)
        if needed_bytes > self.high_water_bytes[index]:
            self.high_water_bytes[index] = needed_bytes
            self.high_water_callers[index] = caller
            if self._stats is not None:
                self._stats.high_water(index, needed_bytes, caller)

    def grew(self, phase: GrowthPhase) -> None:
        """Count one growth."""
        self.growths[phase] += 1
        if self._stats is not None:
            self._stats.growth(phase)

    def refused(self, rejection: Rejection) -> None:
        """Count one refusal and keep it; the stats have it before the caller can raise."""
        self.rejections[rejection.kind] += 1
        self.last_rejection = rejection
        if self._stats is not None:
            self._stats.rejection(rejection)

    def lost(self, cause: str) -> None:
        """Have the stats say that the rank cannot go on."""
        if self._stats is not None:
            self._stats.fatal_error(cause)

    def holds(self, *, retired_bytes: int, persistent_bytes: int) -> None:
        """Enter what is held beside the current buffers."""
        self.retired_bytes = retired_bytes
        self.persistent_bytes = persistent_bytes
        if self._stats is not None:
            self._stats.holdings(retired_bytes=retired_bytes, persistent_bytes=persistent_bytes)

    def closed(self, *, is_sealed: bool, is_locked: bool) -> None:
        """Enter how far the manager is closed to change."""
        self.is_sealed = is_sealed
        self.is_locked = is_locked
        if self._stats is not None:
            self._stats.lock(is_sealed=is_sealed, is_locked=is_locked)
