"""Deaths of the engine, by cause."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from holdfast.records import DEATH_CAUSES, DeathCause


class Outages:
    """Counts deaths over all generations. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deaths: dict[DeathCause, int] = dict.fromkeys(DEATH_CAUSES, 0)

    def died(self, cause: DeathCause) -> None:
        """Count one death."""
        with self._lock:
            self._deaths[cause] += 1

    @property
    def deaths(self) -> Mapping[DeathCause, int]:
        """How often the engine died of each cause; all causes are there from the beginning."""
        with self._lock:
            return dict(self._deaths)
