"""Does the engine make progress? Read from what its ranks wrote, never asked of it.

The rules, each of which somebody's outage paid for:

* Requests are in the engine, and no rank ends a step for the stall time-out, and for three times
  the slowest step that the probe saw: a prefill in chunks is progress, a long step is not a stall.
* Requests wait and none runs for a minute, though the scheduler says that nothing holds them back.
* While a compiler runs below the engine, time does not count; nor while the engine is paused, nor
  what passes while this process itself did not run. A compiler that is part of a process is seen
  in its stacks, which are looked at before anything is called a stall.
* Nor does it while a scheduler goes on to say that all that its engine has is deferred, as a
  request is whose grammar compiles. One that says nothing any more hangs, deferred or not.
* An engine that has had nothing to do for a minute gets one token to make.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from holdfast.engine.interface import Engine
from holdfast.engine.replay import Calls
from holdfast.errors import HoldfastError
from holdfast.processes.stacks import compiles_inside
from holdfast.records import Death, RankStats

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
ABSENCE_SECONDS = 5.0
"""A look so late means that this process was stopped, or its loop blocked."""
BLOCKED_SECONDS = 60.0
IDLE_SECONDS = 60.0
SLOWEST_STEP_FACTOR = 3.0
LONGEST_COMPILE_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Pulse:
    """What one look at an engine saw. Times are of one monotonic clock."""

    now_seconds: float
    busy_since_seconds: float | None
    """Since when it has had requests without a break; None if it has none."""
    last_step_seconds: Mapping[int, float]
    """When a rank of each engine last ended a step, for those that ever did."""
    running: Mapping[int, int]
    """Requests that each engine of several has; empty where there is one."""
    blocked_since_seconds: Mapping[int, float]
    """Since when each engine's scheduler has said that requests wait and none runs."""
    is_paused: bool = False
    is_compiling: bool = False
    deferring: frozenset[int] = frozenset()
    """Engines whose scheduler says now that it has requests, and that it defers all of them."""


class Rules:
    """Looks at one pulse after the other; says what is wrong, if anything."""

    def __init__(self, stall_timeout_seconds: float) -> None:
        self._stall_timeout_seconds = stall_timeout_seconds
        self._looked_seconds: float | None = None
        self._excused_seconds = 0.0
        """Nothing before this moment counts."""
        self._compiling_since: float | None = None
        self._given_seconds: dict[int, float] = {}
        """Since when each engine of several has had requests."""
        self._deferred_seconds: dict[int, float] = {}
        """When each engine was last seen to defer all that it has."""
        self._newest_seconds = 0.0
        """When the newest step ended that was seen."""
        self._forgiven_since: float | None = None

    def verdict(self, pulse: Pulse, slowest_step_seconds: float) -> str:
        """Why the engine is stalled; empty while it is not."""
        self._excuse(pulse)
        self._given_seconds = {
            engine: self._given_seconds.get(engine, pulse.now_seconds)
            for engine, count in pulse.running.items()
            if count
        }
        if pulse.busy_since_seconds is None:
            return ""
        patience = max(self._stall_timeout_seconds, SLOWEST_STEP_FACTOR * slowest_step_seconds)
        self._deferred_seconds |= dict.fromkeys(pulse.deferring, pulse.now_seconds)
        self._newest_seconds = max(pulse.last_step_seconds.values(), default=0.0)
        quiet = self._quiet(pulse, max(self._newest_seconds, self._all_deferred_seconds()))
        if quiet >= patience:
            return f"the engine has requests, but finished no step for {quiet:.0f} s"
        for engine, given in self._given_seconds.items():
            deferred = self._deferred_seconds.get(engine, 0.0)
            since = max(pulse.last_step_seconds.get(engine, 0.0), given, deferred)
            quiet = self._quiet(pulse, since)
            if quiet >= patience:
                return f"engine {engine} has requests, but finished no step for {quiet:.0f} s"
        for engine, since in pulse.blocked_since_seconds.items():
            blocked = pulse.now_seconds - max(since, self._excused_seconds)
            if blocked >= BLOCKED_SECONDS:
                return f"requests wait for engine {engine}, but none ran for {blocked:.0f} s"
        return ""

    def forgives(self, now_seconds: float) -> bool:
        """Give a stalled engine that compiles the same time again; False when it has had enough."""
        since = self._forgiven_since
        if since is None or self._newest_seconds > since:  # it got on since
            since = self._forgiven_since = now_seconds
        self._excused_seconds = now_seconds
        return now_seconds - since < LONGEST_COMPILE_SECONDS

    def _all_deferred_seconds(self) -> float:
        """When all engines that have requests were last seen to defer all of them."""
        engines = self._given_seconds or self._deferred_seconds
        return min((self._deferred_seconds.get(engine, 0.0) for engine in engines), default=0.0)

    def _quiet(self, pulse: Pulse, last_step_seconds: float) -> float:
        since = max(last_step_seconds, pulse.busy_since_seconds or 0.0, self._excused_seconds)
        return pulse.now_seconds - since

    def _excuse(self, pulse: Pulse) -> None:
        now, looked = pulse.now_seconds, self._looked_seconds
        self._looked_seconds = now
        if pulse.is_compiling and self._compiling_since is None:
            self._compiling_since = now
        if not pulse.is_compiling:
            self._compiling_since = None
        compiled = now - self._compiling_since if self._compiling_since is not None else 0.0
        is_building = pulse.is_compiling and compiled < LONGEST_COMPILE_SECONDS
        was_absent = looked is None or now - looked > ABSENCE_SECONDS
        if pulse.is_paused or is_building or was_absent:
            self._excused_seconds = now


