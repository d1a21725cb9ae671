from __future__ import annotations

import logging
import os
import pty
import re
import select
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.records import ProbeStep
from holdfast.telemetry.progress import LiveProgress, LogProgress, Progress, progress_for

DEADLINE_SECONDS = 60
COLUMNS = 100

# A start-up on the terminal it inherits, while a child process logs to the same terminal.
START_UP = """
import subprocess, sys
from holdfast.records import ProbeStep
from holdfast.telemetry.progress import progress_for

CHILD = '''
import sys, time
for index in range(30):
    line = f"INFO worker says {index} " + "." * 60
    sys.stderr.write(line + chr(10))
    sys.stderr.flush()
    time.sleep(0.02)
'''

with progress_for(sys.stderr) as progress:
    progress.state_changed("STARTING", "first start")
    progress.phase_started("load")
    subprocess.run([sys.executable, "-c", CHILD], check=True, timeout=50)
    progress.phase_finished("load", 12.3)
    progress.step_started("full_context", "", 4095)
    progress.step_finished(ProbeStep("full_context", "passed", 1.5, 4095))
    progress.ready("http://127.0.0.1:8000")
print("after", file=sys.stderr)
"""


def _start_up(progress: Progress) -> None:
    with progress:
        progress.state_changed("STARTING", "first start")
        progress.phase_started("load")
        progress.phase_finished("load", 12.34)
        progress.step_started("full_context", "one prompt", 4095)
        progress.step_finished(ProbeStep("full_context", "passed", 1.5, 4095))
        progress.ready("Ready at http://127.0.0.1:8000")


def _lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def test_the_log_has_one_line_a_step(caplog: pytest.LogCaptureFixture) -> None:
    """Each phase and step is one line with its time and size."""
    caplog.set_level(logging.DEBUG)
    _start_up(LogProgress(logging.getLogger("a.pipe")))
    assert _lines(caplog) == [
        "state: STARTING: first start",
        "start: load the weights, 12.3 s",
        "probe: full_context passed, 4,095 tokens, 1.5 s",
        "Ready at http://127.0.0.1:8000",
    ]


def test_the_log_says_at_debug_what_began(caplog: pytest.LogCaptureFixture) -> None:
    """The log of a step that hangs says that it began, and with which size."""
    caplog.set_level(logging.DEBUG)
    _start_up(LogProgress(logging.getLogger("a.pipe")))
    assert "probe: full_context, 4,095 tokens, one prompt" in _lines(caplog, logging.DEBUG)


@pytest.mark.parametrize(
    ("step", "level", "line"),
    [
        (
            ProbeStep("full_batch", "failed", 2.0, 64, reason="HTTP 500"),
            "ERROR",
            "probe: full_batch failed, 64 tokens, 2.0 s: HTTP 500",
        ),
        (
            ProbeStep("widest_decode", "skipped", 0.0, reason="log-probs are off"),
            "INFO",
            "probe: widest_decode skipped: log-probs are off",
        ),
        (
            ProbeStep("context_sweep", "passed", 3.0, 512, limited=True, reason="journal"),
            "WARNING",
            "probe: context_sweep passed in part, 512 tokens, 3.0 s: journal",
        ),
    ],
)
def test_the_log_says_what_is_not_whole(
    caplog: pytest.LogCaptureFixture, step: ProbeStep, level: str, line: str
) -> None:
    """A failed step is an error, a limited one a warning, each with its reason."""
    caplog.set_level(logging.INFO)
    LogProgress(logging.getLogger("a.pipe")).step_finished(step)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (level, line)


def test_the_live_view_leaves_a_line_for_each_step() -> None:
    """What is finished stays on the terminal with its time and size; the live line does not."""
    stream = StringIO()
    _start_up(LiveProgress(Console(file=stream, force_terminal=True, width=COLUMNS)))
    assert _screen(stream.getvalue()) == [
        "STARTING   first start",
        "done       load the weights, 12.3 s",
        "probe      full_context passed, 4,095 tokens, 1.5 s",
        "ready      Ready at http://127.0.0.1:8000",
    ]


