"""Is it up? The one owner of the state: starts the engine, has it proven, and ends it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from holdfast.engine.interface import Engine, EngineLauncher
from holdfast.errors import EngineLostError, HoldfastError, ProbeFailedError
from holdfast.lifecycle.learning import Learning, has_rejection
from holdfast.lifecycle.phases import timed, watched
from holdfast.lifecycle.states import State, is_allowed
from holdfast.records import EngineReport, ProbeReport, RankStats, Status
from holdfast.settings import ProbeSettings
from holdfast.telemetry.progress import Progress

logger = logging.getLogger(__name__)

MOST_PASSES = 3
"""How often the suite runs in one engine until a pass goes through with no growth."""


class Prober(Protocol):
    """Runs the suite against one engine; `probe.Prober` is the one."""

    async def run(self) -> ProbeReport:
        """The report of one pass; a failed step is in it, not raised."""


class Collaborators(Protocol):
    """What the composition root gives the supervisor: whatever needs vLLM, the listener or disk."""

    async def load(self) -> EngineLauncher:
        """Import vLLM, read its flags and resolve the configuration."""

    async def mount(self) -> None:
        """Put vLLM's routes behind the gate; the second time there is nothing to do."""

    def prober(self, engine: Engine) -> Prober:
        """A prober for this engine."""

    async def until_idle(self) -> bool:
        """Wait until no request is in flight, for at most the drain time-out."""

    def generation_ended(self, ranks: tuple[RankStats, ...]) -> None:
        """Take in the last counters of a generation."""

    def probe_ran(self, report: ProbeReport) -> None:
        """Count a run of the suite."""


@dataclass(frozen=True, slots=True)
class _Standing:
    """The state and when it was entered."""

    state: State
    reason: str
    since_unix_seconds: float


