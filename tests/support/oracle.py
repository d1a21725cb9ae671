"""What a workspace manager must do, said again in plain Python; imports nothing of `workspace/`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

MIB = 1024 * 1024
GRANULE_BYTES = 2 * MIB
ALIGNMENT_BYTES = 256

Policy = Literal["deny", "alongside"]
Phase = Literal["warmup", "sealed", "locked"]
Reason = Literal["deny", "capture", "limit"]
Kind = Literal["scratch", "persistent"]


@dataclass(frozen=True)
class Refusal:
    """A request that must be refused, and why."""

    kind: Kind
    reason: Reason
    needed_bytes: int
    held_bytes: int


@dataclass
class Slot:
    """One workspace as it must be."""

    size_bytes: int | None = None
    reserved_bytes: int = 0
    resources: dict[str, int] = field(default_factory=dict)


@dataclass
class Rank:
    """What the stats of a rank must say; managers come and go, this only rises."""

    high_water_bytes: list[int]
    callers: dict[str, int] = field(default_factory=dict)
    growths: dict[Phase, int] = field(
        default_factory=lambda: {"warmup": 0, "sealed": 0, "locked": 0}
    )
    rejections: dict[str, int] = field(
        default_factory=lambda: {"scratch": 0, "persistent": 0, "permute": 0}
    )
    last_refusal: Refusal | None = None


class Oracle:
    """One rank with a workspace for each ubatch and lane, a policy and the limit given for it."""

    def __init__(self, ubatches: int, lanes: int, policy: Policy, limit_bytes: int | None) -> None:
        self.rank = Rank([0] * (ubatches * lanes))
        self.lanes = lanes
        self.policy: Policy = policy
        self.given_limit_bytes = limit_bytes
        self.is_capturing = self.is_asleep = False
        self.reset()

    def reset(self) -> None:
        """vLLM makes a new manager: nothing is held, nothing is closed."""
        self.slots = [Slot() for _ in self.rank.high_water_bytes]
        self.retired: list[int] = []
        self.measured: dict[str, int] = {}
        self.is_sealed = self.is_locked = self.is_asleep = False
        self.locked_bytes = self.limit_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Everything that is kept alive."""
        return self.scratch_bytes + sum(self.retired) + self.persistent_bytes

    @property
    def scratch_bytes(self) -> int:
        """What the current buffers hold."""
        return sum(slot.size_bytes or 0 for slot in self.slots)

    @property
    def persistent_bytes(self) -> int:
        """What the persistent resources of all slots hold."""
        return sum(sum(slot.resources.values()) for slot in self.slots)

    @property
    def room_bytes(self) -> int:
        """What may yet be held, if the growth limit counts."""
        return self.limit_bytes + self.locked_bytes - self.held_bytes

    @property
    def phase(self) -> Phase:
        """How far it is closed."""
        if self.is_locked:
            return "locked"
        return "sealed" if self.is_sealed else "warmup"

    def seal(self) -> None:
        """No buffer is freed from now on."""
        self._level()
        self.is_sealed = True

    def lock(self, limit_bytes: int | None) -> None:
        """Growth follows the policy from now on."""
        self._level()
        if not self.is_locked:
            self.locked_bytes = self.held_bytes
            largest = max(slot.size_bytes or 0 for slot in self.slots)
            ubatches = len(self.slots) // self.lanes
            given = self.given_limit_bytes
            self.limit_bytes = ubatches * (largest + 256 * MIB) if given is None else given
        if limit_bytes is not None:
            self.limit_bytes = limit_bytes
        self.is_locked = True

    def reserve(self, index: int, size_bytes: int) -> bool:
        """Whether the reservation is met; not if it comes too late."""
        slot = self.slots[index]
        if (slot.size_bytes or 0) < size_bytes:
            if self.is_locked:
                return False
            self._put(slot, size_bytes, is_growth=slot.size_bytes is not None)
        slot.reserved_bytes = max(slot.reserved_bytes, size_bytes)
        return True

    def request(self, index: int, sizes: Sequence[int], caller: str) -> Refusal | None:
        """Serve a request, or say why it is refused."""
        needed = offsets(sizes)[-1]
        self._note_need(index, needed, caller)
        slot = self.slots[index]
        if (slot.size_bytes or 0) >= needed:
            return None
        reason = self._reason_against(needed)
        if reason:
            return self._refuse(Refusal("scratch", reason, needed, slot.size_bytes or 0))
        self._put(slot, max(self._grown_bytes(needed), self._lane_bytes(index)), is_growth=True)
        self._level()
        return None

    def persistent(self, index: int, key: str, size_bytes: int, *, is_said: bool) -> Refusal | None:
        """Serve a resource of the slot, or say why it is refused; not all say their size."""
        resources = self.slots[index].resources
        if key in resources:
            return None
        if self.is_locked:
            needed = size_bytes if is_said else self.measured.get(key)
            reason = self._reason_against(1 if needed is None else needed, is_first_use=True)
            if reason:
                held = self.persistent_bytes
                return self._refuse(Refusal("persistent", reason, needed or 0, held))
            self.rank.growths["locked"] += 1
        resources[key] = self.measured[key] = size_bytes
        return None

    def sleep(self) -> None:
        """Scratch loses its content, and neither its place nor its size; resources lose nothing."""
        self.is_asleep = True

    def wake(self) -> None:
        """All is where it was."""
        self.is_asleep = False

    def _note_need(self, index: int, needed: int, caller: str) -> None:
        needs = self.rank.high_water_bytes
        needs[index] = max(needs[index], needed)
        if needed:
            self.rank.callers[caller] = max(self.rank.callers.get(caller, 0), needed)

    def _reason_against(self, more_bytes: int, *, is_first_use: bool = False) -> Reason | None:
        if self.is_locked and self.policy == "deny" and (self.is_sealed or not is_first_use):
            return "deny"
        if self.is_capturing:
            return "capture"
        is_limited = self.is_locked and self.is_sealed
        return "limit" if is_limited and not self._is_allowed(more_bytes) else None

    def _is_allowed(self, more_bytes: int) -> bool:
        return more_bytes <= self.room_bytes

    def _grown_bytes(self, needed: int) -> int:
        if self.phase == "warmup":
            return needed
        rounded = (needed + GRANULE_BYTES - 1) // GRANULE_BYTES * GRANULE_BYTES
        is_limited = self.is_locked and self.is_sealed
        return needed if is_limited and not self._is_allowed(rounded) else rounded

    def _level(self) -> None:
        """What one ubatch has, each has: before the lock, in the same lane."""
        for index, slot in enumerate(self.slots):
            if (slot.size_bytes or 0) < self._lane_bytes(index):
                self._put(slot, self._lane_bytes(index), is_growth=False)

    def _lane_bytes(self, index: int) -> int:
        if self.is_locked:
            return 0
        ubatches = self.slots[index % self.lanes :: self.lanes]
        return max(slot.size_bytes or 0 for slot in ubatches)

    def _put(self, slot: Slot, size_bytes: int, *, is_growth: bool) -> None:
        if self.is_sealed and slot.size_bytes is not None:
            self.retired.append(slot.size_bytes)
        slot.size_bytes = size_bytes
        if is_growth:
            self.rank.growths[self.phase] += 1

    def _refuse(self, refusal: Refusal) -> Refusal:
        self.rank.rejections[refusal.kind] += 1
        self.rank.last_refusal = refusal
        return refusal


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each view of a request begins, and behind the last where the next would."""
    ends = [0]
    for size_bytes in sizes:
        ends.append(ends[-1] + -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return ends
