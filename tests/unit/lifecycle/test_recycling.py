"""Planned restarts: what triggers them, what they wait for, and what takes their place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from counter_values import counter_values
from holdfast.engine.interface import Engine
from holdfast.engine.replay import ReplayManager
from holdfast.labels import SLEEP_TAGS, RecycleReason
from holdfast.lifecycle import recycling
from holdfast.lifecycle.commands import ProbeCommand, RestartCommand, SleepCommand, WakeCommand
from holdfast.lifecycle.operations import OperationRunner
from holdfast.lifecycle.recycling import (
    QUIET_SECONDS,
    EngineUse,
    Recycler,
    is_time,
    limit_reached,
)
from holdfast.lifecycle.states import State, StateMachine
from holdfast.settings import SupervisionSettings
from holdfast.settings.recycling import RecycleLimits
from holdfast.telemetry.counters import Recycles
from scripted_life import PLUG_PULLED, Client, Halt, Life, World, in_service, lived
from scripted_llm import PlainOutputs
from stub_engine import FakeClock, StubEngine

LIMITS = RecycleLimits(age_seconds=3600.0, host_memory_bytes=8 << 30, requests=100)
OF_MEMORY = RecycleLimits(host_memory_bytes=8 << 30)
AT_ONCE = SupervisionSettings(recycle_after=OF_MEMORY, recycle_within_seconds=0.0)
IN_QUIET = SupervisionSettings(recycle_after=OF_MEMORY, recycle_within_seconds=1e6)
LEAKED_BYTES = 9 << 30
LOOKS = 3


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look all the time, and call the first moment without a request quiet."""
    monkeypatch.setattr(recycling, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(recycling, "MEASURE_SECONDS", 0.0)
    monkeypatch.setattr(recycling, "QUIET_SECONDS", 1e-9)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - `lived` has the deadline
        await asyncio.sleep(0)


async def _until_looked_at(life: Life) -> None:
    """Return after some more looks at the newest engine."""
    engine = life.world.engines[-1]
    before = engine.measured
    await _until(lambda: engine.measured > before + LOOKS)


async def _until_noted(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    """Return after some looks at an engine that has reached a limit."""
    await _until(lambda: "so it is restarted" in caplog.text)
    await _until_looked_at(life)


async def _leak(life: Life) -> None:
    """Have the newest engine hold more than the limit, and more than when it was new."""
    await _until_looked_at(life)
    life.world.engines[-1].memory_bytes = LEAKED_BYTES


async def _until_replaced(life: Life, engines: int = 2) -> None:
    await _until(lambda: len(life.world.engines) >= engines)
    await life.until(State.READY)


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (EngineUse(3599.0, 99, (8 << 30) - 1), None),
        (EngineUse(3600.0), "age"),
        (EngineUse(host_memory_bytes=8 << 30), "host_memory"),
        (EngineUse(requests=100), "requests"),
        (EngineUse(9999.0, 9999, 9 << 40), "age"),
        (EngineUse(), None),
    ],
)
def test_the_first_limit_that_is_reached_is_the_reason(
    use: EngineUse, reason: RecycleReason | None
) -> None:
    """A size that was not measured reaches none."""
    assert limit_reached(LIMITS, use) == reason
    assert limit_reached(RecycleLimits(), use) is None


@pytest.mark.parametrize(
    ("idle_seconds", "waited_seconds", "is_due"),
    [(0.0, 0.0, False), (QUIET_SECONDS, 0.0, True), (0.0, 599.0, False), (0.0, 600.0, True)],
)
def test_a_quiet_moment_or_the_bound_is_the_time(
    monkeypatch: pytest.MonkeyPatch, idle_seconds: float, waited_seconds: float, is_due: bool
) -> None:
    """Whichever comes first."""
    monkeypatch.setattr(recycling, "QUIET_SECONDS", QUIET_SECONDS)
    use = EngineUse(idle_seconds=idle_seconds, waited_seconds=waited_seconds)
    assert is_time(use, within_seconds=600.0) is is_due


