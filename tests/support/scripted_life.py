"""Runs the life of a server with a scripted engine and prober."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.engine.baseline import BaselineWatch
from holdfast.engine.replay import ReplayManager
from holdfast.errors import (
    EngineLostError,
    EngineStartError,
    HoldfastError,
    NodeLostError,
    UsageError,
)
from holdfast.labels import SLEEP_TAGS, SleepLevel, SleepTag
from holdfast.lifecycle.learning import Learning
from holdfast.lifecycle.memory_relief import MemoryRelief
from holdfast.lifecycle.start_times import Forecast
from holdfast.lifecycle.states import State
from holdfast.lifecycle.supervisor import Supervisor
from holdfast.records import Death, ProbeReport, ProbeStep, RankStats, SlotStats
from holdfast.settings import ProbeSettings, Suite, SupervisionSettings, WorkspaceSettings
from holdfast.telemetry.counters import EngineDeaths, Recycles
from holdfast.telemetry.progress import LogProgress
from holdfast.workspace.plan import GrowthPolicy, WorkspaceSpec
from sample_status import MIB, REJECTION, a_rank
from scripted_llm import Output, PlainOutputs, ScriptedLLM
from stub_engine import FACTS, StubEngine

DEADLINE_SECONDS = 60.0
PASSED = ProbeReport("worst-case", True, False, 1000, 1.0, (ProbeStep("first_token", "passed", 1),))
GREW = ProbeReport("worst-case", True, False, 1000, 1.0, (), grew=True)
LIMITED = ProbeReport(
    "worst-case",
    True,
    True,
    500,
    1.0,
    (ProbeStep("context_sweep", "passed", 1, 500, limited=True, reason="no time was left"),),
)
FAILED = ProbeReport(
    "worst-case",
    False,
    False,
    0,
    1.0,
    (
        ProbeStep("first_token", "passed", 1),
        ProbeStep("full_context", "failed", 1, reason="attention.py:10 needs 7 MB and holds 5"),
    ),
)
PLUG_PULLED = Death("core_exit", "a test pulled the plug")
RAISED = Death("worker_exception", "rank 0: ZeroDivisionError", blames_requests=True)
SHORT = a_rank(slots=(SlotStats(0, 0, 30 * MIB, 22 * MIB, 30 * MIB, "attention.py:10:prefill"),))
REFUSING = a_rank(
    slots=(SlotStats(0, 0, 24 * MIB, 22 * MIB, 30 * MIB, "attention.py:10:prefill"),),
    rejections={"scratch": 1},
    last_rejection=REJECTION,
)


class ScriptedEngine(StubEngine):
    """An engine that dies when a test says so."""

    def __init__(self, generation: int, ranks: tuple[RankStats, ...]) -> None:
        self.generation = generation
        self.facts = replace(FACTS, has_sleep_mode=True)
        self.llm = ScriptedLLM()
        """The LLM that clients' calls reach."""
        self.slept: list[SleepLevel] = []
        self.sleep_error: HoldfastError | None = None
        self.memory_bytes: int | None = None
        """What its processes hold."""
        self.measured = 0
        """How often that was asked."""
        self._asleep: frozenset[SleepTag] = frozenset()
        self.policies: list[GrowthPolicy] = []
        self.policy_death: Death | None = None
        """The death that a change of the growth policy causes, if any."""
        self._ranks = ranks
        self._death: asyncio.Future[Death] = asyncio.get_running_loop().create_future()

    def ranks(self, *, reads_steps: bool = True) -> tuple[RankStats, ...]:
        del reads_steps
        return self._ranks

    def host_memory_bytes(self) -> int | None:
        self.measured += 1
        return self.memory_bytes

    def die(self, death: Death) -> None:
        """End as if one of its processes had died."""
        self._death.set_result(death)

    def declare_dead(self) -> None:
        super().declare_dead()
        self.llm.die()

    async def until_dead(self) -> Death:
        return await asyncio.shield(self._death)

    async def set_growth(self, policy: GrowthPolicy) -> None:
        self.policies.append(policy)
        if self.policy_death is not None:
            self.die(self.policy_death)
            raise EngineLostError("the engine died during a call to it")

    async def sleep(self, level: SleepLevel) -> None:
        if self.sleep_error is not None:
            raise self.sleep_error
        self.slept.append(level)
        self._asleep = SLEEP_TAGS

    async def wake(self, tags: frozenset[SleepTag]) -> frozenset[SleepTag]:
        self._asleep -= tags
        return self._asleep


