"""How the loggers below `holdfast` write, and with JSON those of uvicorn and Python's warnings.

vLLM's loggers and the root logger stay as they are.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Container, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Literal, TextIO, get_args

from holdfast.errors import UsageError

LogLevel = Literal["debug", "info", "warning", "error", "critical"]
LogStyle = Literal["console", "json"]
LOG_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)

ROOT = "holdfast"
CHANGEABLE = (ROOT, "vllm")
_AUDIT = "holdfast.admin"
"""The log of admin calls, one of which changes levels: it has a level of its own."""
_ACCESS_ARGUMENTS = 5
"""uvicorn's: client, method, target, HTTP version, status."""
_CONSOLE_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal obeys: controls but newline and tab, and those that reorder what is shown."""


_TRACEBACKS = logging.Formatter()


def configure_logging(
    level: str = "info", *, style: LogStyle = "console", stream: TextIO | None = None
) -> None:
    """Send what `holdfast` logs at `level` or above to `stream`, by default standard error.

    A second call replaces the handler of the first, so nothing is logged twice.
    """
    if level not in LOG_LEVELS:
        known = ", ".join(LOG_LEVELS)
        raise UsageError(f"There is no log level {level!r}.", remedy=f"Use one of {known}.")
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(
        JSONLines() if style == "json" else _ConsoleLines(_CONSOLE_FORMAT, "%m-%d %H:%M:%S")
    )
    logger = logging.getLogger(ROOT)
    logger.setLevel(level.upper())
    logging.getLogger(_AUDIT).setLevel(logging.INFO)
    logger.propagate = False  # a handler of the root logger would print every line twice
    for old in tuple(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    _take_warnings(handler if style == "json" else None)


def _take_warnings(handler: logging.Handler | None) -> None:
    """Write Python's warnings with `handler`; as Python does it without one."""
    logger = logging.getLogger("py.warnings")
    logger.handlers[:] = [] if handler is None else [handler]
    logger.propagate = handler is None
    logging.captureWarnings(handler is not None)


def write_uvicorn_alike() -> None:
    """Have uvicorn write JSON lines if `holdfast` does; it has set its handlers up by now."""
    for ours in logging.getLogger(ROOT).handlers:
        if isinstance(ours.formatter, JSONLines):
            for name in ("uvicorn", "uvicorn.access"):
                for theirs in logging.getLogger(name).handlers:
                    theirs.setFormatter(ours.formatter)


def iso_time(unix_seconds: float) -> str:
    """Return a time as JSON lines and `/statusz` have it: UTC, with milliseconds."""
    return datetime.fromtimestamp(unix_seconds, UTC).isoformat(timespec="milliseconds")


def log_levels() -> Mapping[str, str]:
    """Return the level of each logger whose level may be changed while the server runs."""
    return {name: _level_of(logging.getLogger(name)) for name in CHANGEABLE}


def set_log_level(name: str, level: LogLevel) -> None:
    """Change the level of one of the loggers in `log_levels`, in this process only."""
    logger = logging.getLogger(name)
    logger.setLevel(level.upper())
    for handler in logger.handlers:
        if handler.level:  # vLLM's has a level of its own, which would still drop the new records
            handler.setLevel(level.upper())


def _level_of(logger: logging.Logger) -> str:
    return logging.getLevelName(logger.getEffectiveLevel()).lower()


def quieten_access_log(paths: Container[str], *, is_probing: Callable[[], bool]) -> None:
    """Omit requests from uvicorn's access log that come every few seconds, and those of the probe.

    The paths of health checks and scrapes are never logged. Successful requests are also omitted
    while only the probe is admitted; errors are always logged.
    """
    logging.getLogger("uvicorn.access").addFilter(_AccessFilter(paths, is_probing))


def clean_uvicorn_lines() -> None:
    """Cut the query from every path that uvicorn logs: some clients put their key there.

    No line of it commands the terminal either, though a traceback may quote what a client sent.
    """
    for name in ("uvicorn.access", "uvicorn.error"):
        logger = logging.getLogger(name)
        if not any(isinstance(known, _CleanLines) for known in logger.filters):
            logger.addFilter(_CleanLines())


class _CleanLines(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(map(_without_query, record.args))
        if record.exc_info and not record.exc_text:  # formatters write this text, if there is one
            record.exc_text = without_controls(_TRACEBACKS.formatException(record.exc_info))
        return True


def _without_query(argument: object) -> object:
    if not isinstance(argument, str):
        return argument
    is_path = "?" in argument and " " not in argument
    return without_controls(argument.partition("?")[0] if is_path else argument)


class _AccessFilter(logging.Filter):
    def __init__(self, paths: Container[str], is_probing: Callable[[], bool]) -> None:
        super().__init__()
        self._paths = paths
        self._is_probing = is_probing

    def filter(self, record: logging.LogRecord) -> bool:
        if not isinstance(record.args, tuple) or len(record.args) != _ACCESS_ARGUMENTS:
            return True
        _, _, target, _, status = record.args
        is_probed = self._is_probing() and status == HTTPStatus.OK
        return not is_probed and str(target).partition("?")[0] not in self._paths


class _ConsoleLines(logging.Formatter):
    """Writes text that commands no terminal: errors of libraries may quote what a client sent."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record, with its traceback."""
        return without_controls(super().format(record))


def without_controls(text: str) -> str:
    """Return a text that shows what a terminal would obey, as an escape of Python."""
    return text if text.isprintable() else _CONTROLS.sub(_escaped, text)


def _escaped(control: re.Match[str]) -> str:
    return control[0].encode("unicode_escape").decode("ascii")


class JSONLines(logging.Formatter):
    """Writes one JSON object per line, with the mapping in `extra={"fields": ...}` merged in.

    Other extras are left out: vLLM adds its own to every record of the process.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line."""
        fields = {
            "time": iso_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        elif record.exc_text:  # it was shortened, see `patches.log_lines`
            fields["traceback"] = record.exc_text
        return json.dumps({**getattr(record, "fields", {}), **fields}, default=str)
