"""Bounds what vLLM's loggers write and keep of what clients send, and lets it command no terminal.

vLLM logs model names, types of content and errors as they came in. Its formatter begins each line
of a message with a prefix, so 31 MB of newlines are 2 GB in the log; what it logs only once it
keeps, up to 128 such texts (`NewLineFormatter`, `_print_warning_once`, 0.32, 0.33).
"""

from __future__ import annotations

import logging
from copy import copy
from typing import Any

from vllm import logger as vllm_logger

from holdfast.patches import fits
from holdfast.patches.patch import is_replaced, original, replace
from holdfast.telemetry.logs import without_controls

MAX_CHARACTERS = 16 * 1024
"""The longest message, and the longest traceback: vLLM logs whole chat templates."""
MAX_LINES = 512
MAX_VARIANTS = 16
"""How often a message is logged that is logged once for each of its arguments."""
MAX_ARGUMENT_CHARACTERS = 256
"""What is kept of such an argument."""
_NAME = "vllm"
_LEVELS = {
    "_print_debug_once": logging.DEBUG,
    "_print_info_once": logging.INFO,
    "_print_warning_once": logging.WARNING,
    "_print_error_once": logging.ERROR,
}
_tracebacks = logging.Formatter()


def bound_log_lines() -> None:
    """Shorten what vLLM's loggers write in this process; idempotent.

    Its configuration may name any handlers and formatters, so records are shortened as they are
    made.
    """
    factory = logging.getLogRecordFactory()
    if not isinstance(factory, _ShortRecords):
        logging.setLogRecordFactory(_ShortRecords(factory))
    for name, level in _LEVELS.items():
        if not is_replaced(vllm_logger, name):
            replace(vllm_logger, name, _Once(level))


def escape_controls() -> None:
    """Have vLLM's formatters of this process show what a terminal would obey; idempotent.

    The colours that they add stay. A formatter of the operator's own is left alone.
    """
    if not fits("patches.log_lines.escape_controls"):
        return
    from vllm.logging_utils import NewLineFormatter  # noqa: PLC0415 - it may be missing

    write = original(NewLineFormatter, "format")

    def escaped(formatter: logging.Formatter, record: logging.LogRecord) -> str:
        record = copy(record)  # the handlers after this one get it too
        record.msg, record.args = without_controls(record.getMessage()), ()
        traceback = record.exc_text
        if record.exc_info and not traceback:
            traceback = formatter.formatException(record.exc_info)
        record.exc_text = traceback and without_controls(traceback)
        line: str = write(formatter, record)
        return line

    replace(NewLineFormatter, "format", escaped)


class _ShortRecords:
    """Makes the records of a process, with short ones of vLLM's."""

    def __init__(self, factory: Any) -> None:
        self._factory = factory

    def __call__(self, name: str | None, *args: Any, **options: Any) -> logging.LogRecord:
        record: logging.LogRecord = self._factory(name, *args, **options)
        if name is not None and name.partition(".")[0] == _NAME:  # None: `logging.makeLogRecord`
            _shorten(record)
        return record


def _shorten(record: logging.LogRecord) -> None:
    try:
        message = record.getMessage()
    except Exception:  # noqa: BLE001 - of an argument; the handler meets it again, and reports it
        return
    if (short := shortened(message)) != message:
        record.msg, record.args = short, ()
    if record.exc_info:
        traceback = _tracebacks.formatException(record.exc_info)
        if (short := shortened(traceback)) != traceback:
            record.exc_info, record.exc_text = None, short


def shortened(text: str) -> str:
    """Return a text without its middle if it is long, and as one line if it has many."""
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        left_out = len(text) - 2 * half
        text = f"{text[:half]} ... ({left_out} characters left out) ... {text[-half:]}"
    if text.count("\n") > MAX_LINES:
        text = text.replace("\n", "\\n")
    return text


class _Once:
    """Logs a message at one level, once for each of a few arguments."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._logged: dict[tuple[str, str], set[tuple[Any, ...]]] = {}

    def __call__(self, logger: logging.Logger, message: str, *args: Any) -> None:
        logged = self._logged.setdefault((logger.name, message), set())
        kept = tuple(map(_kept, args))
        if len(logged) < MAX_VARIANTS and kept not in logged:
            logged.add(kept)
            logger.log(self._level, message, *kept, stacklevel=3)  # where vLLM's caller is


def _kept(argument: Any) -> Any:
    """Return what is kept and logged of an argument, which may be a client's."""
    if argument is None or isinstance(argument, int | float):
        return argument
    if isinstance(argument, list | dict):
        return f"<{type(argument).__name__}>"
    return str(argument)[:MAX_ARGUMENT_CHARACTERS]
