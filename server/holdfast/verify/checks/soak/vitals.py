"""What the server says of itself during a soak: memory, engines, growths.

Memory is what the operating system says of processes. Holdfast tells that of the process that
answers HTTP and that of the engine's processes; other servers tell only that of the first.
"""

from __future__ import annotations

import math
import re

from holdfast.verify.checks.soak.history import History, Sample
from holdfast.verify.records import Request
from holdfast.verify.survey import ask_holdfast
from holdfast.verify.target import NoAnswerError
from holdfast.verify.trial import Trial

_OK = 200
_LINE = re.compile(r"^([a-z_:]+)(?:\{([^}]*)\})? (\S+)", re.MULTILINE)
_FRONT = "process_resident_memory_bytes"
_ENGINE = "holdfast_engine_host_memory_bytes"
_DEATHS = "holdfast_engine_deaths_total"
_ASKED_FOR = 'cause="requested"'
"""Of an engine that an operator restarts."""


class Vitals:
    """Takes a sample whenever the last one is old enough; it never waits."""

    def __init__(self, trial: Trial, history: History, spacing_seconds: float) -> None:
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
        memory_bytes, deaths = await self._metrics()
        facts = await ask_holdfast(self._trial.target) if self._trial.server.holdfast else None
        self._history.samples.append(Sample(at_seconds, memory_bytes, deaths, facts))

    async def _metrics(self) -> tuple[float | None, float | None]:
        """Bytes of memory, and engines that died though nobody asked for it."""
        try:
            answer = await self._trial.target.ask(Request("GET", "/metrics"))
        except NoAnswerError:
            return None, None
        if answer.status != _OK:
            return None, None
        return read_metrics(answer.text, is_holdfast=self._trial.server.holdfast is not None)


def read_metrics(text: str, *, is_holdfast: bool) -> tuple[float | None, float | None]:
    """Bytes of memory and deaths of engines; None for what the page does not have.

    While Holdfast has no engine it tells no memory of one, and half of a sum is not a sample.
    """
    wanted: tuple[str, ...] = (_FRONT, _ENGINE) if is_holdfast else (_FRONT,)
    memory: dict[str, float] = {}
    deaths: float | None = None
    for name, labels, said in _LINE.findall(text):
        value = _number(said)
        if name in wanted and value is not None:
            memory[name] = memory.get(name, 0.0) + value
        if name == _DEATHS and _ASKED_FOR not in labels and value is not None:
            deaths = (deaths or 0.0) + value
    return (sum(memory.values()) if len(memory) == len(wanted) else None), deaths


def _number(said: str) -> float | None:
    try:
        value = float(said)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
