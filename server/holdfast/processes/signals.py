"""Ends the process: the first signal asks for a drain, the second ends it at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from holdfast import early_signals
from holdfast.processes import cleanup, runtime_directory, tree

Handler = Callable[[int, object], NoReturn]


@contextmanager
def remembered() -> Iterator[Callable[[], bool]]:
    """Only note a signal to end while entered; yield a function that tells whether one came."""
    came: list[int] = []
    for number in early_signals.heeded():
        signal.signal(number, lambda number, _frame: came.append(number))
    yield lambda: bool(came)


@contextmanager
def heeded(
    stop: Callable[[], None], end_now: Handler, *, has_come: Callable[[], bool]
) -> Iterator[None]:
    """While entered, SIGTERM and SIGINT ask for a drain; every further one, and later, ends.

    SIGHUP asks for a drain too, and for nothing more: a terminal that is closed sends it twice,
    from the shell and from the kernel. One that has come before is heeded at once.
    """
    loop = asyncio.get_running_loop()
    handled = early_signals.heeded()
    ending = [number for number in handled if number != signal.SIGHUP]

    def arm() -> None:
        for number in ending:
            loop.remove_signal_handler(number)
            signal.signal(number, end_now)

    def first() -> None:
        arm()
        stop()

    for number in handled:
        loop.add_signal_handler(number, first if number in ending else stop)
    if has_come():
        stop()
    try:
        yield
    finally:
        arm()
        if signal.SIGHUP in handled:
            loop.remove_signal_handler(signal.SIGHUP)
            # Else it would end what is being put away, by its default action.
            signal.signal(signal.SIGHUP, lambda _number, _frame: None)


def end_now(directory: Path, uds: str | None, signal_number: int, _frame: object) -> NoReturn:
    """End at once, with what no context manager gets the time for.

    The exit code is 128 + the number of the signal, which is what a shell and a container report
    for a process that a signal ended: this was not a clean stop, but nothing was wrong either.
    """
    family = tree.children()
    left_behind = cleanup.shared_memory(family)
    tree.kill(family)
    cleanup.unlink(left_behind)
    runtime_directory.remove(directory)
    if uds:
        Path(uds).unlink(missing_ok=True)
    if sys.stderr.isatty():
        with suppress(OSError):  # it may have been closed
            os.write(2, b"\x1b[?25h")  # the cursor, which the progress view may have hidden
    os._exit(128 + signal_number)
