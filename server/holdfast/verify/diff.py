"""`holdfast verify diff A B`: what changed in the answers, beside what changed in the server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.settings.flag import Parser, command_parser
from holdfast.terminal import is_terminal, say
from holdfast.verify.answers import one_line
from holdfast.verify.comparison import Change, ComparedReports, compare
from holdfast.verify.progress import STYLES
from holdfast.verify.records import Report
from holdfast.verify.report import as_json, wording

_NOTHING = "-"


def diff(arguments: Sequence[str]) -> int:
    """Print what changed from one report to another, and return 0.

    Raises:
        UsageError: there are not two arguments, or one is not a report.
    """
    flags = diff_parser().parse_args(arguments)
    show(as_json.read(flags.before), as_json.read(flags.after), sys.stdout)
    return 0


def diff_parser() -> Parser:
    """The parser of the arguments."""
    parser = command_parser(
        "verify diff",
        "A B",
        "Show what changed from one report to another: statuses first, then numbers with their "
        "limits, then configuration.",
        "Exit codes: 0 shown, whatever changed; 2 one of them is not a report.",
    )
    for name, metavar in (("before", "A"), ("after", "B")):
        said = "a report.json, or the directory of a report"
        parser.add_argument(name, type=Path, metavar=metavar, help=said)
    return parser


def show(before: Report, after: Report, stream: TextIO) -> None:
    """Write the comparison: tables on a terminal, lines in a pipe."""
    found = compare(before, after)
    for name, report in (("A", before), ("B", after)):
        say(one_line(f"{name}: {_title(report)}"), stream)
    sections = {
        "Status": found.statuses,
        "Numbers": found.numbers,
        "Configuration": found.configuration,
    }
    for title, changes in sections.items():
        say("", stream)
        if not changes:
            say(f"{title}: no change", stream)
        elif is_terminal(stream):
            Console(file=stream, highlight=False).print(_table(title, changes))
        else:
            say(title, stream)
            for change in changes:
                say(f"  {_line(change)}", stream)
    say("", stream)
    say(_same(found), stream)


def _title(report: Report) -> str:
    started = report.started_at.replace("T", " ").replace("+00:00", " UTC")
    return f"{report.server.model}, {started}, {report.verdict}: {wording.counts(report)}"


def _line(change: Change) -> str:
    note = f": {change.note}" if change.note else ""
    old, new = change.before or _NOTHING, change.after or _NOTHING
    return one_line(f"{change.what}: {old} -> {new}{note}")


def _table(title: str, changes: Sequence[Change]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in ("", "A", "B"):
        table.add_column(name, overflow="fold")
    for change in changes:
        style = STYLES[change.status] if change.status and change.after else ""
        after = Text(one_line(change.after or _NOTHING), style=style)
        if change.note:
            after.append(f"\n{one_line(change.note)}", style="default not bold")
        table.add_row(Text(one_line(change.what)), Text(one_line(change.before or _NOTHING)), after)
    return table


def _same(found: ComparedReports) -> str:
    return (
        f"the same: {found.same_statuses} statuses, {found.same_numbers} numbers, "
        f"{found.same_settings} settings"
    )
