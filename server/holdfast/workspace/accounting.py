"""What did a workspace manager do, and what does it hold besides the current buffers?

Every change is written to the stats of the rank at once. The size of a resource is best effort,
because resources have no interface. Knows nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from holdfast.labels import GROWTH_PHASES, REJECTION_KINDS, GrowthPhase, RejectionKind
from holdfast.records import RankReport, Rejection, SlotStats
from holdfast.workspace.plan import Slot
from holdfast.workspace.stats import MAX_CALLERS, NAME_BYTES, TEXT_BYTES, StatsWriter, cut_text

_MAX_DEPTH = 4
_MAX_OBJECTS = 10_000


class RetainedMemory:
    """What a manager keeps alive besides its current buffers."""

    def __init__(
        self, accounting: WorkspaceAccounting, resources: Sequence[Mapping[Hashable, object]]
    ) -> None:
        self._accounting = accounting
        self._resources = resources
        self.retired: list[torch.Tensor] = []

    def retire(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep `tensors` once the manager is sealed, because graphs may hold their addresses."""
        if self._accounting.is_sealed:
            self.retired.extend(tensors)
        self.update()

    def update(self) -> None:
        """Record what is held now, because resources may have grown."""
        self._accounting.set_retained(
            retired_bytes=sum(tensor.nbytes for tensor in self.retired),
            persistent_bytes=tensor_bytes(self._resources),
        )


def tensor_bytes(things: Iterable[object]) -> int:
    """Return the bytes of the storages in the attributes, slots and containers of `things`.

    Each storage counts once. Modules are left out: a resource that refers to a layer does not own
    its weights. What is deeper than a few levels or outside torch is not counted.
    """
    storages: dict[int, int] = {}
    seen: set[int] = set()
    level: list[object] = list(things)
    for _ in range(_MAX_DEPTH):
        fresh = [thing for thing in level if id(thing) not in seen]
        seen.update(map(id, fresh))
        for thing in fresh:
            if isinstance(thing, torch.Tensor):
                storages.update(_storage(thing))
        level = [part for thing in fresh for part in _parts(thing)][:_MAX_OBJECTS]
    return sum(storages.values())


def _storage(tensor: torch.Tensor) -> Mapping[int, int]:
    """Return the bytes of the tensor's storage by its address; nothing if it has none."""
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


