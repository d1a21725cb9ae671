"""Imports vLLM faster: Python's garbage collector does not run meanwhile."""

from __future__ import annotations

import atexit
import gc
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector off while entered; for the first import of vLLM in a process.

    An import makes a million objects, and nearly all of them stay. The collector looks at them
    hundreds of times, which is 2 of the 10 s of processor time that an import of vLLM takes (0.32).
    What was imported is frozen at the end, so that no later collection looks at it again, for 0.5
    to 0.9 s each. The process takes 13 MiB more of 600.

    When the process exits, everything is collected as ever: Triton writes an error for each of its
    functions that is left then.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        if was_on:
            gc.enable()


def unpickled(process_class: type[BaseProcess], state: bytes) -> BaseProcess:
    """Restore a process of `multiprocessing` within itself; for a spawned one this imports vLLM.

    `state` are its attributes.
    """
    process = process_class.__new__(process_class)
    with uncollected():
        process.__dict__.update(pickle.loads(state))  # noqa: S301 - from the process that started it
    return process
