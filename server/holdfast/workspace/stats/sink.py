"""What a workspace manager tells of itself, whoever listens."""

from __future__ import annotations

from typing import Protocol

from holdfast.records import GrowthPhase, Rejection


class StatsSink(Protocol):
    """What a workspace manager tells; `StatsWriter` says what each call means, and keeps it."""

    def slot_count(self, count: int) -> None:
        """Say how many slots there are."""

    def slot(self, index: int, *, ubatch: int, lane: int, size_bytes: int) -> None:
        """Write the identity and the current size of a slot."""

    def reserved(self, index: int, size_bytes: int) -> None:
        """Write what was reserved for a slot."""

    def high_water(self, index: int, needed_bytes: int, caller: str) -> None:
        """Write the largest need of a slot and who had it."""

    def caller(self, name: str, needed_bytes: int) -> None:
        """Keep the largest need of a caller."""

    def growth(self, phase: GrowthPhase) -> None:
        """Count one growth."""

    def rejection(self, rejection: Rejection) -> None:
        """Count a refusal and keep who asked."""

    def fatal_error(self, cause: str) -> None:
        """Keep why the rank is lost."""

    def holdings(self, *, retired_bytes: int, persistent_bytes: int) -> None:
        """Write what is held beside the current buffers."""

    def lock(self, *, is_sealed: bool, is_locked: bool) -> None:
        """Write how far the manager is closed to change."""
