"""What ends the process before it serves? A signal, also of the first process of a container.

Imported before anything that takes long, so it imports nothing that does.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from holdfast.errors import ExitCode

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What asks the process to end; SIGHUP comes when its terminal is closed."""


def heeded() -> tuple[signal.Signals, ...]:
    """Those of `ENDING` that are not ignored, as `nohup` and a shell's background have it."""
    return tuple(number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN)


def end_until_serving() -> None:
    """From now on each of them ends the process at once and cleanly: it holds nothing yet.

    Without a handler the kernel drops a signal to the first process of a container, see
    https://man7.org/linux/man-pages/man7/pid_namespaces.7.html. An exception would not do: one that
    is raised while Python removes the lock of an import is printed and forgotten.
    """
    for number in heeded():
        signal.signal(number, _end)


def _end(_number: int, _frame: object) -> NoReturn:
    os._exit(ExitCode.STOPPED)
