"""A process writes its own stacks when it is asked to by a signal, where no tool reads them."""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR2
"""Used by neither vLLM nor torch (0.32, 2.13)."""


def stacks_path(directory: Path, pid: int) -> Path:
    """Where the process writes; there is no file if it would not understand the signal."""
    return directory / f"{pid}.stacks"


def offer_stacks(directory: Path, pid: int) -> None:
    """Have this process, whose pid is given, write all its stacks at each `STACKS_SIGNAL`.

    It does so within C code that holds the interpreter's lock, too.
    """
    # faulthandler keeps the file.
    faulthandler.register(STACKS_SIGNAL, stacks_path(directory, pid).open("w"), all_threads=True)
