"""How did a generation of the engine end, and when does the next one start?"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from holdfast.engine.blame import Verdict
from holdfast.engine.heartbeat import Heartbeat
from holdfast.engine.interface import Engine
from holdfast.engine.replay import Calls
from holdfast.errors import EngineStartError
from holdfast.lifecycle.forecast import Forecast
from holdfast.lifecycle.learning import Learning
from holdfast.lifecycle.proof import Proof
from holdfast.lifecycle.races import DeathTask, first_death
from holdfast.lifecycle.restart_budget import BROWNOUT_SECONDS, RestartBudget
from holdfast.lifecycle.state_machine import StateMachine
from holdfast.lifecycle.states import LifeOutcome, State
from holdfast.records import Death
from holdfast.settings import SupervisionSettings
from holdfast.telemetry.counters import EngineDeaths

logger = logging.getLogger(__name__)


class DeathHandler:
    """Watches each generation for its death, records it, and delays the next start."""

    def __init__(  # noqa: PLR0913 - the supervisor lends what it has
        self,
        supervision: SupervisionSettings,
        state_machine: StateMachine,
        proof: Proof,
        *,
        learning: Learning,
        forecast: Forecast,
        engine_deaths: EngineDeaths,
    ) -> None:
        self._stall_timeout_seconds = supervision.stall_timeout_seconds
        self._state_machine = state_machine
        self._proof = proof
        self._learning = learning
        self._forecast = forecast
        self._engine_deaths = engine_deaths
        self._budget = RestartBudget(
            supervision.max_engine_restarts, supervision.restart_window_seconds
        )
        self.last_exit = ""
        """The reason that the last generation ended for, if any has ended."""
        self.requested_end: asyncio.Future[Death] | None = None
        """Ends the generation that runs when it is set; None before the first."""

    @property
    def restarts_left(self) -> int:
        """Restarts that the budget still allows."""
        return self._budget.left

    @asynccontextmanager
    async def watching(
        self, engine: Engine, calls: Calls
    ) -> AsyncIterator[tuple[DeathTask, asyncio.Future[Death]]]:
        """While entered, a task waits for the death of the engine, which a future can request."""
        self.requested_end = requested_end = asyncio.get_running_loop().create_future()
        heartbeat = Heartbeat(
            engine,
            calls,
            stall_timeout_seconds=self._stall_timeout_seconds,
            slowest_step_seconds=lambda: self._proof.slowest_step_seconds,
            may_try=lambda: self._state_machine.state is State.READY,
        )
        async with first_death(
            engine.until_dead(),
            heartbeat.until_stalled(),
            _awaited(requested_end),
            on_death=lambda death: self._on_death(engine, death),
        ) as death_task:
            try:
                yield death_task, requested_end
            finally:
                requested_end.cancel()

    def _on_death(self, engine: Engine, death: Death) -> None:
        self._engine_deaths.count(death.cause)
        # Calls that wait for the engine, the probe's own clean-up too, would wait until a deadline.
        engine.give_up()

    async def record_death(
        self, engine: Engine, calls: Calls, death: Death, *, start_seconds: float | None
    ) -> LifeOutcome:
        """Record a death while its engine can still say what its processes left behind."""
        if words := engine.last_words():
            logger.error("what the engine's processes left behind:\n%s", words)
        verdict = calls.accuse(death)
        outcome = self._enter_recovering(death, verdict, start_seconds)
        if verdict.explained:
            await asyncio.to_thread(calls.save)
        return outcome

    def record_failed_start(
        self, error: EngineStartError, *, start_seconds: float | None
    ) -> LifeOutcome:
        """Record a start that failed.

        Raises:
            EngineStartError: it was the first, and forgetting what was learned cannot help.
        """
        has_unlearned = self._learning.unlearn()
        if has_unlearned:
            logger.warning("restarting without what was learned: %s", error.cause)
        if self._state_machine.generation.replaces is not None:
            death = Death("start_failure", error.cause)
            self._engine_deaths.count(death.cause)
            return self._enter_recovering(death, Verdict(), start_seconds)
        if has_unlearned:
            return LifeOutcome()
        raise error

    async def back_off(self, death: Death) -> None:
        """Wait before the next start.

        Raises:
            EngineLostError: the budget is spent, so there is no next start.
        """
        wait_seconds = self._budget.wait_seconds(death)
        if wait_seconds >= BROWNOUT_SECONDS:
            reason = (
                f"requests ended too many engines, so the next start is in {wait_seconds:.0f} s"
            )
            self._state_machine.enter(State.RECOVERING, f"{reason}: {death}")
        if wait_seconds:
            logger.info("waiting %.0f s before the next start", wait_seconds)
        self._forecast.delayed(wait_seconds)
        await asyncio.sleep(wait_seconds)

    def _enter_recovering(
        self, death: Death, verdict: Verdict, start_seconds: float | None
    ) -> LifeOutcome:
        logger.error("the engine died: %s", death)
        self._budget.died(death, verdict)
        if death.cause == "workspace_rejection":
            self._proof.invalidate()
        self.last_exit = str(death)
        self._forecast.began("recovery", guess_seconds=start_seconds)
        self._state_machine.enter(State.RECOVERING, f"the engine died: {death.cause}", death.reason)
        return LifeOutcome(death)


async def _awaited(death: asyncio.Future[Death]) -> Death:
    return await death
