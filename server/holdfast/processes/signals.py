"""Ends the process on signals: the first starts a drain, the second ends it at once."""

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
from holdfast.listener.unix_socket import LOCK_SUFFIX
from holdfast.processes import cleanup, forkserver, runtime_directory, tree

Handler = Callable[[int, object], NoReturn]


@contextmanager
def deferred() -> Iterator[Callable[[], bool]]:
    """Only record signals while entered; yield a function that tells whether one has arrived."""
    came: list[int] = []
    for number in early_signals.handled():
        signal.signal(number, lambda number, _frame: came.append(number))
    yield lambda: bool(came)


@contextmanager
def draining(
    stop: Callable[[], None], end_now: Handler, *, has_come: Callable[[], bool]
) -> Iterator[None]:
    """Make the first SIGTERM or SIGINT start a drain; later ones, or any after leaving, end.

    SIGHUP starts a drain too, but never ends: a closed terminal sends it twice, from the shell and
    from the kernel. If a signal has arrived before, the drain starts at once.
    """
    loop = asyncio.get_running_loop()
    handled = early_signals.handled()
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
            # Its default action would end the process in the middle of its clean-up.
            signal.signal(signal.SIGHUP, lambda _number, _frame: None)


def end_now(directory: Path, uds: str | None, signal_number: int, _frame: object) -> NoReturn:
    """End at once, doing what the context managers no longer have the time to do.

    The exit code is 128 + the number of the signal, as shells and containers report for a process
    that a signal ended: it was not a clean stop, but nothing was wrong either.
    """
    forkserver.start_nothing_more()
    family = tree.children()
    left_behind = cleanup.shared_memory(family)
    tree.kill(family)
    cleanup.unlink(left_behind)
    runtime_directory.remove(directory)
    if uds:
        for path in (uds, uds + LOCK_SUFFIX):
            Path(path).unlink(missing_ok=True)
    if sys.stderr.isatty():
        with suppress(OSError):  # the terminal may be closed
            os.write(2, b"\x1b[?25h")  # the cursor, which the progress view may have hidden
    os._exit(128 + signal_number)
