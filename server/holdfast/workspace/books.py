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
from holdfast.workspace.stats import StatsWriter


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
