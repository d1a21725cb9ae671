"""What the fork server has noted of its children's ends tells why a start failed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from holdfast.processes import exit_codes
from holdfast.processes.exits import Ending


def _ends(directory: Path, pid: int, code: int, at_seconds: float) -> None:
    path = directory / str(pid)
    path.write_text(str(code))
    os.utime(path, (at_seconds, at_seconds))


def test_the_first_that_a_signal_ended_is_named(tmp_path: Path) -> None:
    """Not who was asked to end after it, nor who ended with an exit code, nor earlier ones."""
    _ends(tmp_path, 1, -signal.SIGKILL, 1)
    before = exit_codes.noted(tmp_path)
    _ends(tmp_path, 2, -signal.SIGTERM, 2)
    _ends(tmp_path, 3, 1, 3)
    assert exit_codes.first_killed(tmp_path, before) == ""
    _ends(tmp_path, 4, -signal.SIGKILL, 5)
    _ends(tmp_path, 5, -signal.SIGSEGV, 4)
    assert exit_codes.first_killed(tmp_path, before) == "its process 5 was killed by SIGSEGV"


def test_a_process_that_was_killed_may_have_had_too_little_memory(tmp_path: Path) -> None:
    """Which is how the kernel ends the largest one."""
    _ends(tmp_path, 1, -signal.SIGKILL, 1)
    told = exit_codes.first_killed(tmp_path, frozenset())
    assert told == "its process 1 was killed by SIGKILL (probably for lack of memory)"


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path: Path) -> None:
    """Most of those for real time have none."""
    number = signal.SIGRTMIN + 1
    _ends(tmp_path, 1, -number, 1)
    told = exit_codes.first_killed(tmp_path, frozenset())
    assert told == f"its process 1 was killed by signal {number}"
    assert str(Ending(1, -number)) == f"was killed by signal {number}"


def test_where_nothing_was_noted_nothing_is_told(tmp_path: Path) -> None:
    """The server makes the directory with the first end."""
    assert exit_codes.first_killed(tmp_path / "none", frozenset()) == ""
