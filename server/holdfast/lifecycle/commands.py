"""What a proven engine may be asked for, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from holdfast.labels import SleepLevel, SleepTag
from holdfast.records import ProbeReport

ProvenSuite = Literal["quick", "worst-case"]


@dataclass(frozen=True, slots=True)
class ProbeCommand:
    """Prove the engine again, unless a recent proof is young enough."""

    suite: ProvenSuite
    youngest_seconds: float = field(default=0.0, compare=False)
    """A proof of this generation that is at most this old is the result."""

    def __str__(self) -> str:
        return f"the {self.suite} suite"


@dataclass(frozen=True, slots=True)
class SleepCommand:
    """Free the memory of the device."""

    level: SleepLevel
    is_abrupt: bool
    """Whether running requests are aborted instead of awaited."""

    def __str__(self) -> str:
        return f"a sleep of level {self.level}"


@dataclass(frozen=True, slots=True)
class WakeCommand:
    """Reclaim memory, and become READY after a proof once all of it is back."""

    tags: frozenset[SleepTag]

    def __str__(self) -> str:
        return "waking up"


@dataclass(frozen=True, slots=True)
class RestartCommand:
    """End the engine and start the next generation."""

    reason: str
    is_planned: bool = False
    """Whether `--recycle-after` asks for it, and not an operator."""

    def __str__(self) -> str:
        return "a restart"


Command = ProbeCommand | SleepCommand | WakeCommand | RestartCommand


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The report of the probe, and how long ago it ran."""

    report: ProbeReport
    age_seconds: float


@dataclass(frozen=True, slots=True)
class SleepResult:
    """What is asleep after a command, with the report of the probe if nothing is."""

    asleep: frozenset[SleepTag]
    report: ProbeReport | None = None
