"""Who does for the supervisor what it must not know: vLLM, the listener and the disk."""

from __future__ import annotations

from typing import Protocol

from holdfast.engine.interface import Engine, EngineLauncher
from holdfast.lifecycle.proof import Prober
from holdfast.records import ProbeReport, RankStats


class Host(Protocol):
    """What the composition root gives the supervisor: whatever needs vLLM, the listener or disk."""

    async def load(self) -> EngineLauncher:
        """Import vLLM, read its flags and resolve the configuration."""

    async def mount(self) -> None:
        """Put vLLM's routes behind the gate; the second time there is nothing to do."""

    def prober(self, engine: Engine) -> Prober:
        """A prober for this engine."""

    async def until_idle(self) -> bool:
        """Wait until no request is in flight, for at most the drain time-out."""

    def generation_ended(self, ranks: tuple[RankStats, ...]) -> None:
        """Take in the last counters of a generation."""

    def probe_ran(self, report: ProbeReport) -> None:
        """Count a run of the suite."""

    def became_ready(self) -> None:
        """The start is over; called once."""
