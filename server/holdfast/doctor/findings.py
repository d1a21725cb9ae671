"""A finding of the doctor, and the reports that list findings as text and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Literal, get_args

from holdfast.verify.answers import one_line
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
    "driver-log",
    "peer",
    "ports",
    "round-trip",
    "clock",
    "peer-versions",
    "peer-memory",
    "path-mtu",
    "link",
    "rdma",
    "interfaces",
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
"""In the order of the documentation; the last eight occur only in manifests, and the eleven before
them only with `--peer`."""


class Severity(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    """Checked, and nothing is wrong."""
    WARNING = "warning"
    """It may fail, or work worse than it could."""
    FAILURE = "failure"
    """It will fail, so the exit code is 2."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: HazardName
    severity: Severity
    seen: str
    remedy: str = ""
    """What to change; empty if nothing has to change."""
    source: str = "this machine"
    """What was checked: this machine, a container of a manifest, or the way to a peer."""


def ok(name: HazardName, seen: str) -> Finding:
    """Return a finding that nothing is wrong."""
    return Finding(name, Severity.OK, seen)


def warning(name: HazardName, seen: str, remedy: str) -> Finding:
    """Return a warning."""
    return Finding(name, Severity.WARNING, seen, remedy)


def failure(name: HazardName, seen: str, remedy: str, *, is_sure: bool = True) -> Finding:
    """Return a failure, or a warning unless `is_sure`."""
    return Finding(name, Severity.FAILURE if is_sure else Severity.WARNING, seen, remedy)


def gib(size_bytes: int) -> str:
    """Format a size in GiB, with one decimal."""
    return f"{size_bytes / GIB:.1f} GiB"


def has_failed(findings: Sequence[Finding]) -> bool:
    """Return whether a finding is a failure."""
    return any(finding.severity is Severity.FAILURE for finding in findings)


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings and their counts as one JSON object."""
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
    """Yield the lines of the report: by source, with each remedy below its finding."""
    name_width = max((len(finding.name) for finding in findings), default=0)
    source = ""
    for finding in findings:
        if finding.source != source:
            source = finding.source
            yield f"{one_line(source)}:"
        yield f"  {finding.severity:<7}  {finding.name:<{name_width}}  {one_line(finding.seen)}"
        if finding.remedy:
            yield f"  {'':<7}  {'':<{name_width}}  Remedy: {one_line(finding.remedy)}"
    counts = _counts(findings)
    yield ", ".join(f"{severity}: {counts[severity]}" for severity in Severity)


def _counts(findings: Sequence[Finding]) -> Counter[Severity]:
    return Counter(finding.severity for finding in findings)
