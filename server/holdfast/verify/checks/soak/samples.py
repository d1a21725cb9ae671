"""What the server says of itself during a soak: memory, engines, growths."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.verify.checks.soak.history import SoakHistory, SoakSample
from holdfast.verify.survey import ask_holdfast, with_vitals
from holdfast.verify.trial import Trial
from holdfast.verify.vitals import ask_vitals


class Sampler:
    """Takes a sample whenever the last one is old enough; at 429 it waits to be let in."""

    def __init__(
        self,
        trial: Trial,
        history: SoakHistory,
        spacing_seconds: float,
        now_seconds: Callable[[], float],
    ) -> None:
        """Take how long the soak has lasted from `now_seconds`."""
        self._trial = trial
        self._history = history
        self._spacing_seconds = spacing_seconds
        self._now_seconds = now_seconds
        self._due_seconds = 0.0

    async def look_if_due(self) -> None:
        """Take a sample, unless another client has done it lately."""
        at_seconds = self._now_seconds()
        if at_seconds >= self._due_seconds:
            self._due_seconds = at_seconds + self._spacing_seconds
            await self.look()

    async def look(self) -> None:
        """Take a sample."""
        is_holdfast = self._trial.server.holdfast is not None
        facts = await ask_holdfast(self._trial.target) if is_holdfast else None
        told = await ask_vitals(self._trial.target, is_holdfast=is_holdfast)
        known = with_vitals(facts, told) if facts is not None else None
        # Of the answer, which may have come long after the question.
        at_seconds = self._now_seconds()
        self._history.samples.append(SoakSample(at_seconds, told.memory_bytes, known))