class WorkspaceAccounting:
    """Counters and sizes of one manager. Each change is in the stats before the call returns."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._stats: StatsWriter | None = None
        self._slots = tuple(slots)
        self.size_bytes = [0] * len(slots)
        self.reserved_bytes = [0] * len(slots)
        self.locked_bytes = [0] * len(slots)
        """The sizes at the newest lock."""
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
        """Which rules of growth apply now."""
        if self.is_locked:
            return "locked"
        return "sealed" if self.is_sealed else "warmup"

    @property
    def held_bytes(self) -> int:
        """Everything that the manager keeps alive."""
        return sum(self.size_bytes) + self.retired_bytes + self.persistent_bytes

    def bind(self, stats: StatsWriter | None) -> None:
        """Write the present state and every later change to `stats`, or nowhere if it is None.

        Earlier growths and rejections are not counted again. The high water of a rank outlives its
        managers.
        """
        self._stats = stats
        self._update(self._with_everything)

    def set_size(self, index: int, size_bytes: int) -> None:
        """Record the current size of a slot."""
        self.size_bytes[index] = size_bytes
        self._update(self._with_slots)

    def set_reserved(self, index: int, size_bytes: int) -> None:
        """Record what was reserved for a slot, unless more was before."""
        self.reserved_bytes[index] = max(self.reserved_bytes[index], size_bytes)
        self._update(self._with_slots)

    def record_request(self, index: int, needed_bytes: int, caller: str) -> None:
        """Record the size of a request, whether it is granted or not."""
        is_largest_of_caller = needed_bytes > self.callers.get(caller, -1)
        if is_largest_of_caller:
            self.callers[caller] = needed_bytes
        if needed_bytes > self.high_water_bytes[index]:
            self.high_water_bytes[index] = needed_bytes
            self.high_water_callers[index] = caller
        elif not is_largest_of_caller:
            return
        self._update(
            lambda report: replace(
                self._with_slots(report),
                callers=_with_need(report.callers, caller, needed_bytes),
            )
        )

    def record_growth(self, phase: GrowthPhase) -> None:
        """Count one growth."""
        self.growths[phase] += 1
        self._update(
            lambda report: replace(
                report, growths={**report.growths, phase: report.growths[phase] + 1}
            )
        )

    def record_rejection(self, rejection: Rejection) -> None:
        """Count a refusal and keep it as the last one, before it is raised."""
        kind = rejection.kind
        self.rejections[kind] += 1
        self.last_rejection = rejection
        kept = replace(
            rejection,
            caller=cut_text(rejection.caller, NAME_BYTES),
            reason=cut_text(rejection.reason, TEXT_BYTES),
        )
        self._update(
            lambda report: replace(
                report,
                rejections={**report.rejections, kind: report.rejections[kind] + 1},
                last_rejection=kept,
            )
        )

    def record_fatal_error(self, cause: str) -> None:
        """Write to the stats why the rank cannot continue."""
        if self._stats is not None:
            self._stats.fatal_error(cause)

    def set_retained(self, *, retired_bytes: int, persistent_bytes: int) -> None:
        """Record what is held besides the current buffers."""
        self.retired_bytes = retired_bytes
        self.persistent_bytes = persistent_bytes
        self._update(self._with_state)

    def set_lock(self, *, is_sealed: bool, is_locked: bool) -> None:
        """Record whether buffers may be freed, and whether growth follows the policy."""
        if is_locked and not self.is_locked:
            self.locked_bytes = list(self.size_bytes)
        self.is_sealed = is_sealed
        self.is_locked = is_locked
        self._update(lambda report: self._with_state(self._with_slots(report)))

    def _update(self, change: Callable[[RankReport], RankReport]) -> None:
        if self._stats is not None:
            self._stats.update(change)

    def _with_everything(self, report: RankReport) -> RankReport:
        callers = report.callers
        for caller, needed_bytes in self.callers.items():
            callers = _with_need(callers, caller, needed_bytes)
        return replace(self._with_state(self._with_slots(report)), callers=callers)

    def _with_state(self, report: RankReport) -> RankReport:
        return replace(
            report,
            retired_bytes=self.retired_bytes,
            persistent_bytes=self.persistent_bytes,
            is_sealed=self.is_sealed,
            is_locked=self.is_locked,
        )

    def _with_slots(self, report: RankReport) -> RankReport:
        slots = []
        for index, (ubatch, lane) in enumerate(self._slots):
            needed_bytes = self.high_water_bytes[index]
            caller = cut_text(self.high_water_callers[index], NAME_BYTES)
            if index < len(report.slots) and needed_bytes < report.slots[index].high_water_bytes:
                earlier = report.slots[index]
                needed_bytes, caller = earlier.high_water_bytes, earlier.high_water_caller
            slots.append(
                SlotStats(
                    ubatch,
                    lane,
                    self.size_bytes[index],
                    self.reserved_bytes[index],
                    needed_bytes,
                    caller,
                    self.locked_bytes[index],
                )
            )
        return replace(report, slots=tuple(slots))


def _with_need(callers: Mapping[str, int], caller: str, needed_bytes: int) -> Mapping[str, int]:
    """Keep the largest need of a caller; beyond `MAX_CALLERS`, the smallest makes room."""
    name = cut_text(caller, NAME_BYTES)
    largest = {**callers, name: max(needed_bytes, callers.get(name, 0))}
    if len(largest) > MAX_CALLERS:
        del largest[min(largest, key=largest.__getitem__)]
    return largest