async def at_once() -> None:
    """Return at once."""


class Halt:
    """A stage that takes until a test releases it."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.released = asyncio.Event()

    async def __call__(self) -> None:
        self.entered.set()
        await self.released.wait()


async def fail_to_load() -> None:
    """Fail as if vLLM refused the command line."""
    raise UsageError("the model is unknown.", remedy="name another.")


class NodeLostOnce:
    """A stage in which another node is lost, the first time."""

    def __init__(self) -> None:
        self._is_lost = False

    async def __call__(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            raise NodeLostError("node b: it closed the connection")


async def fail_to_start() -> None:
    """Fail as if vLLM did not start."""
    raise EngineStartError("the engine could not start: no memory", remedy="buy some.")


@dataclass
class World:
    """Launcher, prober and host in one, which follow a script and note what happens."""

    directory: Path
    reports: Sequence[ProbeReport] = (PASSED,)
    ranks: tuple[RankStats, ...] = field(default_factory=lambda: (a_rank(),))
    loading: Callable[[], Awaitable[None]] = at_once
    starting: Callable[[], Awaitable[None]] = at_once
    mounting: Callable[[], Awaitable[None]] = at_once
    probing: Callable[[], Awaitable[None]] = at_once
    draining: Callable[[], Awaitable[None]] = at_once
    missing: list[str] = field(default_factory=list)
    """What the first start waits for."""
    stopping: Callable[[], Awaitable[None]] = at_once
    fingerprint: str = "f00d"
    memory_bytes: int | None = None
    """What a new engine holds of the host's memory."""
    has_new_weights: bool = False
    """Whether the weights of the engine have been changed in its memory."""
    events: list[str] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    specs: list[WorkspaceSpec] = field(default_factory=list)
    engines: list[ScriptedEngine] = field(default_factory=list)
    suites: list[Suite | None] = field(default_factory=list)
    _passes: int = 0

    requests: ReplayManager = field(default_factory=lambda: ReplayManager(PlainOutputs()))

    async def load(self) -> World:
        await self.loading()
        return self

    def directory_of(self, generation: int) -> Path:
        return self.directory / str(generation)

    async def until_startable(self, on_wait: Callable[[str], None]) -> None:
        while self.missing:
            on_wait(self.missing.pop(0))

    @asynccontextmanager
    async def running(self, spec: WorkspaceSpec) -> AsyncIterator[ScriptedEngine]:
        self.specs.append(spec)
        await self.starting()
        engine = ScriptedEngine(spec.generation, self.ranks)
        engine.memory_bytes = self.memory_bytes
        self.engines.append(engine)
        self.events.append(f"engine {spec.generation} runs")
        self.requests.engine_started(engine.llm, spec.generation)
        try:
            yield engine
        finally:
            await self.stopping()
            self.requests.engine_ended()
            engine.declare_dead()
            self.events.append(f"engine {spec.generation} stopped")

    async def mount(self) -> None:
        await self.mounting()
        self.events.append("mounted")

    def prober(self, _engine: Any) -> World:
        return self

    async def run(self, *, suite: Suite | None = None) -> ProbeReport:
        self.suites.append(suite)
        await self.probing()
        self._passes += 1
        return self.reports[min(self._passes, len(self.reports)) - 1]

    async def run_again(self, compared_tokens: int) -> ProbeReport:
        del compared_tokens
        self.events.append("one request")
        return PASSED

    async def until_idle(self) -> bool:
        self.events.append("drained")
        await self.draining()
        return True

    def generation_ended(self, ranks: tuple[RankStats, ...]) -> None:
        self.events.append(f"counters of {len(ranks)} ranks kept")

    def engine_died(self, death: Death) -> None:
        self.deaths.append(death)

    def probe_ran(self, _report: ProbeReport) -> None:
        self.events.append("probe counted")

    def became_ready(self) -> None:
        self.events.append("ready")


