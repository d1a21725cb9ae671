"""junit.xml: a suite for each group, a case for each check.

Build servers know no warning and nothing between right and wrong: a check that warned is a case
that passed and says so, one that could not be judged is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from holdfast.verify.answers import printable
from holdfast.verify.records import CheckResult, CheckStatus, Fault, Report
from holdfast.verify.report import wording

_ELEMENTS = {
    CheckStatus.FAILED: "failure",
    CheckStatus.INCONCLUSIVE: "error",
    CheckStatus.SKIPPED: "skipped",
}


def rendered(report: Report) -> str:
    """The file."""
    suites = Element("testsuites", {"name": "holdfast verify", **_counts(report.checks)})
    for group, members in groupby(report.checks, key=lambda check: check.group):
        checks = tuple(members)
        suite = SubElement(suites, "testsuite", {"name": group, **_counts(checks)})
        suite.set("timestamp", report.started_at)
        known = SubElement(suite, "properties")
        for name, told in wording.facts(report):
            SubElement(known, "property", name=name, value=printable(told))
        for check in checks:
            _add_case(suite, check, report)
    indent(suites)
    text: str = tostring(suites, encoding="unicode", xml_declaration=False)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _add_case(suite: Element, check: CheckResult, report: Report) -> None:
    case = SubElement(suite, "testcase", name=check.name, time=f"{check.duration_seconds:.3f}")
    case.set("classname", f"holdfast.verify.{check.group}")
    if element := _ELEMENTS.get(check.status):
        said = SubElement(case, element, message=printable(check.reason))
        commands = [wording.command(report, one) for one in check.requests]
        faults = _lines(report, check, check.faults)
        said.text = "\n".join(map(printable, [*faults, *commands]))
    if check.warnings or check.numbers:
        numbers = [f"{one.name}: {wording.value(one)}" for one in check.numbers]
        out = SubElement(case, "system-out")
        warnings = _lines(report, check, check.warnings)
        out.text = "\n".join(map(printable, [*warnings, *numbers]))


def _counts(checks: Sequence[CheckResult]) -> dict[str, str]:
    def count(status: CheckStatus) -> str:
        return str(sum(check.status is status for check in checks))

    return {
        "tests": str(len(checks)),
        "failures": count(CheckStatus.FAILED),
        "errors": count(CheckStatus.INCONCLUSIVE),
        "skipped": count(CheckStatus.SKIPPED),
        "time": f"{sum(check.duration_seconds for check in checks):.3f}",
    }


def _lines(report: Report, check: CheckResult, faults: Iterable[Fault]) -> Iterator[str]:
    """What is wrong, and how to repeat it where the commands of the check do not."""
    for fault in faults:
        yield f"{fault.what}: {fault.answered}" if fault.answered else fault.what
        if command := wording.own_command(report, check, fault):
            yield command