def test_the_live_view_shows_what_is_being_done() -> None:
    """The activity and its size are on the terminal while it runs."""
    stream = StringIO()
    with LiveProgress(Console(file=stream, force_terminal=True, width=COLUMNS)) as progress:
        progress.step_started("full_context", "", 4095)
        (row,) = _screen(stream.getvalue())
        assert "probe full_context, 4,095 tokens" in row


def test_the_live_line_never_wraps() -> None:
    """On a narrow terminal the live line is cut, so that it can always be erased whole."""
    stream = StringIO()
    with LiveProgress(Console(file=stream, force_terminal=True, width=20)) as progress:
        progress.step_started("full_context", "a detail that is far too long", 4095)
        (row,) = _screen(stream.getvalue())
        assert len(row) < 20


def _interrupted_start_up(progress: Progress) -> None:
    with progress:
        progress.phase_started("load")
        raise KeyboardInterrupt


def test_leaving_gives_the_terminal_back_after_a_failure() -> None:
    """The live line is erased and the cursor shown again though a step was never finished."""
    stream = StringIO()
    progress = LiveProgress(Console(file=stream, force_terminal=True, width=COLUMNS))
    with pytest.raises(KeyboardInterrupt):
        _interrupted_start_up(progress)
    assert _screen(stream.getvalue()) == []
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_a_pipe_gets_log_lines() -> None:
    """Only a terminal gets control codes."""
    assert isinstance(progress_for(StringIO()), LogProgress)


@pytest.mark.parametrize(("term", "kind"), [("xterm", LiveProgress), ("dumb", LogProgress)])
def test_a_terminal_gets_the_live_view_if_it_can(
    monkeypatch: pytest.MonkeyPatch, term: str, kind: type
) -> None:
    """A terminal gets the live view, unless it cannot move its cursor."""
    monkeypatch.setenv("TERM", term)
    leader, follower = pty.openpty()
    with os.fdopen(leader, "rb"), os.fdopen(follower, "w") as stream:
        assert isinstance(progress_for(stream), kind)


def test_lines_of_other_processes_survive_on_a_real_terminal(tmp_path: Path) -> None:
    """What a child logs to the same terminal is complete and begins in the first column."""
    script = tmp_path / "start_up.py"
    script.write_text(START_UP)
    rows = _screen(_on_a_terminal([sys.executable, str(script)]))
    said = [row for row in rows if row.startswith("INFO worker says")]
    assert [int(row.split()[3]) for row in said] == list(range(30))
    assert [row for row in rows if row not in said] == [
        "STARTING   first start",
        "done       load the weights, 12.3 s",
        "probe      full_context passed, 4,095 tokens, 1.5 s",
        "ready      http://127.0.0.1:8000",
        "after",
    ]


def _on_a_terminal(command: list[str]) -> str:
    """What the command wrote to a pseudo-terminal of 100 columns."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": "40"}
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    chunks: list[bytes] = []
    deadline_seconds = time.monotonic() + DEADLINE_SECONDS
    try:
        while (left := deadline_seconds - time.monotonic()) > 0:
            if not select.select([leader], [], [], left)[0]:
                break
            try:
                chunks.append(os.read(leader, 65536))
            except OSError:  # the last holder of the other end is gone
                break
        assert process.wait(timeout=DEADLINE_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    return b"".join(chunks).decode()


def _screen(written: str) -> list[str]:
    """The rows that a terminal shows after this was written to it, without the empty ones."""
    rows, row, column = [""], 0, 0
    for code in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|.", written, re.DOTALL):
        if code == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif code == "\r":
            column = 0
        elif code.endswith("A") and code.startswith("\x1b"):
            row -= int(code[2:-1])
        elif code == "\x1b[2K":
            rows[row] = ""
        elif not code.startswith("\x1b"):
            text = rows[row].ljust(column)
            rows[row] = text[:column] + code + text[column + 1 :]
            column += 1
    return [text.rstrip() for text in rows if text.strip()]
