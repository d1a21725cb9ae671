"""report.md: for people, where Markdown is shown."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.verify.answers import one_line
from holdfast.verify.records import CheckResult, CheckStatus, Fault, Report
from holdfast.verify.report import wording

_MARKS = {
    CheckStatus.PASSED: "✅",
    CheckStatus.FAILED: "❌",
    CheckStatus.WARNED: "⚠️",
    CheckStatus.SKIPPED: "⏭️",
    CheckStatus.INCONCLUSIVE: "❔",
}


def rendered(report: Report) -> str:
    """The file."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# {_text(report.server.model)}: {report.verdict}"
    yield ""
    yield f"{wording.counts(report)}. {_text(report.reason)}."
    yield ""
    yield from _table(("what", "is"), wording.facts(report))
    yield ""
    yield from _table(
        ("check", "status", "s", "what it proves, or why not"),
        (
            (
                f"`{wording.full_name(check)}`",
                f"{_MARKS[check.status]} {check.status}",
                f"{check.duration_seconds:.1f}",
                check.reason or check.proves,
            )
            for check in report.checks
        ),
    )
    for check in report.checks:
        yield from _details(report, check)
    if configuration := report.server.configuration:
        yield ""
        yield "## Configuration"
        yield ""
        yield from _table(("what", "is"), wording.settings(configuration))


def _details(report: Report, check: CheckResult) -> Iterator[str]:
    is_amiss = check.status not in (CheckStatus.PASSED, CheckStatus.SKIPPED)
    if not check.numbers and not is_amiss:
        return
    yield ""
    yield f"## {wording.full_name(check)}"
    if check.numbers:
        yield ""
        rows = ((n.name, wording.value(n), wording.limit(n.limit, n.unit)) for n in check.numbers)
        yield from _table(("number", "value", "limit"), rows)
    if is_amiss:
        yield ""
        for fault in (*check.faults, *check.warnings):
            yield from _point(fault, wording.own_command(report, check, fault))
        if check.requests:
            yield ""
            yield "To repeat it:"
            yield ""
            yield from (f"    {wording.command(report, one)}" for one in check.requests)


def _point(fault: Fault, command: str) -> Iterator[str]:
    answered = f": {_text(fault.answered)}" if fault.answered else ""
    yield f"* {_text(fault.what)}{answered}"
    if command:
        yield from ("", f"      {command}", "")


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(_text(cell) for cell in row)} |"


def _text(text: str) -> str:
    """The text, so that it is neither a cell of its own nor an element."""
    return one_line(text).replace("|", r"\|").replace("<", "&lt;")