def test_an_engine_that_holds_too_much_is_replaced_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one holds less. State, log and metric say why; the budget is not spent."""
    caplog.set_level("INFO")

    async def act(life: Life) -> None:
        await _leak(life)
        await _until_replaced(life)
        await _until_looked_at(life)

    life = lived(World(tmp_path), in_service(act), supervision=IN_QUIET)
    assert len(life.world.engines) == 2
    assert counter_values(life.recycles) == {"age": 0, "host_memory": 1, "requests": 0}
    assert counter_values(life.engine_deaths)["requested"] == 1
    assert life.supervisor.restarts_left == SupervisionSettings().max_engine_restarts
    why = "the engine holds 9.00 GiB of host memory"
    assert life.supervisor.status().engine.last_exit == f"requested: {why}"
    assert f"RECOVERING: restarting, as planned: {why}" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_the_requests_of_each_engine_are_counted(tmp_path: Path) -> None:
    """The next one begins at 0."""
    limits = RecycleLimits(requests=3)
    supervision = SupervisionSettings(recycle_after=limits, recycle_within_seconds=1e6)

    async def act(life: Life) -> None:
        for number in range(5):
            await life.until(State.READY)
            await Client(life, f"request {number}").task
            if number == 2:
                await _until_replaced(life)

    life = lived(World(tmp_path), in_service(act), supervision=supervision)
    assert len(life.world.engines) == 2
    assert counter_values(life.recycles)["requests"] == 1


def test_requests_that_outlived_an_engine_do_not_replace_the_next(tmp_path: Path) -> None:
    """Else a limit below what is in flight would replace one engine after another."""
    limits = RecycleLimits(requests=3)
    supervision = SupervisionSettings(recycle_after=limits, recycle_within_seconds=0.0)

    async def act(life: Life) -> None:
        llm = life.world.engines[0].llm
        llm.hold()
        clients = [Client(life, f"request {number}") for number in range(4)]
        await llm.until_received(4)
        await _until_replaced(life)
        await asyncio.gather(*(client.task for client in clients))
        for _ in range(10 * LOOKS):
            await asyncio.sleep(0)
        await life.until(State.READY)

    life = lived(World(tmp_path), in_service(act), supervision=supervision)
    assert len(life.world.engines) == 2
    assert life.world.requests.replayed == 4


def test_an_engine_grows_old(tmp_path: Path) -> None:
    """Its age begins at READY, and is less than that of the server."""
    supervision = SupervisionSettings(recycle_after=RecycleLimits(age_seconds=1e-3))

    async def act(life: Life) -> None:
        await _until_replaced(life, engines=3)

    life = lived(World(tmp_path), in_service(act), supervision=supervision)
    assert counter_values(life.recycles)["age"] >= 2


def test_an_engine_grows_older_only_in_ready() -> None:
    """Not while it sleeps, nor while it is proven again."""
    clock, machine = FakeClock(), StateMachine(lambda _state, _reason: None)
    machine.move(State.PROBING, "running the suite")
    machine.move(State.READY, "proven")
    recycler = Recycler(
        cast("Engine", StubEngine()),
        ReplayManager(PlainOutputs()),
        cast("OperationRunner", None),
        SupervisionSettings(),
        machine,
        Recycles(),
        has_new_weights=lambda: False,
        clock=clock,
    )

    def age_after(seconds: float) -> float:
        clock.now_seconds += seconds
        return recycler._look().age_seconds

    ages = [age_after(60.0)]
    for state in (State.SLEEPING, State.PROBING, State.READY):
        machine.move(state, "as it was asked to")
        ages.append(age_after(60.0))
    assert ages == [60.0, 60.0, 60.0, 120.0]


def test_a_quiet_moment_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While a request runs, the engine stays; afterwards it is replaced, and nothing is lost."""
    caplog.set_level("INFO")

    async def act(life: Life) -> None:
        llm = life.world.engines[0].llm
        llm.hold()
        running = Client(life, "long")
        await llm.until_received(1)
        await _leak(life)
        await _until_noted(life, caplog)
        assert life.supervisor.state is State.READY
        llm.release()
        await running.task
        await _until_replaced(life)

    life = lived(World(tmp_path), in_service(act), supervision=IN_QUIET)
    assert sum(life.world.requests.lost.values()) == 0
    assert life.world.requests.replayed == 0


