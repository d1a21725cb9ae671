"""Is it up? Owns the state: starts the engine, has it proven, restarts it and ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from holdfast.engine.baseline import BaselineWatch
from holdfast.engine.interface import Engine, EngineLauncher
from holdfast.engine.replay import ReplayManager
from holdfast.errors import ConflictError, EngineStartError, HoldfastError, shut_down_error
from holdfast.lifecycle.commands import Command, RestartCommand
from holdfast.lifecycle.death_handler import DeathHandler
from holdfast.lifecycle.death_task import DeathTask, is_alive_after, run_unless_dead
from holdfast.lifecycle.host import Host
from holdfast.lifecycle.learning import Learning
from holdfast.lifecycle.memory_relief import MemoryRelief
from holdfast.lifecycle.proof import Proof, ProofOutcome, proven_text
from holdfast.lifecycle.service import Service
from holdfast.lifecycle.start_times import Forecast, first_guess, timed, watched
from holdfast.lifecycle.states import GenerationOutcome, State, StateMachine
from holdfast.records import Death, EngineFacts, EngineReport, RankStats, Status
from holdfast.settings import ProbeSettings, SupervisionSettings
from holdfast.telemetry.counters import EngineDeaths, Recycles
from holdfast.telemetry.progress import Progress


class Supervisor:
    """Moves the server through its states; all other code reads `state` and `status()`."""

    def __init__(  # noqa: PLR0913 - the composition root names each collaborator
        self,
        probe: ProbeSettings,
        supervision: SupervisionSettings,
        host: Host,
        *,
        learning: Learning,
        forecast: Forecast,
        engine_deaths: EngineDeaths,
        recycles: Recycles,
        has_new_weights: Callable[[], bool],
        progress: Progress,
        baseline: BaselineWatch | None = None,
        memory: MemoryRelief | None = None,
    ) -> None:
        self._learning = learning
        self._forecast = forecast
        self._progress = progress
        self._host = host
        self._state_machine = StateMachine(progress.state_changed)
        self._report = EngineReport()
        self._guess_seconds: float | None = None  # of a recovery
        self._engine: Engine | None = None
        self._facts: EngineFacts | None = None
        self._requests: ReplayManager | None = None
        self._last_ranks: tuple[RankStats, ...] = ()
        self._phases: dict[str, float] = {}
        self._proof = Proof(
            probe, learning, progress, phases=self._phases, on_report=host.probe_ran
        )
        self._stop_requested = asyncio.Event()
        self._deaths = DeathHandler(
            supervision,
            self._state_machine,
            self._proof,
            learning=learning,
            forecast=forecast,
            engine_deaths=engine_deaths,
            baseline=baseline,
            memory=memory,
            on_recorded=host.engine_died,
        )
        self._service = Service(
            supervision, self._state_machine, self._proof, recycles, has_new_weights
        )

    @property
    def state(self) -> State:
        """The state of the server."""
        return self._state_machine.state

    @property
    def reason(self) -> str:
        """The reason for the state, in words that anyone may read."""
        return self._state_machine.reason

    @property
    def is_recovering(self) -> bool:
        """Whether an engine that was lost, or served, is being replaced or proven again."""
        return self._state_machine.is_recovering

    @property
    def has_been_ready(self) -> bool:
        """Whether the server has ever been READY."""
        return self._state_machine.has_been_ready

    @property
    def proven_tokens(self) -> int:
        """The longest context that the last probe proved; 0 before the first."""
        return self._proof.report.proven_tokens if self._proof.report else 0

    @property
    def eta_seconds(self) -> float | None:
        """The time until READY; None if it is unknown."""
        return self._forecast.seconds_left

    @property
    def facts(self) -> EngineFacts | None:
        """The sizes and capabilities of the last engine that started; None before the first."""
        return self._facts

    @property
    def generation(self) -> int:
        """The number of the engine that the state is about."""
        return self._state_machine.generation.number

    @property
    def restarts_left(self) -> int:
        """The restarts that the budget still allows."""
        return self._deaths.restarts_left

    async def until_moved(self) -> None:
        """Return when the state has changed."""
        await self._state_machine.until_moved()

    def status(self) -> Status:
        """Return everything that is known now, without waiting for the engine."""
        return Status(
            state=self.state,
            reason=self.reason,
            detail=self._state_machine.detail,
            since_unix_seconds=self._state_machine.since_unix_seconds,
            eta_seconds=self.eta_seconds,
            has_been_ready=self._state_machine.has_been_ready,
            engine=replace(self._report, last_exit=self._deaths.last_exit),
            probe=self._proof.report,
            ranks=self._engine.ranks(reads_steps=False) if self._engine else self._last_ranks,
            start_phases=dict(self._phases),
            has_engine=self._engine is not None,
            ready_in_seconds=self._forecast.expected_in_seconds,
        )

    def request_stop(self) -> None:
        """Drain and end; a second call changes nothing."""
        self._stop_requested.set()

    def submit(self, command: Command) -> asyncio.Future[Any]:
        """Have the serving engine carry out a command; the future holds its result.

        Raises:
            ConflictError: the state forbids it. NotReadyError: no engine serves or sleeps.
        """
        return self._service.present_operations(self.eta_seconds).submit(command)

    def request_restart(self, reason: str) -> None:
        """End the engine when what would be lost with it is over, and start the next one.

        An engine that is being proven ends at once.

        Raises:
            ConflictError: the state forbids it. NotReadyError: there is no engine.
        """
        requested_end = self._deaths.requested_end
        is_proving = self._service.operations is None and self.state is not State.DRAINING
        if is_proving and requested_end is not None and not requested_end.done():
            requested_end.set_result(Death("requested", reason))
        else:
            self.submit(RestartCommand(reason))

    def serving_engine(self) -> Engine:
        """Return the engine that serves.

        Raises:
            ConflictError: the state is not READY. NotReadyError: there is no engine.
        """
        self._service.present_operations(self.eta_seconds)
        if self._engine is None or self.state is not State.READY:
            raise ConflictError(f"the server is {self.state}: {self.reason}")
        return self._engine

    async def run(self) -> None:
        """Serve until asked to stop; returns when the engine is gone.

        Raises:
            HoldfastError: the server cannot become or stay ready, and the state is FAILED.
        """
        self._forecast.began("start")
        generations = asyncio.create_task(self._run_generations(), name="engine")
        stopping = asyncio.create_task(self._stop_requested.wait(), name="stop requested")
        try:
            await asyncio.wait({generations, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not generations.done():
                await self._drain(generations)
        finally:
            is_cut = not generations.done()
            if is_cut and self._requests is not None:
                self._requests.plan_end(shut_down_error())
            stopping.cancel()
            generations.cancel()
            await asyncio.wait({generations, stopping})
        self._conclude(None if is_cut or generations.cancelled() else generations.exception())

    async def _run_generations(self) -> None:
        with timed("import", self._phases, self._progress):
            launcher = await self._host.load()
        self._requests = launcher.requests
        self._learning.open(launcher.fingerprint)
        while True:
            outcome = await self._run_generation(launcher)
            self._state_machine.generation = self._state_machine.generation.after(outcome)
            if outcome.death is None:
                again = self._state_machine.generation.starts_in
                self._state_machine.enter(again, "restarting with a different reservation")
            else:
                await self._deaths.back_off(outcome.death)

    async def _run_generation(self, launcher: EngineLauncher) -> GenerationOutcome:
        """Start one generation, prove it and serve with it until it ends.

        Raises:
            EngineStartError: the first start failed; ProbeFailedError: the proof did.
        """
        requests = launcher.requests
        try:
            async with (
                self._running(launcher) as engine,
                self._deaths.watching(engine, requests) as (death_task, requested_end),
            ):
                proof = await self._prove(engine, death_task)
                if proof == "again":
                    return GenerationOutcome()
                if proof == "proven" and await self._has_tried_suspects(requests, death_task):
                    await self._serve(engine, requests, death_task, requested_end)
                death, guess = await death_task, self._guess_seconds
                return await self._deaths.record_death(engine, requests, death, guess_seconds=guess)
        except EngineStartError as error:
            return self._deaths.record_failed_start(error, guess_seconds=self._guess_seconds)

    async def _prove(self, engine: Engine, death_task: DeathTask) -> ProofOutcome:
        """Put vLLM's routes in front of the engine, unless they are there, and prove it."""
        if not await is_alive_after(death_task, self._host.mount()):
            return "died"
        self._state_machine.enter(State.PROBING, f"running {self._proof.next_run}")
        return await self._proof.prove(
            engine,
            self._host.prober(engine),
            death_task,
            start_seconds=self._report.last_start_seconds or 0.0,
            is_first=self._state_machine.generation.replaces is None,
        )

    async def _has_tried_suspects(self, requests: ReplayManager, death_task: DeathTask) -> bool:
        """Try the requests that may have ended the last engine; False if this one dies of them."""
        start_seconds = self._report.last_start_seconds or 0.0
        has_tried = await run_unless_dead(death_task, requests.try_suspects(start_seconds))
        self._deaths.record_trials(requests)
        return bool(has_tried)

    @asynccontextmanager
    async def _running(self, launcher: EngineLauncher) -> AsyncIterator[Engine]:
        """While entered, a generation of the engine runs; afterwards its needs are learned."""
        generation = self._state_machine.generation
        directory = launcher.directory_of(generation.number)
        self._report = replace(
            self._report,
            generation=generation.number,
            starts=self._report.starts + 1,
            restarts=self._report.restarts + (generation.replaces is not None),
        )
        with self._forecast.waiting():
            await launcher.until_startable(self._wait_to_start)
        started = time.monotonic()
        async with AsyncExitStack() as stack:
            async with watched(directory, self._phases, self._progress):
                spec = self._learning.spec(generation.number, directory)
                engine = await stack.enter_async_context(launcher.running(spec))
            self._engine, self._facts = engine, engine.facts
            self._report = replace(self._report, last_start_seconds=time.monotonic() - started)
            self._guess_seconds = first_guess(self._report.last_start_seconds or 0.0, self._phases)
            try:
                yield engine
            finally:
                self._last_ranks = engine.ranks()
                self._engine = None
                self._learning.learn(self._last_ranks)
                self._host.generation_ended(self._last_ranks)

    def _wait_to_start(self, reason: str) -> None:
        self._state_machine.enter(self.state, reason)

    async def _serve(
        self,
        engine: Engine,
        requests: ReplayManager,
        death_task: DeathTask,
        requested_end: asyncio.Future[Death],
    ) -> None:
        """Serve with a proven engine, which carries out commands, until it dies."""
        self._become_ready(engine, requests)
        async with self._service.running(
            engine,
            requests,
            death_task,
            prober=lambda: self._host.prober(engine),
            become_ready=lambda: self._become_ready(engine, requests),
            finishing=lambda: self._forecast.finishing(self._guess_seconds),
            requested_end=requested_end,
        ):
            await death_task

    def _become_ready(self, engine: Engine, requests: ReplayManager) -> None:
        if self.state is not State.DRAINING:
            if not self._state_machine.has_been_ready:
                self._host.became_ready()
            is_news = self.state is not State.READY
            self._state_machine.enter(State.READY, proven_text(self._proof.report))
            if is_news:
                self._progress.ready(f"READY: {engine.facts.model}, {self.reason}")
        self._forecast.ready()
        requests.open()

    async def _drain(self, generations: asyncio.Task[None]) -> None:
        """Let requests in flight finish, even if an engine dies meanwhile."""
        self._state_machine.move(State.DRAINING, "asked to stop")
        self._service.drain()
        if not self._state_machine.has_been_ready:
            return
        idling = asyncio.create_task(self._host.until_idle(), name="until idle")
        try:
            await asyncio.wait({generations, idling}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            idling.cancel()
            await asyncio.wait({idling})

    def _conclude(self, error: BaseException | None) -> None:
        if isinstance(error, HoldfastError):
            self._deaths.last_exit = error.cause
        if self._requests is not None:
            self._requests.fail(shut_down_error(), "engine_lost" if error else "drained")
        if error is None:
            self._state_machine.move(State.STOPPED, "stopped")
            return
        known = error if isinstance(error, HoldfastError) else HoldfastError
        detail = str(error).removeprefix(known.outline).lstrip(": ")
        self._state_machine.move(State.FAILED, known.outline, detail)
        raise error
