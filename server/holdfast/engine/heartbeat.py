"""Tells whether the engine makes progress, from what its ranks wrote, without ever asking it.

Each rule comes from a real outage:

* A stall: requests are in the engine, and no rank ends a step within the stall timeout and within
  three times the slowest step that the probe saw after its first token. A chunked prefill is
  progress, and a long step is not a stall.
* A stall: requests wait and none runs for a minute, though the scheduler says nothing defers them.
* Time does not count while a compiler runs as a child of the engine, once the engine has paused, or
  while this process itself did not run. A compiler within a process shows in its stacks, which are
  read before anything is called a stall.
* Nor does it count while a scheduler keeps saying that all its requests are deferred, as a request
  is while its grammar compiles. A scheduler that falls silent hangs, deferred or not.
* An engine that has been idle for a minute gets a canary: one token to generate. With a baseline
  its log-probs are compared. A difference is reported and ends nothing: operators decide.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from holdfast.engine.baseline import BaselineWatch
from holdfast.engine.interface import Engine
from holdfast.engine.replay import ReplayManager
from holdfast.errors import HoldfastError
from holdfast.processes.stacks import is_compiling_in_process
from holdfast.records import Death, RankStats

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
LATE_SECONDS = 5.0
"""A snapshot this late means that this process was stopped, or its event loop blocked."""
BLOCKED_SECONDS = 60.0
IDLE_SECONDS = 60.0
SLOWEST_STEP_FACTOR = 3.0
MAX_COMPILE_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The progress of an engine at one moment. All times come from one monotonic clock."""

    now_seconds: float
    busy_since_seconds: float | None
    """Since when the engine has had requests without a break; None if it has none."""
    last_step_seconds: Mapping[int, float]
    """When a rank of each engine last ended a step, for engines that ever did."""
    running: Mapping[int, int]
    """How many requests each of several engines has; empty where there is only one."""
    blocked_since_seconds: Mapping[int, float]
    """Since when each engine's scheduler has said that requests wait and none runs."""
    is_paused: bool = False
    is_compiling: bool = False
    deferring: frozenset[int] = frozenset()
    """Engines whose scheduler currently has requests and defers all of them."""


class StallDetector:
    """Takes one snapshot after another, and says when the engine is stalled."""

    def __init__(self, stall_timeout_seconds: float) -> None:
        self._stall_timeout_seconds = stall_timeout_seconds
        self._last_look_seconds: float | None = None
        self._counted_from_seconds = 0.0
        """Time before this does not count."""
        self._compiling_since: float | None = None
        self._busy_since: dict[int, float] = {}
        """Since when each of several engines has had requests."""
        self._last_deferred_seconds: dict[int, float] = {}
        """When each engine was last seen deferring all its requests."""
        self._newest_seconds = 0.0
        """When the newest step seen so far ended."""
        self._compiling_allowed_since: float | None = None

    def stall_reason(self, snapshot: Snapshot, slowest_step_seconds: float) -> str:
        """Return why the engine is stalled; empty while it is not."""
        self._discount_pauses(snapshot)
        self._busy_since = {
            engine: self._busy_since.get(engine, snapshot.now_seconds)
            for engine, count in snapshot.running.items()
            if count
        }
        if snapshot.busy_since_seconds is None:
            return ""
        timeout_seconds = max(
            self._stall_timeout_seconds, SLOWEST_STEP_FACTOR * slowest_step_seconds
        )
        self._last_deferred_seconds |= dict.fromkeys(snapshot.deferring, snapshot.now_seconds)
        self._newest_seconds = max(snapshot.last_step_seconds.values(), default=0.0)
        quiet = self._quiet(snapshot, max(self._newest_seconds, self._last_all_deferred_seconds()))
        if quiet >= timeout_seconds:
            return f"the engine has requests, but finished no step for {quiet:.0f} s"
        for engine, given in self._busy_since.items():
            deferred = self._last_deferred_seconds.get(engine, 0.0)
            since = max(snapshot.last_step_seconds.get(engine, 0.0), given, deferred)
            quiet = self._quiet(snapshot, since)
            if quiet >= timeout_seconds:
                return f"engine {engine} has requests, but finished no step for {quiet:.0f} s"
        for engine, since in snapshot.blocked_since_seconds.items():
            blocked = snapshot.now_seconds - max(since, self._counted_from_seconds)
            if blocked >= BLOCKED_SECONDS:
                return f"requests wait for engine {engine}, but none ran for {blocked:.0f} s"
        return ""

    def allow_compiling(self, now_seconds: float) -> bool:
        """Restart the count for an engine that compiles; False once that has taken too long."""
        since = self._compiling_allowed_since
        if since is None or self._newest_seconds > since:  # it has made progress since
            since = self._compiling_allowed_since = now_seconds
        self._counted_from_seconds = now_seconds
        return now_seconds - since < MAX_COMPILE_SECONDS

    def _last_all_deferred_seconds(self) -> float:
        """Return when all engines with requests were last seen deferring all of them."""
        engines = self._busy_since or self._last_deferred_seconds
        return min(
            (self._last_deferred_seconds.get(engine, 0.0) for engine in engines), default=0.0
        )

    def _quiet(self, snapshot: Snapshot, last_step_seconds: float) -> float:
        since = max(
            last_step_seconds, snapshot.busy_since_seconds or 0.0, self._counted_from_seconds
        )
        return snapshot.now_seconds - since

    def _discount_pauses(self, snapshot: Snapshot) -> None:
        now, looked = snapshot.now_seconds, self._last_look_seconds
        self._last_look_seconds = now
        if snapshot.is_compiling and self._compiling_since is None:
            self._compiling_since = now
        if not snapshot.is_compiling:
            self._compiling_since = None
        compiled = now - self._compiling_since if self._compiling_since is not None else 0.0
        is_building = snapshot.is_compiling and compiled < MAX_COMPILE_SECONDS
        was_absent = looked is None or now - looked > LATE_SECONDS
        if snapshot.is_paused or is_building or was_absent:
            self._counted_from_seconds = now