class Supervisor:
    """Moves through `states.TRANSITIONS`; everybody else reads `state` and `status()`."""

    def __init__(
        self, probe: ProbeSettings, learning: Learning, progress: Progress, with_: Collaborators
    ) -> None:
        self._probe = probe
        self._learning = learning
        self._progress = progress
        self._with = with_
        self._standing = _Standing(State.STARTING, "importing vLLM", time.time())
        self._report = EngineReport()
        self._proof: ProbeReport | None = None
        self._engine: Engine | None = None
        self._last_ranks: tuple[RankStats, ...] = ()
        self._phases: dict[str, float] = {}
        self._has_been_ready = False
        self._stop_requested = asyncio.Event()

    @property
    def state(self) -> State:
        """Where the server stands."""
        return self._standing.state

    @property
    def reason(self) -> str:
        """Why it stands there, for people."""
        return self._standing.reason

    @property
    def eta_seconds(self) -> float | None:
        """Time until READY, if anything is known of it."""
        return None

    def status(self) -> Status:
        """Everything that is known now. Never waits for the engine."""
        return Status(
            state=self.state,
            reason=self.reason,
            since_unix_seconds=self._standing.since_unix_seconds,
            eta_seconds=self.eta_seconds,
            has_been_ready=self._has_been_ready,
            engine=self._report,
            probe=self._proof,
            ranks=self._engine.ranks(with_steps=False) if self._engine else self._last_ranks,
            start_phases=dict(self._phases),
        )

    def request_stop(self) -> None:
        """Drain and end. Asking twice is asking once."""
        self._stop_requested.set()

    async def run(self) -> None:
        """Serve until asked to stop; returns when the engine is gone.

        Raises:
            HoldfastError: why the server cannot become or stay ready; the state is FAILED.
        """
        living = asyncio.create_task(self._live(), name="engine")
        stopping = asyncio.create_task(self._stop_requested.wait(), name="stop requested")
        try:
            await asyncio.wait({living, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not living.done():
                await self._drain()
        finally:
            stopping.cancel()
            living.cancel()
            await asyncio.wait({living, stopping})
        self._conclude(living)

    async def _live(self) -> None:
        with timed("import", self._phases, self._progress):
            launcher = await self._with.load()
        self._learning.open(launcher.fingerprint)
        while True:
            async with self._running(launcher) as engine:
                if await self._is_proven(engine):
                    self._become_ready(engine)
                    await self._serve(engine)
            self._move(State.STARTING, "once more, with the learned reservation")

    async def _serve(self, engine: Engine) -> NoReturn:
        cause = await engine.until_dead()
        logger.error("the engine died: %s\n%s", cause, engine.last_words())
        raise EngineLostError(
            f"the engine died: {cause}", remedy="see the engine's log above, and start again."
        )

    @asynccontextmanager
    async def _running(self, launcher: EngineLauncher) -> AsyncIterator[Engine]:
        """The next generation of the engine; ended, and learned from, when left."""
        generation, directory = launcher.next_generation()
        self._report = replace(self._report, generation=generation, starts=self._report.starts + 1)
        started = time.monotonic()
        async with AsyncExitStack() as stack:
            async with watched(directory, self._phases, self._progress):
                spec = self._learning.spec(generation, directory)
                engine = await stack.enter_async_context(launcher.running(spec))
            self._engine = engine
            self._report = replace(self._report, last_start_seconds=time.monotonic() - started)
            try:
                await self._with.mount()
                yield engine
            finally:
                self._last_ranks = engine.ranks()
                self._engine = None
                self._learning.learn(self._last_ranks)
                self._with.generation_ended(self._last_ranks)

    async def _is_proven(self, engine: Engine) -> bool:
        """Whether a whole pass went through with no growth; False asks for the learned restart.

        Raises:
            ProbeFailedError: the worst case was not served.
        """
        for attempt in range(1, MOST_PASSES + 1):
            report = await self._pass(engine, attempt)
            ranks = engine.ranks()
            start_seconds = self._report.last_start_seconds or 0.0
            has_fallen_short = report.grew or has_rejection(ranks)
            if has_fallen_short and self._learning.takes_restart(ranks, start_seconds):
                return False
            self._require(report)
            if not report.grew:
                await self._learning.settle(engine)
                return True
        raise ProbeFailedError(
            f"a workspace still grew in pass {MOST_PASSES} of the probe",
            remedy="reserve more with --workspace-reserve.",
        )

    async def _pass(self, engine: Engine, attempt: int) -> ProbeReport:
        if attempt == 1:
            self._move(State.PROBING, f"running the {self._probe.suite} suite")
        else:
            logger.info("a workspace grew: running the suite again, pass %d", attempt)
        with timed("probe", self._phases, self._progress):
            report = await self._with.prober(engine).run()
        self._proof = report
        self._with.probe_ran(report)
        self._learning.learn(engine.ranks())
        return report

    def _require(self, report: ProbeReport) -> None:
        if not report.passed:
            failed = next(step for step in report.steps if step.outcome == "failed")
            raise ProbeFailedError(
                f"the probe failed in {failed.name}: {failed.reason}",
                remedy="reserve more (--workspace-reserve), let it grow (--workspace-growth "
                "alongside) or learn (--learned-dir), or lower --max-model-len or "
                "--max-num-batched-tokens.",
            )
        if report.limited and self._probe.require_full:
            limits = "; ".join(f"{s.name}: {s.reason}" for s in report.steps if s.limited)
            raise ProbeFailedError(
                f"the proof is limited to {report.proven_tokens} tokens ({limits})",
                remedy="raise --probe-timeout, delete the probe journal, or leave out "
                "--probe-require-full.",
            )

    def _become_ready(self, engine: Engine) -> None:
        self._has_been_ready = True
        self._move(State.READY, _proven(self._proof))
        self._progress.ready(f"READY: {engine.facts.model}, {self.reason}")

    async def _drain(self) -> None:
        was_ready = self.state is State.READY
        self._move(State.DRAINING, "asked to stop")
        if was_ready:
            await self._with.until_idle()

    def _conclude(self, living: asyncio.Task[None]) -> None:
        error = None if living.cancelled() else living.exception()
        if isinstance(error, HoldfastError):
            self._report = replace(self._report, last_exit=error.cause)
        if self.state is State.DRAINING or error is None:
            self._move(State.STOPPED, "stopped")
            return
        self._move(State.FAILED, str(error))
        raise error

    def _move(self, target: State, reason: str) -> None:
        if not is_allowed(self.state, target):
            raise RuntimeError(f"no transition from {self.state} to {target}")
        self._standing = _Standing(target, reason, time.time())
        self._progress.state_changed(target, reason)


def _proven(report: ProbeReport | None) -> str:
    if report is None or report.suite == "off":
        return "not probed"
    limited = ", a limited proof" if report.limited else ""
    return f"{report.proven_tokens} tokens proven{limited}"
