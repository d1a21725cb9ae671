"""What a user sees of a run while it goes on."""

from __future__ import annotations

import io
import os
import pty

import pytest

from holdfast.verify.check import Check
from holdfast.verify.progress import line_of, view_on
from holdfast.verify.records import CheckResult, CheckStatus
from holdfast.verify.trial import Trial
from terminals import read_to_the_end


async def nothing(_trial: Trial) -> None:
    """No check at all."""


CHECK = Check("models", "wire", nothing, "Something.")
PASSED = CheckResult("models", "wire", "Something.", CheckStatus.PASSED, duration_seconds=0.25)
SKIPPED = CheckResult(
    "kill", "survive", "x", CheckStatus.SKIPPED, "not Holdfast", "serve\x1b[2J it"
)


def test_a_line_says_what_and_why() -> None:
    """The status, the name, the seconds; the reason and the remedy, without control characters."""
    assert line_of(PASSED).split() == ["passed", "wire.models", "0.2", "s"]
    line = line_of(SKIPPED)
    assert line.startswith("skipped ")
    assert line.endswith("not Holdfast; remedy: serve\N{REPLACEMENT CHARACTER}[2J it")


def test_a_pipe_gets_a_line_for_each_check() -> None:
    """And no control character."""
    stream = io.StringIO()
    with view_on(stream, 1) as view:
        view.begun(CHECK)
        view.ended(PASSED)
    assert stream.getvalue() == f"{line_of(PASSED)}\n"


def test_letters_that_a_stream_has_not_are_replaced() -> None:
    """A locale may have few of them."""
    written = io.BytesIO()
    with view_on(io.TextIOWrapper(written, encoding="ascii"), 1) as view:
        view.ended(SKIPPED)
        assert written.getvalue().endswith(b"serve?[2J it\n")


@pytest.mark.parametrize(("term", "is_live"), [("xterm", True), ("dumb", False)])
def test_a_terminal_shows_what_runs(
    term: str, is_live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar with the name of the check, gone at the end; a terminal that cannot gets lines."""
    monkeypatch.setenv("TERM", term)
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as stream, view_on(stream, 2) as view:
        view.begun(CHECK)
        view.ended(PASSED)
    shown = read_to_the_end(parent).decode()
    assert "passed" in shown
    assert ("\x1b[" in shown) is is_live
