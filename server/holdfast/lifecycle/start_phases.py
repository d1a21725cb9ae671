"""What is a start doing, and for how long? Tells the progress view, and keeps it for the report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from holdfast.records import START_PHASES
from holdfast.telemetry.progress import Progress
from holdfast.workspace.stats import read_all

POLL_SECONDS = 0.2


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
    ranks = read_all(directory, with_steps=False)
    return {str(name): at for name, at in ranks[0].phases.items()} if ranks else {}
