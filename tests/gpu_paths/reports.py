"""What the tests of the probe look at of a run."""

from __future__ import annotations

from holdfast.records import ProbeReport


def told(report: ProbeReport) -> list[str]:
    """What the steps say that did not pass whole."""
    return [f"{step.name}: {step.reason}" for step in report.steps if step.reason]
