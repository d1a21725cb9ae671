"""How did a generation of the engine end, and when does the next one start?

The supervisor calls three functions in this order. `watching` notices the death, counts it, and
ends what waits for the engine. `record_death` logs what the processes left behind, has the requests
in the engine blamed, and moves to RECOVERING. `back_off` delays the next start, and ends the server
if the restart budget is spent. For an engine that dies while it starts, `record_failed_start` takes
the place of the first two. `Supervisor._run_generations` is the loop that calls them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass

from holdfast.engine.baseline import BaselineWatch
from holdfast.engine.heartbeat import Heartbeat
from holdfast.engine.interface import Engine
from holdfast.engine.replay import ReplayManager
from holdfast.engine.suspects.blame import BlameVerdict
from holdfast.errors import (
    EngineLostError,
    EngineStartError,
    HostFullError,
    NodeFullError,
    NodeLostError,
    NotReadyError,
)
from holdfast.labels import DeathCause
from holdfast.lifecycle.death_task import DeathTask, first_death
from holdfast.lifecycle.learning import Learning
from holdfast.lifecycle.memory_relief import MemoryRelief
from holdfast.lifecycle.proof import Proof
from holdfast.lifecycle.start_times import Forecast
from holdfast.lifecycle.states import GenerationOutcome, State, StateMachine
from holdfast.records import Death
from holdfast.settings import SupervisionSettings
from holdfast.telemetry.counters import EngineDeaths

logger = logging.getLogger(__name__)

MAX_BACKOFF_SECONDS = 30.0
MIN_BROWNOUT_SECONDS = 60.0
MAX_BROWNOUT_SECONDS = 300.0
REMEMBERED_DEATHS = 1024
_FROM_NEIGHBOURS: dict[DeathCause, str] = {
    "host_memory": "the host's memory ran out too often",
    "node_lost": "other nodes were lost too often",
}
"""Causes that a new process of ours would meet too, as they are told once the budget is spent."""
_RESTARTED = "The engine was restarted while it worked on this request."
_WITHOUT_REQUESTS: frozenset[DeathCause] = frozenset({"start_failure", "node_lost"})


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
        baseline: BaselineWatch | None = None,
        memory: MemoryRelief | None = None,
        on_recorded: Callable[[Death], None] = lambda _: None,
    ) -> None:
        """Take `on_recorded`, which is called with every death before the state changes."""
        self._stall_timeout_seconds = supervision.stall_timeout_seconds
        self._state_machine = state_machine
        self._proof = proof
        self._learning = learning
        self._forecast = forecast
        self._engine_deaths = engine_deaths
        self._baseline = baseline
        self._memory = memory
        self._on_recorded = on_recorded
        self._budget = RestartBudget(
            supervision.max_engine_restarts, supervision.restart_window_seconds
        )
        self._starts_without_memory = 0
        """How many starts in a row have found too little memory of the host."""
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
        self, engine: Engine, requests: ReplayManager
    ) -> AsyncIterator[tuple[DeathTask, asyncio.Future[Death]]]:
        """While entered, a task waits for the death of the engine, which a future can request."""
        self._starts_without_memory = 0
        if self._baseline is not None:
            self._baseline.forget_canary()
        self.requested_end = requested_end = asyncio.get_running_loop().create_future()
        heartbeat = Heartbeat(
            engine,
            requests,
            stall_timeout_seconds=self._stall_timeout_seconds,
            slowest_step_seconds=lambda: self._proof.slowest_step_seconds,
            may_try=lambda: self._state_machine.is_ready,
            baseline=self._baseline,
        )
        with (
            self._memory.guarding(engine, requests)
            if self._memory
            else nullcontext(requested_end) as out_of_memory
        ):
            async with first_death(
                out_of_memory,  # the first that counts: it is why the processes end
                engine.until_dead(),
                heartbeat.until_stalled(),
                requested_end,
                on_death=lambda death: self._on_death(engine, requests, death),
            ) as death_task:
                try:
                    yield death_task, requested_end
                finally:
                    requested_end.cancel()

    def _on_death(self, engine: Engine, requests: ReplayManager, death: Death) -> None:
        self._engine_deaths.count(death.cause)
        if death.cause == "requested":
            requests.plan_end(NotReadyError(_RESTARTED))
        if death.cause == "host_memory" and self._memory is not None:
            self._memory.note_death()
        # Calls that wait for the engine, the probe's own clean-up too, would wait until a deadline.
        engine.declare_dead()

    async def record_death(
        self, engine: Engine, requests: ReplayManager, death: Death, *, guess_seconds: float | None
    ) -> GenerationOutcome:
        """Record a death while its engine can still say what its processes left behind."""
        if words := engine.process_tracebacks():
            logger.error("what the engine's processes left behind:\n%s", words)
        verdict = requests.assign_blame(death)
        outcome = self._enter_recovering(death, verdict, guess_seconds)
        if death.cause == "host_memory" and self._memory is not None:
            self._proof.leave_out(await asyncio.to_thread(self._memory.keep_suspect_size))
        if verdict.explained:
            requests.save()
        return outcome

    def record_trials(self, requests: ReplayManager) -> None:
        """Give back the death before the trials, if they have explained it."""
        verdict = requests.verdict_of_trials()
        if verdict.explained:
            self._budget.explain(verdict)
            requests.save()

    def record_failed_start(
        self, error: EngineStartError, *, guess_seconds: float | None
    ) -> GenerationOutcome:
        """Record a start that failed; the next one waits for a lost node, or for memory.

        Raises:
            EngineStartError: it was the first, and forgetting what was learned cannot help.
        """
        is_first = self._state_machine.generation.replaces is None
        if isinstance(error, NodeFullError) and self._memory is not None:
            self._memory.note_end()  # the guard of this node counts what it ends itself
        if isinstance(error, NodeLostError):
            return self._record_start(Death("node_lost", error.cause), guess_seconds)
        if isinstance(error, HostFullError) and not is_first:
            self._starts_without_memory += 1
            # There was enough before the second one: what was learned may be what takes it.
            if self._starts_without_memory > 1:
                self._unlearn(error)
            return self._record_start(Death("host_memory", error.cause), guess_seconds)
        has_unlearned = self._unlearn(error)
        if not is_first:
            return self._record_start(Death("start_failure", error.cause), guess_seconds)
        if has_unlearned:
            return GenerationOutcome()
        raise error

    def _unlearn(self, error: EngineStartError) -> bool:
        has_unlearned = self._learning.unlearn()
        if has_unlearned:
            logger.warning("restarting without what was learned: %s", error.cause)
        return has_unlearned

    def _record_start(self, death: Death, guess_seconds: float | None) -> GenerationOutcome:
        self._engine_deaths.count(death.cause)
        return self._enter_recovering(death, BlameVerdict(), guess_seconds)

    async def back_off(self, death: Death) -> None:
        """Wait before the next start; after a death for lack of memory, until there is enough.

        Raises:
            EngineLostError: the budget is spent, so there is no next start.
        """
        wait_seconds = self._budget.wait_seconds(death)
        if wait_seconds >= MIN_BROWNOUT_SECONDS:
            why = _FROM_NEIGHBOURS.get(death.cause, "requests ended too many engines")
            reason = f"{why}, so the next start is in {wait_seconds:.0f} s"
            self._state_machine.enter(State.RECOVERING, reason, str(death))
        if wait_seconds:
            logger.info("waiting %.0f s before the next start", wait_seconds)
        self._forecast.delayed(wait_seconds)
        await asyncio.sleep(wait_seconds)
        if death.cause == "host_memory" and self._memory is not None:
            with self._forecast.waiting():
                await self._memory.until_ample(self._wait_for_memory)

    def _wait_for_memory(self, left: str) -> None:
        reason = "waiting until the host has enough memory"
        self._state_machine.enter(State.RECOVERING, reason, left)

    def _enter_recovering(
        self, death: Death, verdict: BlameVerdict, guess_seconds: float | None
    ) -> GenerationOutcome:
        is_requested = death.cause == "requested"
        if is_requested:
            logger.info("the engine was ended: %s", death.reason)
        else:
            logger.error("the engine died: %s", death)
        self._budget.count(death, verdict)
        if death.cause == "workspace_rejection":
            self._proof.invalidate()
        self.last_exit = str(death)
        self._on_recorded(death)
        self._forecast.began("recovery", guess_seconds=guess_seconds)
        what = "restarting" if is_requested else f"the engine died: {death.cause}"
        self._state_machine.enter(State.RECOVERING, what, death.reason)
        return GenerationOutcome(death)


@dataclass(slots=True)
class _CountedDeath:
    """A death that counts against the budget, unless a request explains it."""

    at_seconds: float
    cause: DeathCause
    may_end_server: bool
    is_explained: bool = False

    @property
    def may_be_explained(self) -> bool:
        """Whether a request may have been in the engine, and none explains it yet."""
        return not self.is_explained and self.cause not in _WITHOUT_REQUESTS

    @property
    def spends_budget(self) -> bool:
        """Whether enough of its kind end the server."""
        return self.may_end_server and not self.is_explained


class RestartBudget:
    """Limits the restarts in any `window_seconds`: the first is at once, the next after 1, 2, 4 s.

    It counts the unexplained deaths within the window. When it is spent, the server ends if deaths
    that accuse no request would have spent it alone: the hardware, a start that fails, a signal
    from outside. Otherwise requests end the engine, neighbours take the host's memory, or other
    nodes are lost, and a new process would meet the same: the server browns out, which means that
    it waits for minutes before each further start.
    """

    def __init__(
        self,
        max_restarts: int,
        window_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_restarts = max_restarts
        self._window_seconds = window_seconds
        self._clock = clock
        self._deaths: deque[_CountedDeath] = deque(maxlen=REMEMBERED_DEATHS)

    @property
    def left(self) -> int:
        """The restarts that are still allowed. Any thread may ask."""
        return max(0, self._max_restarts - self._spent(self._recent()))

    def count(self, death: Death, verdict: BlameVerdict) -> None:
        """Count a death, and refund those that it explains; a requested one is free."""
        if death.cause == "requested":
            return
        may_end_server = not verdict.has_suspects and death.cause not in _FROM_NEIGHBOURS
        self._deaths.append(_CountedDeath(self._clock(), death.cause, may_end_server))
        self.explain(verdict)

    def explain(self, verdict: BlameVerdict) -> None:
        """Refund the deaths that a verdict explains, the last ones first."""
        unexplained = [counted for counted in reversed(self._deaths) if counted.may_be_explained]
        for counted in unexplained[: verdict.explained]:
            counted.is_explained = True
            if verdict.is_charged:  # the key waits for it, and no other key
                self._deaths.remove(counted)

    def wait_seconds(self, death: Death) -> float:
        """Return how long to wait before the next start.

        Raises:
            EngineLostError: the budget is spent.
        """
        if death.cause == "requested":
            return 0.0
        recent = self._recent()
        if not self._max_restarts or self._spent(recent) > self._max_restarts:
            many = f", after {self._max_restarts} restarts within {self._window_seconds:.0f} s"
            raise EngineLostError(
                f"the engine died: {death}{many if self._max_restarts else ''}.",
                remedy="see the engine's log above, and start the server again; "
                "--max-engine-restarts "
                + ("allows more." if self._max_restarts else "0 allows no restart."),
            )
        excess = len(recent) - self._max_restarts
        if excess > 0:
            return min(MAX_BROWNOUT_SECONDS, MIN_BROWNOUT_SECONDS * 2.0 ** (excess - 1))
        earlier = len(recent) - 1
        return min(MAX_BACKOFF_SECONDS, 2.0 ** (earlier - 1)) if earlier > 0 else 0.0

    @staticmethod
    def _spent(deaths: Iterable[_CountedDeath]) -> int:
        return sum(death.spends_budget for death in deaths)

    def _recent(self) -> list[_CountedDeath]:
        horizon = self._clock() - self._window_seconds
        return [death for death in tuple(self._deaths) if death.at_seconds > horizon]
