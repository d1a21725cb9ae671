"""Which admin calls had no admin key? The admin routes never see them, so their log does not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger("holdfast.admin")

MAX_LINES_PER_MINUTE = 10
"""For each status: attempts without any key cannot hide those of an API key."""
_MINUTE_SECONDS = 60.0
_PATH_CHARACTERS = 200


@dataclass(slots=True)
class _Minute:
    began_seconds: float
    lines: int = 0
    left_out: int = 0


class AdminAttempts:
    """Logs a line for each refused call, as long as there are few. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._minutes: dict[int, _Minute] = {}

    def note(self, path: str, by: str, *, status: int, message: str) -> None:
        """Log a refused call, or count it for the line of a later one."""
        now_seconds = self._clock()
        minute = self._minutes.get(status)
        if minute is None or now_seconds - minute.began_seconds >= _MINUTE_SECONDS:
            left_out = minute.left_out if minute is not None else 0
            minute = self._minutes[status] = _Minute(now_seconds, left_out=left_out)
        if minute.lines >= MAX_LINES_PER_MINUTE:
            minute.left_out += 1
            return
        others = f" (and {minute.left_out} calls before it)" if minute.left_out else ""
        minute.lines, minute.left_out = minute.lines + 1, 0
        shown = path[:_PATH_CHARACTERS]
        logger.warning("admin %r by %s: refused with %d: %s%s", shown, by, status, message, others)
