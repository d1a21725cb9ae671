"""Shows a run: a live view on a terminal, one line a check in a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from holdfast.terminal import is_terminal, replace_what_has_no_code, say
from holdfast.verify.answers import one_line
from holdfast.verify.check import Check
from holdfast.verify.records import CheckResult, CheckStatus
from holdfast.verify.runner import View

STYLES = {
    CheckStatus.PASSED: "green",
    CheckStatus.FAILED: "bold red",
    CheckStatus.WARNED: "yellow",
    CheckStatus.SKIPPED: "dim",
    CheckStatus.INCONCLUSIVE: "magenta",
}
_STATUS_WIDTH = max(map(len, CheckStatus))


@contextmanager
def view_on(stream: TextIO, checks: int) -> Iterator[View]:
    """The view that fits the stream; when left, it has released the terminal."""
    replace_what_has_no_code(stream)
    if is_terminal(stream):
        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        console = Console(file=stream, highlight=False)
        with Progress(*columns, console=console, transient=True) as progress:
            yield LiveView(progress, checks)
    else:
        yield LineView(stream)


class LineView:
    """Writes one line for each result."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begun(self, check: Check) -> None:
        """Write nothing yet."""

    def ended(self, result: CheckResult) -> None:
        """Write the result."""
        say(line_of(result), self._stream)


class LiveView:
    """Shows which check runs, below the results."""

    def __init__(self, progress: Progress, checks: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=checks)

    def begun(self, check: Check) -> None:
        """Show its name."""
        self._progress.update(self._task, description=check.full_name)

    def ended(self, result: CheckResult) -> None:
        """Print the result above the bar."""
        text = Text(line_of(result))
        text.stylize(STYLES[result.status], 0, _STATUS_WIDTH)
        self._progress.console.print(text)
        self._progress.advance(self._task)


def line_of(result: CheckResult) -> str:
    """The result on one line."""
    seconds = "" if result.status is CheckStatus.SKIPPED else f"{result.duration_seconds:.1f} s"
    remedy = f"; remedy: {result.remedy}" if result.remedy else ""
    said = one_line(f"{result.reason}{remedy}")
    name = f"{result.group}.{result.name}"
    return f"{result.status:<{_STATUS_WIDTH}}  {name:<24}{seconds:>8}  {said}".rstrip()
