"""One answer of the doctor, and how all of them are shown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Literal, get_args

from holdfast.workspace.plan import MIB

GIB = 1024 * MIB

HazardName = Literal[
    "command-line",
    "model",
    "plugins",
    "startup-plan",
    "variables",
    "dev-mode",
    "media-urls",
    "keys",
    "tls",
    "address",
    "vllm",
    "gpu",
    "gpu-architecture",
    "gpu-memory",
    "unified-memory",
    "sleep-mode",
    "expandable-segments",
    "host-memory",
    "shared-memory",
    "build-tools",
    "cpu-binding",
    "state-directory",
    "manifest",
    "restart-policy",
    "startup-probe",
    "readiness-probe",
    "liveness-probe",
    "health-check",
    "stop-time-out",
    "entry-point",
]
HAZARDS: tuple[HazardName, ...] = get_args(HazardName)
"""In the order of the documentation; the last eight are found in manifests only."""


class Severity(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    """Looked at, and nothing is wrong."""
    WARNING = "warning"
    """It may go wrong, or go worse than it needs to."""
    FAILURE = "failure"
    """It will go wrong: the exit code is 2."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw."""

    name: HazardName
    severity: Severity
    seen: str
    remedy: str = ""
    """What to change; empty if nothing has to be."""
    source: str = "this machine"
    """Where it was seen: this machine, or a part of a manifest."""


def ok(name: HazardName, seen: str) -> Finding:
    """Nothing to change."""
    return Finding(name, Severity.OK, seen)


def warning(name: HazardName, seen: str, remedy: str) -> Finding:
    """It may go wrong."""
    return Finding(name, Severity.WARNING, seen, remedy)


def failure(name: HazardName, seen: str, remedy: str, *, is_sure: bool = True) -> Finding:
    """It will go wrong; a warning where that is not sure."""
    return Finding(name, Severity.FAILURE if is_sure else Severity.WARNING, seen, remedy)


def gib(size_bytes: int) -> str:
    """The size in GiB, with one decimal."""
    return f"{size_bytes / GIB:.1f} GiB"


def has_failed(findings: Sequence[Finding]) -> bool:
    """Whether something would fail for sure."""
    return any(finding.severity is Severity.FAILURE for finding in findings)


def as_json(findings: Sequence[Finding]) -> str:
    """All of them, as one JSON object."""
    counts = _counts(findings)
    return json.dumps(
        {
            "failures": counts[Severity.FAILURE],
            "warnings": counts[Severity.WARNING],
            "findings": [asdict(finding) for finding in findings],
        },
        indent=2,
    )


def as_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """All of them, for people: by source, each with its remedy below it."""
    name_width = max((len(finding.name) for finding in findings), default=0)
    source = ""
    for finding in findings:
        if finding.source != source:
            source = finding.source
            yield f"{source}:"
        yield f"  {finding.severity:<7}  {finding.name:<{name_width}}  {finding.seen}"
        if finding.remedy:
            yield f"  {'':<7}  {'':<{name_width}}  Remedy: {finding.remedy}"
    counts = _counts(findings)
    yield ", ".join(f"{severity}: {counts[severity]}" for severity in Severity)


def _counts(findings: Sequence[Finding]) -> Counter[Severity]:
    return Counter(finding.severity for finding in findings)
