"""Deaths of the engine, by cause."""

from __future__ import annotations

from holdfast.records import DeathCause


class Outages:
    """Counts."""

    def __init__(self) -> None:
        self.deaths: dict[DeathCause, int] = {}

    def died(self, cause: DeathCause) -> None:
        """Count a death."""
        self.deaths[cause] = self.deaths.get(cause, 0) + 1