class Heartbeat:
    """Checks one generation every second, and has an idle one generate a token.

    Until the probe has proven something, `slowest_step_seconds` is None and nothing is a stall: it
    is unknown how long a step may take, and the probe has its own timeouts.
    """

    def __init__(  # noqa: PLR0913 - the supervisor names each source
        self,
        engine: Engine,
        requests: ReplayManager,
        *,
        stall_timeout_seconds: float,
        slowest_step_seconds: Callable[[], float | None],
        may_try: Callable[[], bool],
        baseline: BaselineWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._detector = StallDetector(stall_timeout_seconds)
        self._slowest_step_seconds = slowest_step_seconds
        self._may_try = may_try
        self._baseline = baseline
        self._clock = clock
        self._canary: asyncio.Task[None] | None = None
        self._canary_since: float | None = None
        self._idle_since = clock()
        self._has_warned = False

    async def until_stalled(self) -> Death:
        """Return when the engine is stalled, after logging what its processes were doing."""
        try:
            reason, stacks = await self._stall()
            while is_compiling_in_process(stacks) and self._detector.allow_compiling(self._clock()):
                logger.info("%s: it is compiling", reason)
                reason, stacks = await self._stall()
        finally:
            await self._cancel_canary()
        suspects = self._engine.suspects()
        logger.error("the engine is stalled: %s\n%s", reason, stacks)
        return Death("stall", reason, blames_requests=True, suspects=suspects)

    async def _stall(self) -> tuple[str, str]:
        """Wait for a stall; return its reason, and what the processes were doing then."""
        while not (reason := self._stall_reason()):  # noqa: ASYNC110 - no event announces a stall
            await asyncio.sleep(POLL_SECONDS)
        return reason, await self._engine.dump_stacks()

    def _stall_reason(self) -> str:
        try:
            return self._look()
        except OSError as error:  # perhaps too many open files: that is not a stall, and it passes
            if not self._has_warned:
                self._has_warned = True
                logger.warning("cannot read the engine's progress: %s", error)
            return ""

    def _look(self) -> str:
        now = self._clock()
        ranks = self._engine.ranks(reads_steps=False)
        busy_since = self._requests.busy_since_seconds
        aborts = self._requests.aborts
        is_paused = self._engine.is_paused or aborts.stops_steps
        is_busy = is_paused or aborts.is_paused or busy_since is not None
        self._update_canary(now, ranks, is_busy=is_busy)
        # Asked only while a step is late, because it costs a walk over /proc.
        is_late = bool(busy_since) and now - max(_last_steps(ranks).values(), default=0.0) > 1
        starts = [since for since in (busy_since, self._canary_since) if since is not None]
        slowest_step_seconds = self._slowest_step_seconds()
        snapshot = Snapshot(
            now_seconds=now,
            busy_since_seconds=min(starts, default=None),
            last_step_seconds=_last_steps(ranks),
            # While a pause is pending, one of several engines may have paused already.
            running={} if aborts.is_paused else self._engine.running_requests(),
            blocked_since_seconds=(
                {} if aborts.is_paused else self._engine.blocked_since_seconds()
            ),
            is_paused=is_paused or slowest_step_seconds is None,
            is_compiling=is_late and self._engine.is_compiling(),
            deferring=self._engine.deferring(),
        )
        return self._detector.stall_reason(snapshot, slowest_step_seconds or 0.0)

    def _update_canary(self, now: float, ranks: Iterable[RankStats], *, is_busy: bool) -> None:
        if self._canary is not None:
            if self._canary.done():
                self._canary = self._canary_since = None
                self._idle_since = now
            return
        newest = max(_last_steps(ranks).values(), default=0.0)
        self._idle_since = now if is_busy else max(self._idle_since, newest)
        if now - self._idle_since >= IDLE_SECONDS and self._may_try():
            self._canary_since = now
            self._canary = asyncio.create_task(self._try_canary(), name="canary")

    async def _try_canary(self) -> None:
        # If the engine has died, the death watch reports it.
        with suppress(HoldfastError):
            if self._baseline is None:
                await self._engine.canary()
                return
            answer = await self._engine.canary(self._baseline.canary_prompt)
            compared = self._baseline.judge_canary(answer)
            if compared is None or compared.agrees:
                return
            stray = ""
            if compared.stray_token is not None:
                stray = (
                    f"; the engine chose token {compared.stray_token} instead of the recorded one"
                )
            logger.error(
                "the log-probs of the canary differ from the baseline by %.3g nats, and the "
                "recorded noise allows %.3g%s",
                compared.worst_nats,
                self._baseline.limit_nats,
                stray,
            )

    async def _cancel_canary(self) -> None:
        if self._canary is not None:
            self._canary.cancel()
            await asyncio.wait({self._canary})


def _last_steps(ranks: Iterable[RankStats]) -> dict[int, float]:
    """Return when a rank of each engine last ended a step."""
    newest: dict[int, float] = {}
    for rank in ranks:
        if rank.last_step_ended_seconds is not None:
            known = newest.get(rank.engine, 0.0)
            newest[rank.engine] = max(known, rank.last_step_ended_seconds)
    return newest
