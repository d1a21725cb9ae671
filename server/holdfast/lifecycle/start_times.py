"""How long does a start take? The phases of this one, and how long until READY.

Earlier starts with the same command line tell how long: their times are kept on disk, so that the
first start of a process knows how long the last one took. The file is a convenience: a file that
cannot be read or written is ignored.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Literal

from holdfast.atomic_files import read_record, write_atomically
from holdfast.labels import START_PHASES
from holdfast.telemetry.progress import Progress
from holdfast.workspace.stats import read_all

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2

Kind = Literal["start", "recovery"]
KINDS: tuple[Kind, ...] = ("start", "recovery")
REMEMBERED = 5
"""The number of times that are kept of each kind."""
MAX_SECONDS = 7 * 24 * 3600.0
"""No start takes a week, so a file that says so is wrong."""
OVERDUE_FRACTION = 0.25
"""A start that is overdue is expected to take this fraction of its time so far again."""


@contextmanager
def timed(phase: str, took: MutableMapping[str, float], progress: Progress) -> Iterator[None]:
    """While entered, the start is in `phase`."""
    began = time.monotonic()
    progress.phase_started(phase)
    try:
        yield
    finally:
        took[phase] = time.monotonic() - began
        progress.phase_finished(phase, took[phase])


@asynccontextmanager
async def watched(
    directory: Path, took: MutableMapping[str, float], progress: Progress
) -> AsyncIterator[None]:
    """While entered, pass on the phases that the engine's first rank writes."""
    watch = _Watch(took, progress)
    following = asyncio.create_task(_follow(directory, watch))
    try:
        yield
    finally:
        following.cancel()
        await asyncio.wait({following})
        watch.see(_first_rank(directory))
        watch.end()


class _Watch:
    """Follows the phases; until the first rank writes one, vLLM's processes start and import."""

    def __init__(self, took: MutableMapping[str, float], progress: Progress) -> None:
        self._took = took
        self._progress = progress
        self._seen: set[str] = set()
        self._running = "processes"
        self._began = time.monotonic()
        progress.phase_started(self._running)

    def see(self, phases: Mapping[str, float]) -> None:
        """Take the phases that the rank has written so far."""
        for name in START_PHASES:
            if name in phases and name not in self._seen:
                self._seen.add(name)
                self._finish(phases[name])
                self._running, self._began = name, phases[name]
                self._progress.phase_started(name)

    def end(self) -> None:
        """Finish the last phase."""
        self._finish(time.monotonic())

    def _finish(self, now: float) -> None:
        self._took[self._running] = max(0.0, now - self._began)
        self._progress.phase_finished(self._running, self._took[self._running])


async def _follow(directory: Path, watch: _Watch) -> None:
    while True:
        watch.see(_first_rank(directory))
        await asyncio.sleep(POLL_SECONDS)


def _first_rank(directory: Path) -> Mapping[str, float]:
    ranks = read_all(directory, reads_steps=False)
    return {str(name): at for name, at in ranks[0].phases.items()} if ranks else {}


def first_guess(start_seconds: float, phases: Mapping[str, float]) -> float:
    """Return what a recovery may take if none has been measured, from the start before it.

    vLLM compiles its kernels while it sizes the KV cache, and the next start finds them in its
    cache. What remains of the sizing is too short to tell.
    """
    return max(0.0, start_seconds - phases.get("kv_sizing", 0.0))


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
        self._waiting_since_seconds: float | None = None

    def began(self, kind: Kind, *, guess_seconds: float | None = None) -> None:
        """Begin a way to READY; a recovery that fails and begins again is the same one.

        The guess is used until one of this kind has ended.
        """
        self._guess_seconds = guess_seconds
        if self._running is None or self._running[0] != kind:
            self._running = (kind, self._clock())

    def delayed(self, seconds: float) -> None:
        """Count from the next start, which is after a wait of this length."""
        if self._running is not None and seconds:
            self._running = (self._running[0], self._clock() + seconds)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While entered, the time does not count."""
        self._waiting_since_seconds = since = self._clock()
        try:
            yield
        finally:
            self._waiting_since_seconds = None
            if self._running is not None:
                kind, began = self._running
                self._running = (kind, began + self._clock() - since)

    @contextmanager
    def finishing(self, guess_seconds: float | None) -> Iterator[None]:
        """While entered, an engine finishes its work before another one takes its place.

        That time does not count. If the engine stays after all, there is no recovery to remember.
        """
        self.began("recovery", guess_seconds=guess_seconds)
        try:
            with self.waiting():
                yield
        except BaseException:
            self._running = None
            raise

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
    def expected_in_seconds(self) -> float | None:
        """The time until the usual one is over, negative if it is; None if there is none."""
        if self._running is None:
            return None
        kind, began = self._running
        seen = self._seconds[kind]
        expected = statistics.median(seen) if seen else self._guess_seconds
        return None if expected is None else began + expected - self._now()

    @property
    def seconds_left(self) -> float | None:
        """The time until READY; None if it is unknown, or nothing is under way."""
        left = self.expected_in_seconds
        if self._running is None or left is None:
            return None
        _, began = self._running
        if left < 0:
            left = (self._now() - began) * OVERDUE_FRACTION
        return max(left, 1.0)

    def _now(self) -> float:
        """Return the time that counts."""
        since = self._waiting_since_seconds
        return self._clock() if since is None else since


def _read(path: Path) -> dict[Kind, list[float]]:
    try:
        record = read_record(path)
        return {kind: [_seconds(value) for value in record[kind]][-REMEMBERED:] for kind in KINDS}
    except (OSError, ValueError, TypeError, KeyError):
        return {kind: [] for kind in KINDS}


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
        raise ValueError(f"{value!r} is not a duration of a start")
    return float(value)


def _write(path: Path, seconds: dict[Kind, list[float]]) -> None:
    try:
        write_atomically(path, json.dumps(seconds))
    except OSError as error:
        logger.debug("cannot save the times of this start: %s", error)