class Heartbeat:
    """Looks at one generation every second, and gives an idle one a token to make.

    Until something was proven, which `slowest_step_seconds` says with None, nothing is a stall:
    what a step may take is not known, and the probe has time-outs of its own.
    """

    def __init__(  # noqa: PLR0913 - the supervisor names each thing that is looked at
        self,
        engine: Engine,
        calls: Calls,
        *,
        stall_timeout_seconds: float,
        slowest_step_seconds: Callable[[], float | None],
        may_try: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._rules = Rules(stall_timeout_seconds)
        self._slowest_step_seconds = slowest_step_seconds
        self._may_try = may_try
        self._clock = clock
        self._canary: asyncio.Task[None] | None = None
        self._canary_since: float | None = None
        self._idle_since = clock()
        self._is_blind = False

    async def until_stalled(self) -> Death:
        """Return when a rule is broken, with what the processes were doing in the log."""
        try:
            reason, stacks = await self._stall()
            while compiles_inside(stacks) and self._rules.forgives(self._clock()):
                logger.info("%s: it is compiling", reason)
                reason, stacks = await self._stall()
        finally:
            await self._end_canary()
        suspects = self._engine.suspects()
        logger.error("the engine is stalled: %s\n%s", reason, stacks)
        return Death("stall", reason, is_accusing=True, suspects=suspects)

    async def _stall(self) -> tuple[str, str]:
        """The rule that is broken, when one is, and what the processes were doing then."""
        while not (reason := self._seen()):  # noqa: ASYNC110 - nothing tells of what is not
            await asyncio.sleep(LOOK_SECONDS)
        return reason, await self._engine.dump_stacks()

    def _seen(self) -> str:
        try:
            return self._look()
        except OSError as error:  # too many open files, say: it is not a stall, and it passes
            if not self._is_blind:
                self._is_blind = True
                logger.warning("cannot look at the progress of the engine: %s", error)
            return ""

    def _look(self) -> str:
        now = self._clock()
        ranks = self._engine.ranks(with_steps=False)
        busy_since = self._calls.busy_since_seconds
        is_told = self._engine.is_paused or self._calls.is_paused
        self._tend_canary(now, ranks, is_busy=is_told or busy_since is not None)
        # A compiler is looked for only while something is late: it costs a walk over /proc.
        is_late = bool(busy_since) and now - max(_last_steps(ranks).values(), default=0.0) > 1
        starts = [since for since in (busy_since, self._canary_since) if since is not None]
        slowest_step_seconds = self._slowest_step_seconds()
        pulse = Pulse(
            now_seconds=now,
            busy_since_seconds=min(starts, default=None),
            last_step_seconds=_last_steps(ranks),
            running=self._engine.running_requests(),
            blocked_since_seconds=self._engine.blocked_since_seconds(),
            is_paused=is_told or slowest_step_seconds is None,
            is_compiling=is_late and self._engine.is_compiling(),
            deferring=self._engine.deferring(),
        )
        return self._rules.verdict(pulse, slowest_step_seconds or 0.0)

    def _tend_canary(self, now: float, ranks: Iterable[RankStats], *, is_busy: bool) -> None:
        if self._canary is not None:
            if self._canary.done():
                self._canary = self._canary_since = None
                self._idle_since = now
            return
        newest = max(_last_steps(ranks).values(), default=0.0)
        self._idle_since = now if is_busy else max(self._idle_since, newest)
        if now - self._idle_since >= IDLE_SECONDS and self._may_try():
            self._canary_since = now
            self._canary = asyncio.create_task(self._sing(), name="canary")

    async def _sing(self) -> None:
        # Its death, if that is why it fails, is seen by who waits for that.
        with suppress(HoldfastError):
            await self._engine.canary()

    async def _end_canary(self) -> None:
        if self._canary is not None:
            self._canary.cancel()
            await asyncio.wait({self._canary})


def _last_steps(ranks: Iterable[RankStats]) -> dict[int, float]:
    """When a rank of each engine last ended a step."""
    newest: dict[int, float] = {}
    for rank in ranks:
        if rank.last_step_ended_seconds is not None:
            known = newest.get(rank.engine, 0.0)
            newest[rank.engine] = max(known, rank.last_step_ended_seconds)
    return newest
