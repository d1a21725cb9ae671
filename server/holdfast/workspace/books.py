"""What did a workspace manager do? Kept on the object, and told to the stats of the rank at once.

Knows neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.records import (
    GROWTH_PHASES,
    REJECTION_KINDS,
    GrowthPhase,
    Rejection,
    RejectionKind,
)
from holdfast.workspace.plan import Slot
from holdfast.workspace.stats import StatsSink


class NoStats:
    """The sink of a manager that nobody reads."""

    def slot_count(self, count: int) -> None:
        """Take the number of slots."""

    def slot(self, index: int, *, ubatch: int, lane: int, size_bytes: int) -> None:
        """Take the identity and size of a slot."""

    def reserved(self, index: int, size_bytes: int) -> None:
        """Take the reservation of a slot."""

    def high_water(self, index: int, needed_bytes: int, caller: str) -> None:
        """Take the largest need of a slot."""

    def caller(self, name: str, needed_bytes: int) -> None:
        """Take the largest need of a caller."""

    def growth(self, phase: GrowthPhase) -> None:
        """Take one growth."""

    def rejection(self, rejection: Rejection) -> None:
        """Take one refusal."""

    def fatal_error(self, cause: str) -> None:
        """Take why the rank is lost."""

    def holdings(self, *, retired_bytes: int, persistent_bytes: int) -> None:
        """Take what is held beside the current buffers."""

    def lock(self, *, is_sealed: bool, is_locked: bool) -> None:
        """Take how far the manager is closed to change."""


class Books:
    """Counters and sizes of one manager. Every entry reaches the sink before the call returns."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._sink: StatsSink = NoStats()
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

    def bind(self, sink: StatsSink) -> None:
        """Tell `sink` how things stand, and everything from now on.

        Earlier growths and rejections are not told again: a sink counts those, and it may have
        counted for another manager. A need of zero is not told either, because the high water of a
        rank outlives its managers.
        """
        self._sink = sink
        sink.slot_count(len(self._slots))
        for index, size_bytes in enumerate(self.size_bytes):
            self.resized(index, size_bytes)
            self.reserved(index, self.reserved_bytes[index])
            if self.high_water_bytes[index]:
                sink.high_water(index, self.high_water_bytes[index], self.high_water_callers[index])
        for caller, needed_bytes in self.callers.items():
            sink.caller(caller, needed_bytes)
        self.holds(retired_bytes=self.retired_bytes, persistent_bytes=self.persistent_bytes)
        self.closed(is_sealed=self.is_sealed, is_locked=self.is_locked)

    def resized(self, index: int, size_bytes: int) -> None:
        """Enter the current size of a slot."""
        ubatch, lane = self._slots[index]
        self.size_bytes[index] = size_bytes
        self._sink.slot(index, ubatch=ubatch, lane=lane, size_bytes=size_bytes)

    def reserved(self, index: int, size_bytes: int) -> None:
        """Enter what was reserved for a slot; the largest stands."""
        self.reserved_bytes[index] = max(self.reserved_bytes[index], size_bytes)
        self._sink.reserved(index, self.reserved_bytes[index])

    def asked(self, index: int, needed_bytes: int, caller: str) -> None:
        """Enter a need, whether it will be met or not."""
        if needed_bytes > self.callers.get(caller, -1):
            self.callers[caller] = needed_bytes
            self._sink.caller(caller, needed_bytes)
        if needed_bytes > self.high_water_bytes[index]:
            self.high_water_bytes[index] = needed_bytes
            self.high_water_callers[index] = caller
            self._sink.high_water(index, needed_bytes, caller)

    def grew(self, phase: GrowthPhase) -> None:
        """Count one growth."""
        self.growths[phase] += 1
        self._sink.growth(phase)

    def refused(self, rejection: Rejection) -> None:
        """Count one refusal and keep it; the sink has it before the caller can raise."""
        self.rejections[rejection.kind] += 1
        self.last_rejection = rejection
        self._sink.rejection(rejection)

    def lost(self, cause: str) -> None:
        """Have the sink say that the rank cannot go on."""
        self._sink.fatal_error(cause)

    def holds(self, *, retired_bytes: int, persistent_bytes: int) -> None:
        """Enter what is held beside the current buffers."""
        self.retired_bytes = retired_bytes
        self.persistent_bytes = persistent_bytes
        self._sink.holdings(retired_bytes=retired_bytes, persistent_bytes=persistent_bytes)

    def closed(self, *, is_sealed: bool, is_locked: bool) -> None:
        """Enter how far the manager is closed to change."""
        self.is_sealed = is_sealed
        self.is_locked = is_locked
        self._sink.lock(is_sealed=is_sealed, is_locked=is_locked)
