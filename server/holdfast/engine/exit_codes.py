"""How the fork server's children ended: it asks the kernel first, and nobody can after it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

DIRECTORY_VARIABLE = "HOLDFAST_EXIT_CODES"


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


def exit_code(directory: Path, pid: int) -> int | None:
    """As `subprocess` has it; None if it is not known."""
    try:
        return int((directory / str(pid)).read_text())
    except (OSError, ValueError):
        return None
