"""What the server says of itself during a soak: memory, engines, growths."""

from __future__ import annotations

from holdfast.verify.checks.soak.history import SoakHistory, SoakSample
from holdfast.verify.survey import ask_holdfast, with_vitals
from holdfast.verify.trial import Trial
from holdfast.verify.vitals import ask_vitals


class Sampler:
    """Takes a sample whenever the last one is old enough; it never waits."""

    def __init__(self, trial: Trial, history: SoakHistory, spacing_seconds: float) -> None:
        self._trial = trial
        self._history = history
        self._spacing_seconds = spacing_seconds
        self._due_seconds = 0.0

    async def look_if_due(self, at_seconds: float) -> None:
        """Take a sample, unless another client has done it lately."""
        if at_seconds >= self._due_seconds:
            self._due_seconds = at_seconds + self._spacing_seconds
            await self.look(at_seconds)

    async def look(self, at_seconds: float) -> None:
        """Take a sample."""
        is_holdfast = self._trial.server.holdfast is not None
        told = await ask_vitals(self._trial.target, is_holdfast=is_holdfast)
        facts = await ask_holdfast(self._trial.target) if is_holdfast else None
        known = with_vitals(facts, told) if facts is not None else None
        self._history.samples.append(SoakSample(at_seconds, told.memory_bytes, known))
