"""What is recorded with and without viewers: events as they come, and a point each 15 s."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from holdfast.labels import GrowthPhase
from holdfast.records import BaselineComparison, Death, ProbeReport, RankStats
from holdfast.status_page.curves import INTERVAL_SECONDS, Curves, percentile
from holdfast.status_page.timeline import Timeline
from holdfast.verify.records import VerifyRun

MIN_SLEEP_SECONDS = 0.001
"""An event loop may end a sleep by up to this before its time."""
SHOWN_PHASES: tuple[GrowthPhase, ...] = ("sealed", "locked")
"""During the warm-up every workspace grows."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """What the front end has counted until now."""

    ranks: tuple[RankStats, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_seconds: Sequence[float] = ()
    """Times to first token of the answers that have begun since the last sample."""
    running: int = 0
    waiting: int = 0
    kv_used_ratio: float | None = None
    canary: BaselineComparison | None = None
    """The last one that was compared with the baseline."""


class History:
    """Records a server's life. Events may come from any thread, the rest from one event loop."""

    def __init__(
        self, generation: Callable[[], int], clock: Callable[[], float] = time.time
    ) -> None:
        """Take the number of the present engine, and a clock of Unix seconds."""
        self.timeline = Timeline(clock)
        self.curves = Curves()
        self.probed_unix_seconds: dict[str, float] = {}
        """When each suite of the probe last ended."""
        self.last_verified: tuple[VerifyRun, float] | None = None
        """The last run of `holdfast verify`, and when it was told; None before the first."""
        self._generation = generation
        self._clock = clock
        self._growths: dict[tuple[int, int, int, GrowthPhase], int] = {}
        """How many growths are recorded, by generation, engine, rank and phase."""
        self._last = Sample()

    def state_changed(self, state: str, reason: str) -> None:
        """Record a state, or a new reason for it."""
        self.timeline.add("state", generation=self._generation(), state=state, reason=reason)

    def engine_died(self, death: Death) -> None:
        """Record the death of an engine."""
        self.timeline.add(
            "death", generation=self._generation(), cause=death.cause, reason=death.reason
        )

    def probe_ran(self, report: ProbeReport) -> None:
        """Record a run of the probe, unless it was to send nothing."""
        if report.suite == "off":
            return
        if report.is_whole:
            self.probed_unix_seconds[report.suite] = self._clock()
        self.timeline.add(
            "probe",
            generation=self._generation(),
            suite=report.suite,
            is_whole=report.is_whole,
            passed=report.passed,
            limited=report.limited,
            proven_tokens=report.proven_tokens,
            duration_seconds=round(report.duration_seconds, 3),
        )

    def verified(self, run: VerifyRun) -> None:
        """Record a run of `holdfast verify`."""
        self.last_verified = (run, self._clock())
        self.timeline.add(
            "verify", generation=self._generation(), verdict=run.verdict, profile=run.profile
        )

    def saw_ranks(self, ranks: Iterable[RankStats]) -> None:
        """Record the growths that the ranks of an engine have counted since they were last seen."""
        new: dict[tuple[int, int, GrowthPhase], dict[int, int]] = {}
        for rank in ranks:
            for phase in SHOWN_PHASES:
                place = (rank.generation, rank.engine, rank.rank, phase)
                count, known = rank.growths.get(phase, 0), self._growths.get(place, 0)
                if count > known:
                    grown = new.setdefault((rank.generation, rank.engine, phase), {})
                    grown[rank.rank] = count - known
                    self._growths[place] = count
        for (generation, engine, phase), grown in new.items():
            self.timeline.add(
                "growth",
                generation=generation,
                engine=engine,
                ranks=sorted(grown),
                phase=phase,
                growths=sum(grown.values()),
            )
        newest = max((place[0] for place in self._growths), default=0)
        for place in [place for place in self._growths if place[0] < newest]:
            del self._growths[place]

    @asynccontextmanager
    async def sampled(self, sample: Callable[[], Sample]) -> AsyncIterator[None]:
        """Take a sample at the end of each interval while entered.

        A sample that fails is logged and left out: the next point is about its time, too.
        """
        sampling = asyncio.create_task(self._keep_sampling(sample), name="samples of the page")
        try:
            yield
        finally:
            sampling.cancel()
            await asyncio.wait({sampling})

    async def _keep_sampling(self, sample: Callable[[], Sample]) -> None:
        began_seconds = time.monotonic()
        while True:
            interval = await self._end_of_interval()
            try:
                taken = sample()
            except Exception:
                _logger.exception("the page has no sample of the last %d s", INTERVAL_SECONDS)
                continue
            now_seconds = time.monotonic()
            self.take(taken, interval, now_seconds - began_seconds)
            began_seconds = now_seconds

    async def _end_of_interval(self) -> int:
        """Return the present interval once another one has begun, even if an earlier one."""
        interval = self._interval()
        while self._interval() == interval:
            left_seconds = (interval + 1) * INTERVAL_SECONDS - self._clock()
            # A clock that is set back in between must not stop the samples.
            await asyncio.sleep(min(max(left_seconds, MIN_SLEEP_SECONDS), INTERVAL_SECONDS))
        return interval

    def _interval(self) -> int:
        return int(self._clock() // INTERVAL_SECONDS)

    def take(self, sample: Sample, interval: int, seconds: float) -> None:
        """Record the point of an interval of this length, which has just ended."""
        last, self._last = self._last, sample
        self.saw_ranks(sample.ranks)
        self.curves.add(interval, _point(last, sample, max(seconds, 1.0)))


def _point(before: Sample, now: Sample, seconds: float) -> Mapping[str, float | None]:
    canary = now.canary if now.canary != before.canary else None
    return {
        "output_tokens_per_second": _rate(before.output_tokens, now.output_tokens, seconds),
        "prompt_tokens_per_second": _rate(before.prompt_tokens, now.prompt_tokens, seconds),
        "first_tokens": len(now.first_token_seconds),
        "first_token_median_seconds": _rounded(percentile(now.first_token_seconds, 50)),
        "first_token_p99_seconds": _rounded(percentile(now.first_token_seconds, 99)),
        "running": now.running,
        "waiting": now.waiting,
        "kv_used_ratio": _rounded(now.kv_used_ratio),
        "canary_agrees": canary.agrees if canary else None,
        "canary_worst_nats": canary.worst_nats if canary else None,
    }


def _rate(before: int, now: int, seconds: float) -> float:
    return round((now - before) / seconds, 1)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
