"""Signals end the process before it serves, even if it is the first process of a container.

This module is imported before everything that takes long, so it imports nothing slow.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from holdfast.errors import ExitCode

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that ask the process to end; SIGHUP comes when its terminal is closed."""


def handled() -> tuple[signal.Signals, ...]:
    """Return the signals of `ENDING` that are not ignored; `nohup` and shells ignore some."""
    return tuple(number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN)


def end_until_serving() -> None:
    """End the process at once and cleanly when one of them arrives: it holds nothing yet.

    Without a handler the kernel drops a signal to the first process of a container, see
    https://man7.org/linux/man-pages/man7/pid_namespaces.7.html. Raising an exception would not do:
    while Python removes the lock of an import, exceptions are only printed.
    """
    for number in handled():
        signal.signal(number, _end)


def _end(_number: int, _frame: object) -> NoReturn:
    os._exit(ExitCode.STOPPED)
