"""How does the process end? The first signal asks for a drain, the second ends it at once."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from holdfast.engine import processes, remains

Handler = Callable[[int, object], NoReturn]


@contextmanager
def heeded(stop: Callable[[], None], end_now: Handler) -> Iterator[None]:
    """While entered, SIGTERM and SIGINT ask for a drain; every further one, and later, ends."""
    loop = asyncio.get_running_loop()
    handled = (signal.SIGTERM, signal.SIGINT)

    def arm() -> None:
        for number in handled:
            loop.remove_signal_handler(number)
            signal.signal(number, end_now)

    def first() -> None:
        arm()
        stop()

    for number in handled:
        loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        arm()


def end_now(directory: Path, uds: str | None, signal_number: int, _frame: object) -> NoReturn:
    """End at once, with what no context manager gets the time for.

    The exit code is 128 + the number of the signal, which is what a shell and a container report
    for a process that a signal ended: this was no clean stop, and nothing was wrong either.
    """
    family = processes.children()
    left_behind = remains.shared_memory(family)
    processes.kill(family)
    remains.unlink(left_behind)
    for generation in directory.iterdir():
        remains.remove(generation)
    shutil.rmtree(directory, ignore_errors=True)
    if uds:
        Path(uds).unlink(missing_ok=True)
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h")  # the cursor, which the progress view may have hidden
    os._exit(128 + signal_number)