def test_a_moment_is_quiet_although_a_client_reads_slowly(tmp_path: Path) -> None:
    """The engine is done with its answer, and has nothing to do."""

    async def act(life: Life) -> None:
        requests = life.world.requests
        life.world.engines[0].llm.answers = 2
        stream = requests.run("generate", {"prompt": "slow", "request_id": "slow"})
        await anext(stream)
        await _leak(life)
        await _until_looked_at(life)
        assert len(life.world.engines) == 1
        requests.presence.unsent = lambda names, _: frozenset(names)
        await _until_replaced(life)
        del stream

    lived(World(tmp_path), in_service(act), supervision=IN_QUIET)


def test_at_the_bound_streams_end_and_other_requests_move_on(tmp_path: Path) -> None:
    """As when an operator restarts the engine: no answer is lost."""

    async def act(life: Life) -> None:
        llm = life.world.engines[0].llm
        llm.answers = 2
        begun = Client(life, "begun")
        await begun.first.wait()
        llm.hold()
        queued = Client(life, "queued")
        await llm.until_received(2)
        await _leak(life)
        await life.until(State.RECOVERING)
        late = Client(life, "late")
        llm.release()
        await asyncio.gather(begun.task, queued.task, late.task)
        assert len(begun.outputs) == 2
        await _until_replaced(life)

    life = lived(World(tmp_path), in_service(act), supervision=AT_ONCE)
    assert sum(life.world.requests.lost.values()) == 0
    assert counter_values(life.recycles)["host_memory"] == 1


def test_a_limit_below_what_a_new_engine_holds_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else no restart would be the last."""

    async def act(_life: Life) -> None:
        await _until(lambda: "that limit is ignored" in caplog.text)
        for _ in range(10 * LOOKS):  # nothing measures the memory any more
            await asyncio.sleep(0)

    world = World(tmp_path, memory_bytes=LEAKED_BYTES)
    life = lived(world, in_service(act), supervision=AT_ONCE)
    assert len(world.engines) == 1
    assert counter_values(life.recycles)["host_memory"] == 0


def test_an_engine_with_weights_of_its_own_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart that nobody asked for would bring back the old ones; the log says so once."""

    async def act(life: Life) -> None:
        life.world.has_new_weights = True
        await _leak(life)
        await _until(lambda: "but it is not restarted" in caplog.text)
        await _until_looked_at(life)
        assert life.supervisor.state is State.READY
        await life.supervisor.submit(RestartCommand("they may go"))
        life.world.has_new_weights = False
        await _until_replaced(life)

    life = lived(World(tmp_path), in_service(act), supervision=AT_ONCE)
    assert caplog.text.count("but it is not restarted") == 1
    assert counter_values(life.recycles)["host_memory"] == 0


def test_memory_that_cannot_be_measured_reaches_no_limit(tmp_path: Path) -> None:
    """Other limits hold on."""
    limits = RecycleLimits(host_memory_bytes=1, requests=1)
    supervision = SupervisionSettings(recycle_after=limits)

    async def act(life: Life) -> None:
        await Client(life, "one").task
        await _until_replaced(life)

    life = lived(World(tmp_path), in_service(act), supervision=supervision)
    assert counter_values(life.recycles) == {"age": 0, "host_memory": 0, "requests": 1}


