"""Is it up? The one owner of the state: starts the engine, has it proven, revives and ends it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from holdfast.engine.blame import Verdict
from holdfast.engine.heartbeat import Heartbeat
from holdfast.engine.interface import Engine, EngineLauncher
from holdfast.engine.replay import Calls
from holdfast.errors import (
    RETRY_AFTER_SECONDS,
    ConflictError,
    EngineStartError,
    HoldfastError,
    NotReadyError,
)
from holdfast.lifecycle.commands import Command, RestartCommand
from holdfast.lifecycle.forecast import Forecast
from holdfast.lifecycle.host import Host
from holdfast.lifecycle.learning import Learning
from holdfast.lifecycle.operations import OperationRunner
from holdfast.lifecycle.proof import Proof, proven_text
from holdfast.lifecycle.races import DeathTask, first_death, run_unless_dead
from holdfast.lifecycle.restart_budget import BROWNOUT_SECONDS, RestartBudget
from holdfast.lifecycle.start_phases import timed, watched
from holdfast.lifecycle.state_machine import StateMachine
from holdfast.lifecycle.states import LifeOutcome, State
from holdfast.records import Death, EngineFacts, EngineReport, RankStats, Status
from holdfast.settings import ProbeSettings, SupervisionSettings
from holdfast.telemetry.counters import EngineDeaths
from holdfast.telemetry.progress import Progress

logger = logging.getLogger(__name__)


class Supervisor:
    """Moves through `states.TRANSITIONS`; everybody else reads `state` and `status()`."""

    def __init__(  # noqa: PLR0913 - the composition root names each collaborator
        self,
        probe: ProbeSettings,
        supervision: SupervisionSettings,
        host: Host,
        *,
        learning: Learning,
        forecast: Forecast,
        engine_deaths: EngineDeaths,
        progress: Progress,
    ) -> None:
        self._supervision = supervision
        self._learning = learning
        self._forecast = forecast
        self._engine_deaths = engine_deaths
        self._progress = progress
        self._host = host
        self._restarts = RestartBudget(
            supervision.max_engine_restarts, supervision.restart_window_seconds
        )
        self._state_machine = StateMachine(progress)
        self._report = EngineReport()
        self._engine: Engine | None = None
        self._facts: EngineFacts | None = None
        self._calls: Calls | None = None
        self._last_ranks: tuple[RankStats, ...] = ()
        self._phases: dict[str, float] = {}
        self._proof = Proof(
            probe, learning, progress, phases=self._phases, on_report=host.probe_ran
        )
        self._stop_requested = asyncio.Event()
        self._operations: OperationRunner | None = None
        self._requested_end: asyncio.Future[Death] | None = None

    @property
    def state(self) -> State:
        """Where the server stands."""
        return self._state_machine.state

    @property
    def reason(self) -> str:
        """Why it stands there, in words that anyone may read."""
        return self._state_machine.reason

    @property
    def is_recovering(self) -> bool:
        """Whether an engine that was lost, or that served, is replaced or proven again."""
        return self._state_machine.is_recovering

    @property
    def eta_seconds(self) -> float | None:
        """Time until READY, if anything is known of it."""
        return self._forecast.seconds_left

    @property
    def facts(self) -> EngineFacts | None:
        """Sizes and capabilities of the last engine that came up; None before the first."""
        return self._facts

    @property
    def restarts_left(self) -> int:
        """Restarts that the budget still allows."""
        return self._restarts.left

    async def until_moved(self) -> None:
        """Return when the state has changed."""
        await self._state_machine.until_moved()

    def status(self) -> Status:
        """Everything that is known now. Never waits for the engine."""
        return Status(
            state=self.state,
            reason=self.reason,
            detail=self._state_machine.detail,
            since_unix_seconds=self._state_machine.since_unix_seconds,
            eta_seconds=self.eta_seconds,
            has_been_ready=self._state_machine.has_been_ready,
            engine=self._report,
            probe=self._proof.report,
            ranks=self._engine.ranks(with_steps=False) if self._engine else self._last_ranks,
            start_phases=dict(self._phases),
        )

    def request_stop(self) -> None:
        """Drain and end. Asking twice is asking once."""
        self._stop_requested.set()

    def submit(self, command: Command) -> asyncio.Future[Any]:
        """Have the engine that serves carry out an order; the answer comes when it is done.

        Raises:
            ConflictError: the state forbids it. NotReadyError: no engine serves or sleeps.
        """
        return self._require_operations().submit(command)

    def request_restart(self, reason: str) -> None:
        """End the engine, when the streams that have begun are over, and start the next one.

        One that is being proven is ended at once.

        Raises:
            ConflictError: the state forbids it. NotReadyError: there is no engine.
        """
        requested_end = self._requested_end
        is_proving = self._operations is None and self.state is not State.DRAINING
        if is_proving and requested_end is not None and not requested_end.done():
            requested_end.set_result(Death("requested", reason))
        else:
            self.submit(RestartCommand(reason))

    def engine_at_work(self) -> Engine:
        """The engine, in READY.

        Raises:
            ConflictError: the state forbids to ask it for anything. NotReadyError: there is none.
        """
        self._require_operations()
        if self._engine is None or self.state is not State.READY:
            raise ConflictError(f"the server is {self.state}: {self.reason}")
        return self._engine

    def _require_operations(self) -> OperationRunner:
        if self.state in {State.DRAINING, State.FAILED, State.STOPPED}:
            raise ConflictError(f"the server is {self.state}: {self.reason}")
        if self._operations is None:
            seconds = math.ceil(self.eta_seconds or RETRY_AFTER_SECONDS)
            cause = f"the server is {self.state}: {self.reason}"
            raise NotReadyError(cause, retry_after_seconds=seconds)
        return self._operations

    async def run(self) -> None:
        """Serve until asked to stop; returns when the engine is gone.

        Raises:
            HoldfastError: why the server cannot become or stay ready; the state is FAILED.
        """
        self._forecast.began("start")
        living = asyncio.create_task(self._live(), name="engine")
        stopping = asyncio.create_task(self._stop_requested.wait(), name="stop requested")
        try:
            await asyncio.wait({living, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not living.done():
                await self._drain(living)
        finally:
            is_cut = not living.done()
            stopping.cancel()
            living.cancel()
            await asyncio.wait({living, stopping})
        self._conclude(None if is_cut or living.cancelled() else living.exception())

    async def _live(self) -> None:
        with timed("import", self._phases, self._progress):
            launcher = await self._host.load()
        self._calls = launcher.calls
        self._learning.open(launcher.fingerprint)
        while True:
            outcome = await self._one_life(launcher)
            self._state_machine.generation = self._state_machine.generation.after(outcome)
            if outcome.death is None:
                again = self._state_machine.generation.starts_in
                self._state_machine.enter(again, "restarting with a different reservation")
            else:
                await self._back_off(outcome.death)

    async def _back_off(self, death: Death) -> None:
        """Wait before the next start; EngineLostError if there is not to be one."""
        wait_seconds = self._restarts.wait_seconds(death)
        if wait_seconds >= BROWNOUT_SECONDS:
            reason = (
                f"requests ended too many engines, so the next start is in {wait_seconds:.0f} s"
            )
            self._state_machine.enter(State.RECOVERING, f"{reason}: {death}")
        if wait_seconds:
            logger.info("waiting %.0f s before the next start", wait_seconds)
        self._forecast.delayed(wait_seconds)
        await asyncio.sleep(wait_seconds)

    async def _one_life(self, launcher: EngineLauncher) -> LifeOutcome:
        """Start, prove and serve with one generation.

        Raises:
            EngineStartError: the first start failed; ProbeFailedError: the proof did.
        """
        try:
            async with (
                self._running(launcher) as engine,
                self._watching(engine, launcher) as (death_task, requested_end),
            ):
                self._state_machine.enter(State.PROBING, f"running {self._proof.what}")
                proof = await self._proof.prove(
                    engine,
                    self._host.prober(engine),
                    death_task,
                    start_seconds=self._report.last_start_seconds or 0.0,
                    is_first=self._state_machine.generation.replaces is None,
                )
                if proof == "again":
                    return LifeOutcome()
                if proof == "proven" and await self._has_tried_suspects(launcher.calls, death_task):
                    async with self._serving(engine, launcher.calls, death_task, requested_end):
                        await death_task
                return await self._record_death(engine, launcher.calls, await death_task)
        except EngineStartError as error:
            return self._record_failed_start(error)

    def _record_failed_start(self, error: EngineStartError) -> LifeOutcome:
        """What follows a start that failed; nothing follows the first, if nothing was learned."""
        has_unlearned = self._learning.unlearn()
        if has_unlearned:
            logger.warning("restarting without what was learned: %s", error.cause)
        if self._state_machine.generation.replaces is not None:
            death = Death("start_failure", error.cause)
            self._engine_deaths.count(death.cause)
            return self._enter_recovering(death, Verdict())
        if has_unlearned:
            return LifeOutcome()
        raise error

    async def _has_tried_suspects(self, calls: Calls, death_task: DeathTask) -> bool:
        """Try who may have ended the last engine, for the time of one start; False if it dies."""
        start_seconds = self._report.last_start_seconds or 0.0
        return bool(await run_unless_dead(death_task, calls.try_suspects(start_seconds)))

    @asynccontextmanager
    async def _running(self, launcher: EngineLauncher) -> AsyncIterator[Engine]:
        """A generation of the engine; ended, and learned from, when left."""
        generation = self._state_machine.generation
        directory = launcher.directory_of(generation.number)
        self._report = replace(
            self._report,
            generation=generation.number,
            starts=self._report.starts + 1,
            restarts=self._report.restarts + (generation.replaces is not None),
        )
        started = time.monotonic()
        async with AsyncExitStack() as stack:
            async with watched(directory, self._phases, self._progress):
                spec = self._learning.spec(generation.number, directory)
                engine = await stack.enter_async_context(launcher.running(spec))
            self._engine, self._facts = engine, engine.facts
            self._report = replace(self._report, last_start_seconds=time.monotonic() - started)
            try:
                await self._host.mount()
                yield engine
            finally:
                self._last_ranks = engine.ranks()
                self._engine = None
                self._learning.learn(self._last_ranks)
                self._host.generation_ended(self._last_ranks)

    @asynccontextmanager
    async def _serving(
        self,
        engine: Engine,
        calls: Calls,
        death_task: DeathTask,
        requested_end: asyncio.Future[Death],
    ) -> AsyncIterator[None]:
        """While entered, a proven engine serves, and does what operators ask."""
        self._become_ready(engine, calls)
        self._operations = OperationRunner(
            engine,
            calls,
            death_task,
            state_machine=self._state_machine,
            proof=self._proof,
            prober=lambda: self._host.prober(engine),
            become_ready=lambda: self._become_ready(engine, calls),
            requested_end=requested_end,
            drain_timeout_seconds=self._supervision.drain_timeout_seconds,
        )
        try:
            yield
        finally:
            operations, self._operations = self._operations, None
            await operations.end()

    @asynccontextmanager
    async def _watching(
        self, engine: Engine, launcher: EngineLauncher
    ) -> AsyncIterator[tuple[DeathTask, asyncio.Future[Death]]]:
        """While entered, a task that ends with the death of the engine, and says why.

        With it comes what decides its death from outside.
        """
        self._requested_end = requested_end = asyncio.get_running_loop().create_future()
        heartbeat = Heartbeat(
            engine,
            launcher.calls,
            stall_timeout_seconds=self._supervision.stall_timeout_seconds,
            slowest_step_seconds=lambda: self._proof.slowest_step_seconds,
            may_try=lambda: self.state is State.READY,
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
        # Who waits for it, the probe's own clean-up too, would wait for a deadline of its own.
        engine.give_up()

    def _become_ready(self, engine: Engine, calls: Calls) -> None:
        if self.state is not State.DRAINING:
            if not self._state_machine.has_been_ready:
                self._host.became_ready()
            is_news = self.state is not State.READY
            self._state_machine.enter(State.READY, proven_text(self._proof.report))
            if is_news:
                self._progress.ready(f"READY: {engine.facts.model}, {self.reason}")
        self._forecast.ready()
        calls.opened()

    async def _record_death(self, engine: Engine, calls: Calls, death: Death) -> LifeOutcome:
        """Take in a death while its engine can still be asked for its last words."""
        if words := engine.last_words():
            logger.error("what the engine's processes left behind:\n%s", words)
        verdict = calls.accuse(death)
        outcome = self._enter_recovering(death, verdict)
        if verdict.explained:
            await asyncio.to_thread(calls.save)
        return outcome

    def _enter_recovering(self, death: Death, verdict: Verdict) -> LifeOutcome:
        logger.error("the engine died: %s", death)
        self._restarts.died(death, verdict)
        if death.cause == "workspace_rejection":
            self._proof.invalidate()
        self._report = replace(self._report, last_exit=str(death))
        self._forecast.began("recovery", guess_seconds=self._report.last_start_seconds)
        self._state_machine.enter(State.RECOVERING, f"the engine died: {death.cause}", death.reason)
        return LifeOutcome(death)

    async def _drain(self, living: asyncio.Task[None]) -> None:
        """Let what is in flight finish, also over the death of an engine."""
        self._state_machine.move(State.DRAINING, "asked to stop")
        if self._operations is not None:
            self._operations.drain()
        if not self._state_machine.has_been_ready:
            return
        idling = asyncio.create_task(self._host.until_idle(), name="until idle")
        try:
            await asyncio.wait({living, idling}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            idling.cancel()
            await asyncio.wait({idling})

    def _conclude(self, error: BaseException | None) -> None:
        if isinstance(error, HoldfastError):
            self._report = replace(self._report, last_exit=error.cause)
        if self._calls is not None:
            end = NotReadyError("The server has shut down.")
            self._calls.fail(end, "engine_lost" if error else "drained")
        if error is None:
            self._state_machine.move(State.STOPPED, "stopped")
            return
        known = error if isinstance(error, HoldfastError) else HoldfastError
        detail = str(error).removeprefix(known.outline).lstrip(": ")
        self._state_machine.move(State.FAILED, known.outline, detail)
        raise error


async def _awaited(death: asyncio.Future[Death]) -> Death:
    return await death
