"""Records why an engine process failed; vLLM's front end says only "see root cause above".

vLLM logs every fatal exception in the process that raised it, and does not tell the front end
(`EngineDeadError` has a fixed text; `Engine core initialization failed` names no cause).
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
MAX_BYTES = 1 << 20
"""Past this size, a process keeps only exceptions that end it."""
_MAX_CHARACTERS = 64 * 1024


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
        """Whether it ends the process; a failed RPC, for example `add_lora`, does not."""
        return self.logged.startswith(_FATAL)


_CONSEQUENCES = (
    "See stack trace for root cause",
    "See root cause above",
    "initialization failed due to an exception in a background process",
    "Executor failed.",
    "could not agree with the other ranks",
    "cancelled",
)
NODE_FAILED = "this node cannot run its ranks"
"""The beginning of what `engine.launch.node_ranks` logs."""
_FATAL = (
    "EngineCore encountered a fatal error",
    "EngineCore failed",
    "WorkerProc failed",
    NODE_FAILED,
)
_TRACEBACK = "Traceback (most recent call last)"
_FOR_USERS = ("ValueError: ", "SafetensorError: ")
"""What vLLM raises for what a user can correct, and what a damaged file raises; each names it."""
_TERMINATED_SUFFIX = ".terminated"


class _CauseHandler(logging.Handler):
    """Appends each logged exception to a file of this process, up to a limit.

    An exception that ends the process is kept even beyond the limit. If the disk is full, the
    exception is lost, but logging it does not fail.
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
            f"{type(error).__name__}: {error}"[:_MAX_CHARACTERS],
            "".join(traceback.format_exception(error))[-_MAX_CHARACTERS:],
        )
        try:
            with self._path.open("a") as file:
                if cause.is_fatal or file.tell() < MAX_BYTES:
                    # A full disk may have truncated the previous line.
                    file.write(f"\n{json.dumps(asdict(cause))}\n")
        except OSError:
            self.handleError(record)


class _WithoutTraceback(logging.Filter):
    """Replaces an error's traceback by its last line while `is_quiet`."""

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


class _LastException(logging.Handler):
    """Keeps the last line of the exception that was logged last."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.line = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.line = last_line(record.exc_info[1])


@contextmanager
def last_logged_exception() -> Iterator[Callable[[], str]]:
    """While entered, watch vLLM's log; yield a function that returns the last exception's line.

    It is empty if vLLM has logged no exception.
    """
    logger, recorded = logging.getLogger("vllm"), _LastException()
    # As the first handler, see `record_causes`.
    logger.handlers.insert(0, recorded)
    try:
        yield lambda: recorded.line
    finally:
        logger.removeHandler(recorded)


def last_line(error: BaseException) -> str:
    """Return an exception as one line; the last one if it contains another process's traceback."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and _TRACEBACK in text:
        return lines[-1]
    return f"{type(error).__name__}: {' '.join(lines)}" if lines else type(error).__name__


def record_causes(directory: Path) -> None:
    """Record the exceptions that vLLM logs in this process in a file under `directory`.

    Their tracebacks are not printed, unless vLLM logs at level debug: the front end prints the one
    that matters.
    """
    logger = logging.getLogger("vllm")
    if any(isinstance(handler, _CauseHandler) for handler in logger.handlers):
        return
    if not logger.isEnabledFor(logging.DEBUG):
        shorten_tracebacks(lambda: True)
        if fits("worker.crash_records.record_causes"):
            # `multiprocessing` prints what ends a process with it, and vLLM has logged it already.
            traceback.print_exc = _print_nothing
    # As the first handler, because the filter removes the traceback from the shared record.
    logger.handlers.insert(0, _CauseHandler(directory / f"{os.getpid()}{_SUFFIX}"))


def record_termination(directory: Path) -> None:
    """Leave a file under `directory` when this process gets SIGTERM; handle it as before.

    vLLM's EngineCore takes seconds to end, and meanwhile answers `abort` to every request.
    """
    handle = signal.getsignal(signal.SIGTERM)
    if not callable(handle):
        return

    def recorded(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # the disk may be full
            (directory / f"{os.getpid()}{_TERMINATED_SUFFIX}").touch()
        handle(number, frame)

    signal.signal(signal.SIGTERM, recorded)


def was_terminated(directory: Path) -> bool:
    """Whether a process of the generation got SIGTERM."""
    return bool(files_with_suffix(_TERMINATED_SUFFIX, directory))


def shorten_tracebacks(is_quiet: Callable[[], bool]) -> None:
    """Replace tracebacks in vLLM's log of this process by their last lines while `is_quiet`."""
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(_WithoutTraceback(is_quiet))


def _print_nothing(*_: object, **__: object) -> None:
    pass


def read_causes(directory: Path) -> tuple[Cause, ...]:
    """Return the causes that a generation's processes recorded, oldest first, if readable."""
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


def unexpected_traceback(directory: Path) -> str:
    """Return the traceback of the root cause; empty if none is known.

    It is also empty if the message of the cause says what a user can correct.
    """
    cause = root_of(read_causes(directory))
    if cause is None or cause.is_consequence or cause.error.startswith(_FOR_USERS):
        return ""
    return cause.traceback


def root_cause(directory: Path) -> str:
    """Return the oldest exception that does not echo another process's; empty if none is known."""
    cause = root_of(read_causes(directory))
    return cause.error if cause else ""


def refusal(directory: Path) -> str:
    """Return why `engine.launch.node_ranks` could not run its ranks, in one line, or nothing."""
    beginning = f"{NODE_FAILED}: "
    said = (cause.logged for cause in read_causes(directory))
    return next((one.removeprefix(beginning) for one in said if one.startswith(beginning)), "")


def root_of(causes: Sequence[Cause]) -> Cause | None:
    """Return the oldest of `causes` that does not echo another; the oldest if all do."""
    first = next((cause for cause in causes if not cause.is_consequence), None)
    return first or next(iter(causes), None)
