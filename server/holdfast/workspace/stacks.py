"""A process writes its own stacks when it is asked to by a signal, where no tool reads them."""

from __future__ import annotations

import faulthandler
import logging
import signal
from pathlib import Path

logger = logging.getLogger(__name__)

STACKS_SIGNAL = signal.SIGUSR2
"""Used by neither vLLM nor torch (0.32, 2.13)."""


def stacks_path(directory: Path, pid: int) -> Path:
    """Where the process writes; there is no file if it would not understand the signal."""
    return directory / f"{pid}.stacks"


def offer_stacks(directory: Path, pid: int) -> None:
    """Have this process, whose pid is given, write all its stacks at each `STACKS_SIGNAL`.

    It does so within C code that holds the interpreter's lock, too.
    """
    try:
        file = stacks_path(directory, pid).open("w")
    except OSError as error:
        logger.warning("this process cannot report its stacks: %s", error)
        return
    # faulthandler keeps the file.
    faulthandler.register(STACKS_SIGNAL, file, all_threads=True)
