"""How long until READY? Earlier starts with the same command line tell.

Their times are kept on disk, so that the first start of a process knows how long the last one took.
The file is a convenience: a file that cannot be read or written is ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from holdfast.atomic_files import read_record, write_atomically

logger = logging.getLogger(__name__)

Kind = Literal["start", "recovery"]
KINDS: tuple[Kind, ...] = ("start", "recovery")
REMEMBERED = 5
"""The number of times that are kept of each kind."""
LONGEST_SECONDS = 7 * 24 * 3600.0
"""No start takes a week, so a file that says so is wrong."""
OVERDUE_FRACTION = 0.25
"""A start that is overdue is expected to take this fraction of its time so far again."""


class Forecast:
    """Remembers the times of starts and recoveries, and predicts the end of the running one."""

    def __init__(
        self,
        directory: Path | None,
        arguments: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        name = hashlib.sha256("\0".join(arguments).encode()).hexdigest()[:32]
        self._path = directory / f"times-{name}.json" if directory else None
        self._clock = clock
        self._seconds = _read(self._path) if self._path else {kind: [] for kind in KINDS}
        self._running: tuple[Kind, float] | None = None
        self._guess_seconds: float | None = None

    def began(self, kind: Kind, *, guess_seconds: float | None = None) -> None:
        """Begin a way to READY; a recovery that fails and begins again is the same one.

        The guess is used until one of this kind has ended.
        """
        self._guess_seconds = guess_seconds
        if self._running is None or self._running[0] != kind:
            self._running = (kind, self._clock())

    def delayed(self, seconds: float) -> None:
        """Leave out a wait of this length before the next start."""
        if self._running is not None and seconds:
            self._running = (self._running[0], self._clock() + seconds)

    def ready(self) -> None:
        """Remember how long it took to become READY."""
        if self._running is None:
            return
        kind, began = self._running
        self._running = None
        self._seconds[kind] = [*self._seconds[kind], self._clock() - began][-REMEMBERED:]
        if self._path is not None:
            _write(self._path, self._seconds)

    @property
    def seconds_left(self) -> float | None:
        """The time until READY; None if it is unknown, or nothing is under way."""
        if self._running is None:
            return None
        kind, began = self._running
        seen = self._seconds[kind]
        expected = statistics.median(seen) if seen else self._guess_seconds
        if expected is None:
            return None
        passed = self._clock() - began
        return max(expected - passed, passed * OVERDUE_FRACTION, 1.0)


def _read(path: Path) -> dict[Kind, list[float]]:
    try:
        record = read_record(path)
        return {kind: [_seconds(value) for value in record[kind]][-REMEMBERED:] for kind in KINDS}
    except (OSError, ValueError, TypeError, KeyError):
        return {kind: [] for kind in KINDS}


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value <= LONGEST_SECONDS:
        raise ValueError(f"{value!r} is not a duration of a start")
    return float(value)


def _write(path: Path, seconds: dict[Kind, list[float]]) -> None:
    try:
        write_atomically(path, json.dumps(seconds))
    except OSError as error:
        logger.debug("cannot save the times of this start: %s", error)
