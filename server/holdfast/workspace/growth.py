"""May a workspace grow, and by how much? The rules of growth; knows neither vLLM nor torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from holdfast.workspace.plan import MIB, RESERVE_GRANULE_BYTES, GrowthPolicy, round_up

DENIED: Final = "the growth policy is deny"


@dataclass(slots=True)
class GrowthRule:
    """The policy after the lock and its limit: above what was held at the lock, once sealed."""

    policy: GrowthPolicy = "deny"
    limit_bytes: int = 0
    locked_bytes: int = 0
    """Held at the lock: current, retired and persistent."""

    def reason_against(self, held_bytes: int, *, is_sealed: bool, is_capturing: bool) -> str:
        """Why `held_bytes` in all may not be reached after the lock; empty if it may."""
        if self.policy == "deny":
            return DENIED
        if is_capturing:
            return "the stream is being captured into a graph"
        # Before the seal the old buffer is freed, so that growth is no more than vLLM's own.
        if is_sealed and not self.is_within_limit(held_bytes):
            return (
                f"it would hold {(held_bytes - self.locked_bytes) / MIB:.2f} MB above the size at "
                f"the lock and the growth limit is {self.limit_bytes / MIB:.2f} MB"
            )
        return ""

    def is_within_limit(self, held_bytes: int) -> bool:
        """Whether a rank may hold `held_bytes` in all."""
        return held_bytes - self.locked_bytes <= self.limit_bytes

    def size_bytes(self, required_bytes: int, held_bytes: int, *, is_limited: bool) -> int:
        """Rounded up to 2 MiB, so that not every new size grows again, if the limit allows that."""
        rounded_bytes = round_up(required_bytes, RESERVE_GRANULE_BYTES)
        if is_limited and not self.is_within_limit(held_bytes + rounded_bytes):
            return required_bytes
        return rounded_bytes
