"""What an operator may ask of the server that changes its state, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from holdfast.records import ProbeReport, SleepLevel, SleepTag

ProvenSuite = Literal["quick", "worst-case"]


@dataclass(frozen=True, slots=True)
class ProbeCommand:
    """Prove the engine once more; a proof that is young enough is one."""

    suite: ProvenSuite
    youngest_seconds: float = field(default=0.0, compare=False)
    """A proof of this generation that is not older is the answer."""

    def __str__(self) -> str:
        return f"the {self.suite} suite"


@dataclass(frozen=True, slots=True)
class SleepCommand:
    """Give the memory of the device back."""

    level: SleepLevel
    is_abrupt: bool
    """Whether requests that run are given up, and not waited for."""

    def __str__(self) -> str:
        return f"a sleep of level {self.level}"


@dataclass(frozen=True, slots=True)
class WakeCommand:
    """Take memory back, and be READY after a proof when all of it is there."""

    tags: frozenset[SleepTag]

    def __str__(self) -> str:
        return "waking up"


@dataclass(frozen=True, slots=True)
class RestartCommand:
    """End the engine and start the next generation."""

    reason: str

    def __str__(self) -> str:
        return "a restart"


Command = ProbeCommand | SleepCommand | WakeCommand | RestartCommand


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the probe found, now or a while ago."""

    report: ProbeReport
    age_seconds: float


@dataclass(frozen=True, slots=True)
class SleepResult:
    """What is asleep after an order, and the proof if it is nothing."""

    asleep: frozenset[SleepTag]
    report: ProbeReport | None = None
