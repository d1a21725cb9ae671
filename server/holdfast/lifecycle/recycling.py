"""When is an engine replaced although nothing is wrong with it? The rules of `--recycle-after`.

An engine that has reached a limit is restarted at the next quiet moment, and at the latest after
`--recycle-within`, by the command that operators have too. Time counts only while the server is
READY. So a planned restart never wakes an engine that sleeps, and never competes with a drain or a
recovery; while a command of an operator is carried out, or the engine makes no steps because it
writes its weights or was paused, it is tried again a second later. An engine whose weights may have
been changed in its memory stays: only an operator may give them up.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from holdfast.engine.interface import Engine
from holdfast.engine.replay import ReplayManager
from holdfast.errors import ConflictError
from holdfast.labels import RecycleReason
from holdfast.lifecycle.commands import RestartCommand
from holdfast.lifecycle.operations import OperationRunner
from holdfast.lifecycle.states import StateMachine
from holdfast.settings import SupervisionSettings
from holdfast.settings.recycling import RecycleLimits
from holdfast.telemetry.counters import Recycles

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
MEASURE_SECONDS = 10.0
"""How often the host memory is measured: a leak takes hours."""
QUIET_SECONDS = 10.0
"""Without a request for this long, the moment is quiet; `--recycle-within` names the number."""
MAX_EARLY_SHARE = 0.1
"""An engine's limits of age and requests are lower by up to this share, by chance: servers that
started together are not restarted together."""


@dataclass(frozen=True, slots=True)
class EngineUse:
    """What a proven engine has done since READY, and what it holds, at one moment."""

    age_seconds: float = 0.0
    """How long the server has been READY with it."""
    requests: int = 0
    host_memory_bytes: int | None = None
    """None if it was not measured."""
    idle_seconds: float = 0.0
    """How long the server has been READY without a request in the engine or waiting for it."""
    waited_seconds: float = 0.0
    """How long the server has been READY since the first look at which a limit was reached."""


def limit_reached(limits: RecycleLimits, use: EngineUse) -> RecycleReason | None:
    """Return the kind of limit that an engine has reached; None if it has reached none."""
    reached: dict[RecycleReason, bool] = {
        "age": _is_reached(limits.age_seconds, use.age_seconds),
        "host_memory": _is_reached(limits.host_memory_bytes, use.host_memory_bytes),
        "requests": _is_reached(limits.requests, use.requests),
    }
    return next((reason for reason, is_reached in reached.items() if is_reached), None)


def is_time(use: EngineUse, within_seconds: float) -> bool:
    """Whether to restart an engine that has reached a limit now, instead of waiting longer."""
    return use.idle_seconds >= QUIET_SECONDS or use.waited_seconds >= within_seconds


class Recycler:
    """Has one generation restarted as planned, from its proof to its end."""

    def __init__(  # noqa: PLR0913, PLR0917 - the supervisor lends what it has
        self,
        engine: Engine,
        requests: ReplayManager,
        operations: OperationRunner,
        supervision: SupervisionSettings,
        state_machine: StateMachine,
        recycles: Recycles,
        *,
        has_new_weights: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take `has_new_weights`: whether a restart would bring back those of the files."""
        self._engine = engine
        self._requests = requests
        self._operations = operations
        self._state_machine = state_machine
        self._recycles = recycles
        self._has_new_weights = has_new_weights
        self._has_told_of_weights = False
        self._clock = clock
        early_share = random.uniform(0.0, MAX_EARLY_SHARE)  # noqa: S311 - nothing to guess
        self._limits = supervision.recycle_after.brought_forward(early_share)
        self._within_seconds = supervision.recycle_within_seconds
        self._looked_seconds = self._busy_seconds = clock()
        self._given_before = self._given = requests.given
        self._age_seconds = self._waited_seconds = 0.0
        self._reason: RecycleReason | None = None
        """The limit that was reached first; it stays so even if the memory falls again."""
        self._why = ""
        """How it was reached, for people."""
        self._measure_at_seconds = 0.0
        self._host_memory_bytes: int | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While entered, the engine is looked at once a second, and restarted when it is time."""
        if not self._limits.are_set:
            yield
            return
        looking = asyncio.create_task(self._look_on(), name="recycling")
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait({looking})

    async def _look_on(self) -> None:
        await self._measure()
        self._drop_hopeless_limit()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self._measure()
            use = self._look()
            self._note_limit(use)
            is_due = self._state_machine.is_ready and is_time(use, self._within_seconds)
            if self._reason is not None and is_due and not self._must_stay():
                await self._recycle(self._reason)

    def _drop_hopeless_limit(self) -> None:
        """Ignore a limit that the memory of a new engine exceeds: restarts would never end."""
        limit_bytes = self._limits.host_memory_bytes
        if _is_reached(limit_bytes, self._host_memory_bytes):
            logger.warning(
                "--recycle-after: the new engine already holds %s of host memory, so that limit "
                "is ignored",
                _gib(self._host_memory_bytes),
            )
            self._limits = replace(self._limits, host_memory_bytes=None)

    async def _measure(self) -> None:
        now_seconds = self._clock()
        if self._limits.host_memory_bytes is not None and now_seconds >= self._measure_at_seconds:
            self._measure_at_seconds = now_seconds + MEASURE_SECONDS
            self._host_memory_bytes = await asyncio.to_thread(self._engine.host_memory_bytes)

    def _look(self) -> EngineUse:
        """Return the use of the engine now, and note what counts from this look on."""
        now_seconds, given = self._clock(), self._requests.given
        passed_seconds = now_seconds - self._looked_seconds
        at_work = self._requests.presence.unfinished()
        has_work = bool(at_work or self._requests.held or given != self._given)
        if has_work or not self._state_machine.is_ready:
            self._busy_seconds = now_seconds
        if self._state_machine.is_ready:
            self._age_seconds += passed_seconds
        if self._reason is not None and self._state_machine.is_ready:
            self._waited_seconds += passed_seconds
        self._looked_seconds, self._given = now_seconds, given
        return EngineUse(
            age_seconds=self._age_seconds,
            requests=given - self._given_before,
            host_memory_bytes=self._host_memory_bytes,
            idle_seconds=now_seconds - self._busy_seconds,
            waited_seconds=self._waited_seconds,
        )

    def _note_limit(self, use: EngineUse) -> None:
        reason = limit_reached(self._limits, use)
        if self._reason is None and reason is not None:
            self._reason, self._why = reason, _text(reason, use)
            logger.info(
                "%s, so it is restarted after %.0f s without a request, at the latest in %.0f s",
                self._why,
                QUIET_SECONDS,
                self._within_seconds,
            )

    def _must_stay(self) -> bool:
        """Whether a restart would silently bring back the weights of the files."""
        must_stay = self._has_new_weights()
        if must_stay and not self._has_told_of_weights:
            self._has_told_of_weights = True
            logger.warning(
                "%s, but it is not restarted: its weights may have been changed in its memory, "
                "and the next one would have those of the files",
                self._why,
            )
        return must_stay

    async def _recycle(self, reason: RecycleReason) -> None:
        """Begin the restart, and return when it has ended the engine or was cancelled."""
        try:
            restarted = self._operations.submit(RestartCommand(self._why, is_planned=True))
        except ConflictError:  # an operator's command came first, or the engine has just died
            return
        # This task ends with the engine, so it may not see the end of the restart.
        restarted.add_done_callback(partial(self._count, reason))
        # Awaited directly, it would be cancelled with this task.
        await asyncio.wait({restarted})

    def _count(self, reason: RecycleReason, restarted: asyncio.Future[None]) -> None:
        """Count a restart that has ended the engine."""
        if not restarted.cancelled() and restarted.exception() is None:
            self._recycles.count(reason)


def _is_reached(limit: float | None, value: float | None) -> bool:
    return limit is not None and value is not None and value >= limit


def _text(reason: RecycleReason, use: EngineUse) -> str:
    texts: dict[RecycleReason, str] = {
        "age": f"the engine has served for {use.age_seconds / 3600:.2f} h",
        "host_memory": f"the engine holds {_gib(use.host_memory_bytes)} of host memory",
        "requests": f"the engine was given {use.requests} requests",
    }
    return texts[reason]


def _gib(size_bytes: int | None) -> str:
    return f"{(size_bytes or 0) / 2**30:.2f} GiB"