class Moves(LogProgress):
    """Notes every state that is entered."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("test"))
        self.states = [State.STARTING]
        self.reasons: list[str] = []
        self.entered = asyncio.Event()

    def state_changed(self, state: str, reason: str) -> None:
        super().state_changed(state, reason)
        self.states.append(State(state))
        self.reasons.append(reason)
        self.entered.set()


class Life:
    """A supervisor in its world, and every state that it entered."""

    def __init__(
        self,
        world: World,
        probe: ProbeSettings | None = None,
        workspace: WorkspaceSettings | None = None,
        supervision: SupervisionSettings | None = None,
        memory: MemoryRelief | None = None,
        baseline: BaselineWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Measure the times to READY by `clock`."""
        self.world = world
        self.engine_deaths = EngineDeaths()
        self.recycles = Recycles()
        self._moves = Moves()
        self.states = self._moves.states
        self.reasons = self._moves.reasons
        self.supervisor = Supervisor(
            probe or ProbeSettings(),
            supervision or SupervisionSettings(),
            world,
            learning=Learning(workspace or WorkspaceSettings(), world.directory / "learned"),
            forecast=Forecast(world.directory / "learned", ["model"], clock),
            engine_deaths=self.engine_deaths,
            recycles=self.recycles,
            has_new_weights=lambda: world.has_new_weights,
            progress=self._moves,
            baseline=baseline,
            memory=memory,
        )
        self.error: HoldfastError | None = None
        """The error that `run` ended with, if any."""

    async def run(self) -> None:
        """Run until the supervisor ends, and keep its error."""
        try:
            await self.supervisor.run()
        except HoldfastError as error:
            self.error = error

    async def until(self, state: State) -> None:
        """Wait until the server is in a state."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while self.supervisor.state is not state:
                self._moves.entered.clear()
                await self._moves.entered.wait()


@dataclass
class Client:
    """One call, and its outputs."""

    life: Life
    prompt: str
    is_consumed: bool = False
    is_continuable: bool = False

    def __post_init__(self) -> None:
        self.outputs: list[Output] = []
        self.first = asyncio.Event()
        self.task = asyncio.create_task(self._call())

    async def _call(self) -> None:
        arguments = {
            "prompt": self.prompt,
            "is_consumed": self.is_consumed,
            "is_continuable": self.is_continuable,
        }
        async for output in self.life.world.requests.run("generate", arguments):
            self.outputs.append(output)
            self.first.set()


def lived(
    world: World,
    act: Callable[[Life], Awaitable[None]] | None = None,
    *,
    probe: ProbeSettings | None = None,
    workspace: WorkspaceSettings | None = None,
    supervision: SupervisionSettings | None = None,
    baseline: BaselineWatch | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Life:
    """Run a life to its end, while `act` does something."""

    async def live() -> Life:
        life = Life(world, probe, workspace, supervision, baseline=baseline, clock=clock)
        async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
            tasks.create_task(life.run())
            if act is not None:
                await act(life)
        return life

    return asyncio.run(live())


def stopped_in(state: State) -> Callable[[Life], Awaitable[None]]:
    """Return an act that stops the server in a state."""

    async def stop(life: Life) -> None:
        await life.until(state)
        life.supervisor.request_stop()

    return stop


def in_service(act: Callable[[Life], Awaitable[None]]) -> Callable[[Life], Awaitable[None]]:
    """Return an act that does something in READY, and then stops the server."""

    async def ready(life: Life) -> None:
        await life.until(State.READY)
        await act(life)
        life.supervisor.request_stop()

    return ready


async def _die(life: Life, death: Death) -> None:
    """Kill the running engine in READY."""
    await life.until(State.READY)
    life.world.engines[-1].die(death)
    await life.until(State.RECOVERING)


def _revived(world: World, *deaths: Death, **options: Any) -> Life:
    """Run a life with some deaths, each in READY, that is stopped when it is READY again."""

    async def act(life: Life) -> None:
        for death in deaths:
            await _die(life, death)
        await life.until(State.READY)
        life.supervisor.request_stop()

    return lived(world, act, **options)


def unplugged_in(probing: Halt) -> Callable[[Life], Awaitable[None]]:
    """Return an act that kills the engine during the first proof, and stops the server in READY."""

    async def act(life: Life) -> None:
        await probing.entered.wait()
        life.world.engines[0].die(PLUG_PULLED)
        probing.released.set()
        await stopped_in(State.READY)(life)

    return act


async def _ask(requests: ReplayManager, prompt: str) -> list[Output]:
    arguments = {"prompt": prompt, "request_id": prompt}
    return [output async for output in requests.run("generate", arguments)]
