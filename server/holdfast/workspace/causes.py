"""Why did an engine process fail? vLLM answers "see root cause above"; this keeps the root cause.

vLLM logs every fatal exception in the process where it happened, and tells the front end nothing
of it (`EngineDeadError` carries a fixed text; `Engine core initialization failed` names no cause).
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_SUFFIX = ".cause"


@dataclass(frozen=True, slots=True)
class Cause:
    """One exception that vLLM logged as an error."""

    pid: int
    at_seconds: float
    logged: str
    error: str

    @property
    def is_consequence(self) -> bool:
        """Whether it only repeats that another process failed."""
        return any(phrase in self.error for phrase in _CONSEQUENCES)


_CONSEQUENCES = (
    "See stack trace for root cause",
    "See root cause above",
    "initialization failed due to an exception in a background process",
    "Executor failed.",
    "cancelled",
)


class _CauseHandler(logging.Handler):
    """Appends each logged exception to a file of this process."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return
        cause = Cause(
            os.getpid(),
            time.monotonic(),
            record.getMessage(),
            f"{type(error).__name__}: {error}",
        )
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(cause)) + "\n")


def record_causes(directory: Path) -> None:
    """Keep what vLLM logs as exceptions in this process in a file under `directory`."""
    logger = logging.getLogger("vllm")
    if not any(isinstance(handler, _CauseHandler) for handler in logger.handlers):
        logger.addHandler(_CauseHandler(directory / f"{os.getpid()}{_SUFFIX}"))


def read_causes(directory: Path) -> tuple[Cause, ...]:
    """What the processes of a generation left behind, oldest first; half-written lines left out."""
    found: list[Cause] = []
    for path in directory.glob(f"*{_SUFFIX}"):
        for line in path.read_text(errors="replace").splitlines():
            try:
                found.append(Cause(**json.loads(line)))
            except (ValueError, TypeError):
                continue
    return tuple(sorted(found, key=lambda cause: cause.at_seconds))


def root_cause(directory: Path) -> str:
    """The oldest exception that is not the echo of another process's; empty if there is none."""
    causes = read_causes(directory)
    first = next((cause for cause in causes if not cause.is_consequence), None)
    return (first or causes[0]).error if causes else ""
