"""`holdfast verify diff A B` as its users meet it."""

from __future__ import annotations

import json
import math
import os
import pty
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.verify.command import verify
from holdfast.verify.diff import show
from holdfast.verify.records import CheckStatus, Number, Report, at_most
from holdfast.verify.report import FORMS, as_json
from sample_reports import SERVED, SERVER, check, report
from terminals import read_to_the_end

BEFORE = report(check("chat"))
AFTER = report(
    check("chat", CheckStatus.FAILED, why="no \x1b[2Janswer [red]"),
    server=replace(SERVER, configuration=replace(SERVED, driver="580.95.05")),
)


def saved(one: Report, path: Path) -> Path:
    """A report.json."""
    path.write_text(FORMS["report.json"](one))
    return path


def test_a_pipe_gets_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status first, then numbers, then configuration; a report may be named by its directory."""
    saved(BEFORE, tmp_path / "report.json")
    after = saved(AFTER, tmp_path / "b.json")
    assert verify(["diff", str(tmp_path), str(after)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("A: org/model, 2026-11-23 11:00:00 UTC, passed: 1 passed")
    assert lines[1].startswith("B: org/model")
    assert lines[3:] == [
        "Status",
        "  wire.chat: passed -> failed: no \N{REPLACEMENT CHARACTER}[2Janswer [red]",
        "",
        "Numbers: no change",
        "",
        "Configuration",
        "  driver: - -> 580.95.05",
        "",
        lines[-1],
    ]
    assert lines[-1].startswith("the same: 0 statuses, 0 numbers, ")


def test_a_terminal_gets_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """In colours; nothing that a report says is an order to the terminal."""
    monkeypatch.setenv("TERM", "xterm")
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as stream:
        show(BEFORE, AFTER, stream)
    shown = read_to_the_end(parent).decode()
    assert "\x1b[1;31mfailed" in shown
    assert "\x1b[2J" not in shown
    assert "580.95.05" in shown
    assert "[red]" in shown


def test_a_report_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """With a number that JSON does not have."""
    one = report(
        check("chat", CheckStatus.PASSED, Number("most", math.inf, limit=at_most(math.inf)))
    )
    assert as_json.read(saved(one, tmp_path / "report.json")) == one


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Expecting value"),
        (b'{"\xff', "decode"),
        (b"[" * 200_000, "nested too deeply"),
        (b"[]", "its schema is 'None' instead of 'holdfast-verify/1'"),
        (b'{"schema": "holdfast-verify/2"}', "its schema is 'holdfast-verify/2' instead of"),
        (b'{"schema": "holdfast-verify/1"}', "tool: "),
        (b'{"schema": ' + b"9" * 5000 + b"}", "integer"),
    ],
    ids=["empty", "bytes", "deep", "list", "version", "fields", "digits"],
)
def test_what_is_not_a_report_is_one_clear_error(content: bytes, why: str, tmp_path: Path) -> None:
    """The file, the reason and what to do."""
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        verify(["diff", str(path), str(path)])
    assert caught.value.cause.startswith(f"{path} is not a report: ")
    assert why in caught.value.cause
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["missing.json", "pipe", "."])
def test_what_is_not_a_file_is_one_clear_error(name: str, tmp_path: Path) -> None:
    """Nobody waits for the other end of a pipe."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=r"there is no such file|it is not a file"):
        verify(["diff", str(tmp_path / name), str(tmp_path / name)])


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fill the memory."""
    path = saved(BEFORE, tmp_path / "a.json")
    monkeypatch.setattr(as_json, "_MAX_BYTES", 100)
    with pytest.raises(UsageError, match="it has more than 100 bytes"):
        verify(["diff", str(path), str(path)])


def test_a_field_of_another_kind_is_named(tmp_path: Path) -> None:
    """By its path in the file."""
    path = saved(BEFORE, tmp_path / "a.json")
    document = json.loads(path.read_text())
    document["checks"][0]["status"] = "fine"
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"checks\.0\.status: "):
        verify(["diff", str(path), str(path)])


@pytest.mark.parametrize("arguments", [[], ["a"], ["a", "b", "c"]])
def test_two_reports_are_needed(arguments: list[str]) -> None:
    """Neither less nor more."""
    with pytest.raises(UsageError):
        verify(["diff", *arguments])
