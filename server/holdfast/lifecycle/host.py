"""What the supervisor needs from outside: vLLM, the listener and the disk."""

from __future__ import annotations

from typing import Protocol

from holdfast.engine.interface import Engine, EngineLauncher
from holdfast.records import Death, ProbeReport, RankStats
from holdfast.settings import Suite


class Prober(Protocol):
    """Runs the suite against one engine; `probe.Prober` implements it."""

    async def run(self, *, suite: Suite | None = None) -> ProbeReport:
        """Run one pass, of the configured suite by default; a failure is in the report."""

    async def run_again(self, compared_tokens: int) -> ProbeReport:
        """Run one request, which is enough if the proof is valid.

        Of a baseline, compare the sequences of up to `compared_tokens`, which the proof has.
        """


class Host(Protocol):
    """Does for the supervisor whatever needs vLLM, the listener or the disk."""

    async def load(self) -> EngineLauncher:
        """Import vLLM, read its flags and resolve the configuration."""

    async def mount(self) -> None:
        """Put vLLM's routes behind the gate, unless they are there.

        Raises:
            EngineLostError: the engine died before it had the adapters of the command line.
        """

    def prober(self, engine: Engine) -> Prober:
        """Return a prober for this engine."""

    async def until_idle(self) -> bool:
        """Wait until no request is in flight, for at most the drain timeout."""

    def generation_ended(self, ranks: tuple[RankStats, ...]) -> None:
        """Keep the last counters of a generation."""

    def engine_died(self, death: Death) -> None:
        """Note why an engine ended; called once for each, before the next one starts."""

    def probe_ran(self, report: ProbeReport) -> None:
        """Count a run of the suite."""

    def became_ready(self) -> None:
        """End the start; called once."""
