"""Keeps the root cause of an engine process's failure; vLLM says only "see root cause above".

vLLM logs every fatal exception in the process where it happened, and tells the front end nothing
of it (`EngineDeadError` carries a fixed text; `Engine core initialization failed` names no cause).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from holdfast.atomic_files import files_with_suffix
from holdfast.patches import fits

_SUFFIX = ".cause"
MOST_BYTES = 1 << 20
"""Past this size, a process keeps only exceptions that end it."""
_MOST_CHARACTERS = 64 * 1024


@dataclass(frozen=True, slots=True)
class Cause:
    """One exception that vLLM logged as an error."""

    pid: int
    at_seconds: float
    logged: str
    error: str
    traceback: str = ""

    @property
    def is_consequence(self) -> bool:
        """Whether it only repeats that another process failed."""
        return any(phrase in self.error for phrase in _CONSEQUENCES)

    @property
    def is_fatal(self) -> bool:
        """Whether the process ends with it; an RPC that failed, `add_lora` say, ends nothing."""
        return self.logged.startswith(_FATAL)


_CONSEQUENCES = (
    "See stack trace for root cause",
    "See root cause above",
    "initialization failed due to an exception in a background process",
    "Executor failed.",
    "could not agree with the other ranks",
    "cancelled",
)
_FATAL = ("EngineCore encountered a fatal error", "EngineCore failed", "WorkerProc failed")
_TRACEBACK = "Traceback (most recent call last)"
_TERMINATED_SUFFIX = ".terminated"


class _CauseHandler(logging.Handler):
    """Appends each logged exception to a file of this process, which does not grow without end.

    What ends the process is kept however long the file is. A disk that takes nothing costs the
    cause, and not the thread that logs it.
    """

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
            f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS],
            "".join(traceback.format_exception(error))[-_MOST_CHARACTERS:],
        )
        try:
            with self._path.open("a") as file:
                if cause.is_fatal or file.tell() < MOST_BYTES:
                    # The line before may have been cut off by a full disk.
                    file.write(f"\n{json.dumps(asdict(cause))}\n")
        except OSError:
            self.handleError(record)


class _WithoutTraceback(logging.Filter):
    """Puts the last line of an error's traceback in the place of the whole, while `is_quiet`."""

    def __init__(self, is_quiet: Callable[[], bool]) -> None:
        super().__init__()
        self._is_quiet = is_quiet

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if record.exc_info and self._is_quiet():
            record.exc_info = record.exc_text = None
            if error is not None:
                record.msg, record.args = f"{record.getMessage()} ({last_line(error)})", ()
        return True


class _Noted(logging.Handler):
    """Keeps what was logged last as an exception."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.line = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.line = last_line(record.exc_info[1])


@contextmanager
def logged_causes() -> Iterator[Callable[[], str]]:
    """While entered, the last line of the exception that vLLM logged last; empty if it did not."""
    logger, noted = logging.getLogger("vllm"), _Noted()
    # The first, see `record_causes`.
    logger.handlers.insert(0, noted)
    try:
        yield lambda: noted.line
    finally:
        logger.removeHandler(noted)


def last_line(error: BaseException) -> str:
    """What was raised, on one line; of another process's traceback its last one."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and _TRACEBACK in text:
        return lines[-1]
    return f"{type(error).__name__}: {' '.join(lines)}" if lines else type(error).__name__


def record_causes(directory: Path) -> None:
    """Keep what vLLM logs as exceptions in this process in a file under `directory`.

    Unless vLLM logs at level debug, the tracebacks are kept there and not printed: the front end
    prints the one that matters, where it matters.
    """
    logger = logging.getLogger("vllm")
    if any(isinstance(handler, _CauseHandler) for handler in logger.handlers):
        return
    if not logger.isEnabledFor(logging.DEBUG):
        without_tracebacks(lambda: True)
        if fits("worker.crash_records.record_causes"):
            # How `multiprocessing` prints what ends a process, which vLLM has logged before.
            traceback.print_exc = _print_nothing
    # The first, because the filter takes the traceback from the record that all handlers share.
    logger.handlers.insert(0, _CauseHandler(directory / f"{os.getpid()}{_SUFFIX}"))


def note_termination(directory: Path) -> None:
    """Leave a file under `directory` when this process is asked to end, and go on as before.

    vLLM's EngineCore takes seconds for its end, and answers `abort` to every request meanwhile.
    """
    handle = signal.getsignal(signal.SIGTERM)
    if not callable(handle):
        return

    def noted(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # the disk may be full
            (directory / f"{os.getpid()}{_TERMINATED_SUFFIX}").touch()
        handle(number, frame)

    signal.signal(signal.SIGTERM, noted)


def was_terminated(directory: Path) -> bool:
    """Whether a process of the generation was asked to end."""
    return bool(files_with_suffix(_TERMINATED_SUFFIX, directory))


def without_tracebacks(is_quiet: Callable[[], bool]) -> None:
    """Have vLLM's log lines in this process stand without their tracebacks while `is_quiet`."""
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(_WithoutTraceback(is_quiet))


def _print_nothing(*_: object, **__: object) -> None:
    pass


def read_causes(directory: Path) -> tuple[Cause, ...]:
    """What the processes of a generation left behind, oldest first; half-written lines left out."""
    found: list[Cause] = []
    for path in files_with_suffix(_SUFFIX, directory):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:  # a death without its cause is still a death
            continue
        for line in lines:
            try:
                found.append(Cause(**json.loads(line)))
            except (ValueError, TypeError):
                continue
    return tuple(sorted(found, key=lambda cause: cause.at_seconds))


def tracebacks(directory: Path) -> str:
    """Return the tracebacks in a generation that do not echo another process's, oldest first."""
    return "\n".join(c.traceback for c in read_causes(directory) if not c.is_consequence)


def root_cause(directory: Path) -> str:
    """The oldest exception that is not the echo of another process's; empty if there is none."""
    cause = root_of(read_causes(directory))
    return cause.error if cause else ""


def root_of(causes: Sequence[Cause]) -> Cause | None:
    """The oldest of `causes` that is not the echo of another; the oldest, if all are echoes."""
    first = next((cause for cause in causes if not cause.is_consequence), None)
    return first or next(iter(causes), None)
