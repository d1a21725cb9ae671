"""What a report is made of. `report.schema.json` is its published shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

FORMAT = 1
"""Rises when a reader of reports has to change."""
TAIL_CHARACTERS = 4000
"""Most of a log that a report quotes."""

Status = Literal["passed", "failed", "skipped"]


class CheckFailedError(Exception):
    """What a check looked at is not as it must be; the text says how.

    `log_tail` is what a subject said last that could not be made.
    """

    def __init__(self, reason: str, *, log_tail: str = "") -> None:
        super().__init__(reason)
        self.log_tail = log_tail


class CheckSkippedError(Exception):
    """The subject cannot show what the check looks at; the text says why."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One number or word that a check found."""

    name: str
    value: float | str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What came of one check."""

    name: str
    subject: str
    proves: str
    status: Status
    reason: str = ""
    """Why it failed or was skipped; empty if it passed."""
    duration_seconds: float = 0.0
    measured: tuple[Measured, ...] = ()
    log_tail: str = ""
    """The last lines of the subject, if the check failed."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """What `dataclasses.asdict` made, read again."""
        measured = tuple(Measured(**one) for one in record["measured"])
        return cls(**{**record, "measured": measured})


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU that torch sees."""

    name: str
    capability: str
    total_bytes: int
    is_integrated: bool
    """Whether it shares the host's memory."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the checks ran on. Nothing of it names a host or a user."""

    system: str
    processor: str
    python: str
    torch: str = ""
    """Empty if it cannot be imported."""
    cuda: str = ""
    """What torch was built for."""
    driver: str = ""
    vllm: str = ""
    is_vllm_for_cpu: bool = False
    missing_requirements: tuple[str, ...] = ()
    """Of Holdfast's front end."""
    devices: tuple[Device, ...] = ()

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """What `dataclasses.asdict` made, read again."""
        devices = tuple(Device(**one) for one in record["devices"])
        missing = tuple(record["missing_requirements"])
        return cls(**{**record, "devices": devices, "missing_requirements": missing})


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that is not here, without which checks are skipped."""

    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Report:
    """One run of the kit."""

    format: int
    holdfast: str
    """The version of the checkout that was checked."""
    commit: str
    """Of the checkout, with `-dirty` if something in it differs; empty without git."""
    workspace_file: str
    """Of vLLM's one file that the core runs on: its SHA-256; empty if there was none."""
    started_at: str
    """UTC, ISO 8601."""
    duration_seconds: float
    machine: Machine
    lacks: tuple[Lack, ...]
    checks: tuple[CheckResult, ...]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """What `dataclasses.asdict` made, read again."""
        machine = Machine.from_record(record["machine"])
        lacks = tuple(Lack(**one) for one in record["lacks"])
        checks = tuple(CheckResult.from_record(one) for one in record["checks"])
        return cls(**{**record, "machine": machine, "lacks": lacks, "checks": checks})

    def count(self, status: Status) -> int:
        """How many checks have this status."""
        return sum(check.status == status for check in self.checks)
