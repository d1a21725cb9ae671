"""How the fork server's children ended: it asks the kernel first, and nobody can after it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

DIRECTORY_VARIABLE = "HOLDFAST_EXIT_CODES"
OUT_OF_MEMORY = " (probably for lack of memory)"


def note_in(directory: Path) -> None:
    """Have every child that this process waits for leave its exit code in `directory`."""
    wait = os.waitpid

    def waitpid(pid: int, options: int, /) -> tuple[int, int]:
        ended_pid, status = wait(pid, options)
        if ended_pid:
            with suppress(OSError):  # the front end has ended and taken the directory with it
                directory.mkdir(exist_ok=True)
                code = os.waitstatus_to_exitcode(status)
                (directory / str(ended_pid)).write_text(str(code))
        return ended_pid, status

    os.waitpid = waitpid


def ended_by(code: int) -> str:
    """Describe for people how a signal ended a process."""
    memory = OUT_OF_MEMORY if code == -signal.SIGKILL else ""
    return f"was killed by {signal_name(-code)}{memory}"


def signal_name(number: int) -> str:
    """Its name; of the signals for real time only the first and the last have one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def noted(directory: Path) -> frozenset[Path]:
    """Return the exit codes that are known now."""
    return frozenset(directory.glob("*"))


def first_killed(directory: Path, before: frozenset[Path]) -> str:
    """Which process was killed by a signal first since `before`, other than to ask for its end."""
    news = [path for path in noted(directory) - before if path.name.isdecimal()]
    for path in sorted(news, key=lambda path: path.stat().st_mtime_ns):
        code = exit_code(directory, int(path.name))
        if code is not None and code < 0 and code != -signal.SIGTERM:
            return f"its process {path.name} {ended_by(code)}"
    return ""


def exit_code(directory: Path, pid: int) -> int | None:
    """As `subprocess` has it; None if it is not known."""
    try:
        return int((directory / str(pid)).read_text())
    except (OSError, ValueError):
        return None