def test_the_command_of_an_operator_comes_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A probe that waits for running requests is made; the planned restart follows."""
    caplog.set_level("INFO")
    world = World(tmp_path)

    async def act(life: Life) -> None:
        llm = world.engines[0].llm
        llm.hold()
        running = Client(life, "long")
        await llm.until_received(1)
        answer = life.supervisor.submit(ProbeCommand("quick"))
        await _leak(life)
        await _until_noted(life, caplog)
        assert life.supervisor.state is State.READY
        llm.release()
        await running.task
        assert (await answer).report.passed
        await _until_replaced(life)

    life = lived(world, in_service(act), supervision=AT_ONCE)
    assert world.suites == [None, "quick"]
    assert counter_values(life.recycles)["host_memory"] == 1


def test_the_restart_of_an_operator_is_not_followed_by_another(tmp_path: Path) -> None:
    """The engine that was due is gone."""

    async def act(life: Life) -> None:
        await _until_looked_at(life)
        restarted = life.supervisor.submit(RestartCommand("new weights"))
        life.world.engines[0].memory_bytes = LEAKED_BYTES
        await restarted
        await _until_replaced(life)
        await _until_looked_at(life)

    life = lived(World(tmp_path), in_service(act), supervision=AT_ONCE)
    assert len(life.world.engines) == 2
    assert counter_values(life.recycles)["host_memory"] == 0


def test_an_engine_that_sleeps_is_not_woken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is restarted after it was woken."""
    caplog.set_level("INFO")

    async def act(life: Life) -> None:
        await life.supervisor.submit(SleepCommand(1, is_abrupt=False))
        await _leak(life)
        await _until_noted(life, caplog)
        assert life.supervisor.state is State.SLEEPING
        await life.supervisor.submit(WakeCommand(SLEEP_TAGS))
        await _until_replaced(life)

    life = lived(World(tmp_path), in_service(act), supervision=AT_ONCE)
    assert counter_values(life.recycles)["host_memory"] == 1


def test_an_engine_that_makes_no_steps_is_not_restarted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be writing its weights, and is restarted afterwards, also beyond the bound."""
    caplog.set_level("INFO")

    async def act(life: Life) -> None:
        engine = life.world.engines[0]
        engine.is_paused = True
        await _leak(life)
        await _until_noted(life, caplog)
        assert life.supervisor.state is State.READY
        engine.is_paused = False
        await _until_replaced(life)

    life = lived(World(tmp_path), in_service(act), supervision=AT_ONCE)
    assert counter_values(life.recycles)["host_memory"] == 1


def test_a_server_that_drains_keeps_its_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends with the server."""
    caplog.set_level("INFO")
    world = World(tmp_path)

    async def act(life: Life) -> None:
        await life.until(State.READY)
        world.draining = until_answered = Halt()
        life.supervisor.request_stop()
        await until_answered.entered.wait()
        await _leak(life)
        await _until_noted(life, caplog)
        until_answered.released.set()

    life = lived(world, act, supervision=AT_ONCE)
    assert life.error is None
    assert len(world.engines) == 1
    assert counter_values(life.recycles)["host_memory"] == 0


def test_a_stop_takes_the_place_of_a_planned_restart(tmp_path: Path) -> None:
    """This engine serves the requests that waited for the next one, and the end is clean."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        await life.until(State.READY)
        llm = world.engines[0].llm
        llm.answers = 2
        begun = Client(life, "begun")
        await begun.first.wait()
        llm.hold()
        await _leak(life)
        await life.until(State.RECOVERING)
        late = Client(life, "late")
        world.draining = until_answered = Halt()
        life.supervisor.request_stop()
        await until_answered.entered.wait()
        llm.release()
        await asyncio.gather(begun.task, late.task)
        until_answered.released.set()

    life = lived(world, act, supervision=AT_ONCE)
    assert life.error is None
    assert len(world.engines) == 1
    assert counter_values(life.recycles)["host_memory"] == 0
    assert sum(world.requests.lost.values()) == 0


def test_an_engine_that_dies_when_it_is_due_is_replaced_once(tmp_path: Path) -> None:
    """Whichever is noticed first."""

    async def act(life: Life) -> None:
        await _leak(life)
        life.world.engines[0].die(PLUG_PULLED)
        await _until_replaced(life)
        await _until_looked_at(life)
        await Client(life, "again").task

    life = lived(World(tmp_path), in_service(act), supervision=AT_ONCE)
    assert len(life.world.engines) == 2
