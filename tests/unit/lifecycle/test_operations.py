"""Operators' commands: probe, sleep, wake and restart, and what happens to requests meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from counter_values import counter_values
from holdfast.errors import (
    ConflictError,
    EngineRefusedError,
    HoldfastError,
    NotReadyError,
)
from holdfast.labels import SLEEP_TAGS, SleepLevel
from holdfast.lifecycle.commands import (
    Command,
    ProbeCommand,
    ProbeResult,
    RestartCommand,
    SleepCommand,
    SleepResult,
    WakeCommand,
)
from holdfast.lifecycle.states import State
from holdfast.settings import SupervisionSettings
from scripted_life import (
    DEADLINE_SECONDS,
    FAILED,
    GREW,
    PASSED,
    PLUG_PULLED,
    RAISED,
    Client,
    Halt,
    Life,
    World,
    in_service,
    lived,
)
from scripted_llm import Output
from stub_engine import FACTS

QUICK = ProbeCommand("quick")
SLEEP = SleepCommand(1, is_abrupt=False)
WAKE = WakeCommand(SLEEP_TAGS)
RESTART = RestartCommand("new weights")
IMPATIENT = SupervisionSettings(drain_timeout_seconds=0.0)
PATIENT = SupervisionSettings(drain_timeout_seconds=10 * DEADLINE_SECONDS)


def refusals(life: Life, *commands: Command) -> list[type[HoldfastError]]:
    """Return the error that refuses each command."""
    refused = []
    for command in commands:
        with pytest.raises(HoldfastError) as caught:
            life.supervisor.submit(command)
        refused.append(caught.type)
    return refused


async def begun_stream(world: World, life: Life, *, is_continuable: bool = False) -> Client:
    """A stream that has had its first token, and gets no other before the engine goes on."""
    llm = world.engines[0].llm
    llm.answers = 2
    begun = Client(life, "begun", is_continuable=is_continuable)
    await begun.first.wait()
    llm.hold()
    return begun


def test_a_probe_on_request_closes_the_gate_and_opens_it(tmp_path: Path) -> None:
    """The states are READY, PROBING, READY, and the requested suite runs."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        proven = await life.supervisor.submit(QUICK)
        assert proven == ProbeResult(PASSED, 0.0)
        assert life.supervisor.state is State.READY

    life = lived(world, in_service(act))
    assert life.states[2:5] == ["READY", "PROBING", "READY"]
    assert world.suites == [None, "quick"]


def test_a_second_probe_is_the_first_one_and_other_commands_conflict(tmp_path: Path) -> None:
    """Equal commands share one result; other commands conflict."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        world.probing = halt = Halt()
        first = life.supervisor.submit(QUICK)
        second = life.supervisor.submit(ProbeCommand("quick", youngest_seconds=9.0))
        await halt.entered.wait()
        assert refusals(life, ProbeCommand("worst-case"), RESTART, SLEEP) == [ConflictError] * 3
        assert life.supervisor.is_recovering
        halt.released.set()
        assert await first is await second

    lived(world, in_service(act))
    assert world.suites == [None, "quick"]


def test_a_young_proof_is_an_answer(tmp_path: Path) -> None:
    """The report comes with its age, also from a wider suite, and no suite runs."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        await life.supervisor.submit(ProbeCommand("worst-case"))
        proven = await life.supervisor.submit(ProbeCommand("quick", youngest_seconds=60.0))
        assert 0.0 < proven.age_seconds < DEADLINE_SECONDS
        await life.supervisor.submit(QUICK)

    lived(world, in_service(act))
    assert world.suites == [None, "worst-case", "quick"]


def test_a_probe_that_fails_costs_the_engine(tmp_path: Path) -> None:
    """Its green light would be false, so the whole suite proves the next engine."""
    world = World(tmp_path, reports=(PASSED, FAILED, PASSED))

    async def act(life: Life) -> None:
        proven = await life.supervisor.submit(QUICK)
        assert not proven.report.passed
        await life.until(State.RECOVERING)
        await life.until(State.READY)

    life = lived(world, in_service(act))
    assert counter_values(life.engine_deaths)["unknown"] == 1
    assert "full_context: attention.py:10" in life.supervisor.status().engine.last_exit
    assert world.suites == [None, "quick", None]
    assert "one request" not in world.events


@pytest.mark.parametrize("is_woken", [False, True])
def test_a_probe_that_cannot_run_costs_the_engine(tmp_path: Path, *, is_woken: bool) -> None:
    """Nothing is known of it then, and it would stay in PROBING, or serve longer requests."""
    world = World(tmp_path)

    async def fail() -> None:
        world.probing = _nothing
        raise OSError("Too many open files")

    async def act(life: Life) -> None:
        if is_woken:
            await life.supervisor.submit(SLEEP)
        world.probing = fail
        with pytest.raises(OSError, match="Too many open files"):
            await life.supervisor.submit(WAKE if is_woken else QUICK)
        await life.until(State.RECOVERING)
        await life.until(State.READY)

    life = lived(world, in_service(act))
    assert counter_values(life.engine_deaths)["unknown"] == 1


def test_a_workspace_that_grows_on_request_is_proven_again(tmp_path: Path) -> None:
    """The suite runs again in the same engine, until a pass has no growth."""
    world = World(tmp_path, reports=(PASSED, GREW, PASSED))

    async def act(life: Life) -> None:
        proven = await life.supervisor.submit(QUICK)
        assert proven.report == PASSED

    lived(world, in_service(act))
    assert len(world.engines) == 1


def test_a_probe_waits_for_what_runs_and_what_comes_waits_for_it(tmp_path: Path) -> None:
    """No request is refused, and none is in the engine beside the probe."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        world.probing = halt = Halt()
        llm = world.engines[0].llm
        llm.hold()
        running = Client(life, "early")
        await llm.until_received(1)
        answer = life.supervisor.submit(QUICK)
        waiting = Client(life, "late")
        await asyncio.sleep(0)
        assert not halt.entered.is_set()
        llm.release()
        await running.task
        await halt.entered.wait()
        assert (world.requests.in_engine, world.requests.held) == (0, 1)
        halt.released.set()
        await answer
        await waiting.task
        assert llm.received == ["early", "late"]

    lived(world, in_service(act))


async def slow_stream(life: Life) -> AsyncIterator[Output]:
    """A stream that the engine has made to its end, and its client has read a part of."""
    world = life.world
    world.engines[0].llm.answers = 2
    stream = world.requests.run("generate", {"prompt": "slow", "request_id": "slow"})
    await anext(stream)
    world.requests.presence.unsent = lambda names, _: frozenset(names)
    return stream


@pytest.mark.parametrize("command", [QUICK, SLEEP, RESTART])
def test_a_client_that_reads_slowly_keeps_no_command_waiting(
    tmp_path: Path, command: Command
) -> None:
    """The engine is done with its answer; nobody else would be served until it has read that."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        stream = await slow_stream(life)
        await life.supervisor.submit(command)
        if command == RESTART:
            await life.until(State.READY)
        assert world.requests.in_engine == 1
        world.engines[0].llm.is_dead = False  # what it made is there although it has died since
        assert [output async for output in stream] == [Output(2, finished=True)]

    lived(world, in_service(act), supervision=PATIENT)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_that_is_about_to_be_sent_keeps_a_command_waiting(
    tmp_path: Path, *, is_streamed: bool
) -> None:
    """The engine has nothing of it yet, and gets it."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        llm = world.engines[0].llm
        llm.hold()
        world.requests.presence.unsent = lambda names, _: frozenset(names)
        arguments = {"prompt": "new", "request_id": "new", "is_streamed": is_streamed}
        asking = asyncio.ensure_future(anext(world.requests.run("generate", arguments)))
        await llm.until_received(1)
        with pytest.raises(ConflictError, match="1 requests were still running"):
            await life.supervisor.submit(QUICK)
        llm.release()
        await asking

    lived(world, in_service(act), supervision=IMPATIENT)


def test_a_probe_gives_up_where_requests_do_not_end(tmp_path: Path) -> None:
    """After the drain timeout the command conflicts, and the requests continue in READY."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        llm = world.engines[0].llm
        llm.hold()
        running = Client(life, "long")
        await llm.until_received(1)
        with pytest.raises(ConflictError, match="1 requests were still running"):
            await life.supervisor.submit(QUICK)
        assert life.supervisor.state is State.READY
        llm.release()
        await running.task
        await Client(life, "next").task

    life = lived(world, in_service(act), supervision=IMPATIENT)
    assert life.states[:4] == ["STARTING", "PROBING", "READY", "READY"]


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_wakes_to_a_fresh_proof(tmp_path: Path, level: SleepLevel) -> None:
    """The quick suite runs before READY, and a call during the sleep is refused."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        assert await life.supervisor.submit(SleepCommand(level, is_abrupt=False)) == SleepResult(
            SLEEP_TAGS
        )
        assert life.supervisor.state is State.SLEEPING
        with pytest.raises(Exception, match="asleep"):
            await Client(life, "too late").task
        assert refusals(life, SLEEP, QUICK) == [ConflictError] * 2
        assert await life.supervisor.submit(WAKE) == SleepResult(frozenset(), PASSED)
        await Client(life, "after all").task

    life = lived(world, in_service(act))
    assert life.states[2:6] == ["READY", "SLEEPING", "PROBING", "READY"]
    assert world.engines[0].slept == [level]
    assert world.suites == [None, "quick"]


def test_an_engine_that_wakes_by_tags_sleeps_until_all_of_it_is_awake(tmp_path: Path) -> None:
    """The first wake gives SLEEPING another reason; the second one leads to READY."""

    async def act(life: Life) -> None:
        await life.supervisor.submit(SLEEP)
        result = await life.supervisor.submit(WakeCommand(frozenset({"weights"})))
        assert result == SleepResult(frozenset({"kv_cache"}))
        await life.until(State.SLEEPING)
        assert "kv_cache" in life.supervisor.reason
        result = await life.supervisor.submit(WakeCommand(frozenset({"kv_cache"})))
        assert result == SleepResult(frozenset(), PASSED)
        await life.until(State.READY)

    lived(World(tmp_path), in_service(act))


def test_an_abrupt_sleep_waits_for_no_request(tmp_path: Path) -> None:
    """The engine gets the command while requests run, and aborts them itself."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        llm = world.engines[0].llm
        llm.hold()
        running = Client(life, "long")
        await llm.until_received(1)
        await life.supervisor.submit(SleepCommand(1, is_abrupt=True))
        assert life.supervisor.state is State.SLEEPING
        llm.release()
        await running.task

    lived(world, in_service(act), supervision=IMPATIENT)


def test_an_engine_that_dies_asleep_comes_back_awake(tmp_path: Path) -> None:
    """The states are SLEEPING, RECOVERING, PROBING, READY."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        await life.supervisor.submit(SLEEP)
        world.engines[0].die(PLUG_PULLED)
        await life.until(State.RECOVERING)
        await life.until(State.READY)
        await Client(life, "again").task

    life = lived(world, in_service(act))
    assert life.states[2:7] == ["READY", "SLEEPING", "RECOVERING", "PROBING", "READY"]


def test_an_engine_that_cannot_fall_asleep_is_replaced(tmp_path: Path) -> None:
    """Its condition is unknown, so it is replaced; the caller gets the reason."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        world.engines[0].sleep_error = EngineRefusedError("no host memory")
        with pytest.raises(EngineRefusedError, match="no host memory"):
            await life.supervisor.submit(SLEEP)
        await life.until(State.RECOVERING)
        await life.until(State.READY)

    life = lived(world, in_service(act))
    assert counter_values(life.engine_deaths)["unknown"] == 1


@pytest.mark.parametrize("is_paused_by_vllm", [False, True])
def test_an_engine_that_makes_no_steps_is_neither_proven_nor_put_to_sleep(
    tmp_path: Path, *, is_paused_by_vllm: bool
) -> None:
    """It writes its weights, or sleeps by vLLM's own route; an operator may restart it."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        engine = world.engines[0]
        engine.is_paused = not is_paused_by_vllm
        world.requests.aborts.is_paused = is_paused_by_vllm
        assert refusals(life, QUICK, SLEEP) == [ConflictError] * 2
        await life.supervisor.submit(RESTART)
        await life.until(State.READY)

    lived(world, in_service(act))
    assert world.suites == [None]


def test_a_save_that_begins_while_a_probe_waits_is_not_cut_off(tmp_path: Path) -> None:
    """The probe would get no step, and be taken for a hang."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        llm = world.engines[0].llm
        llm.hold()
        running = Client(life, "long")
        await llm.until_received(1)
        answer = life.supervisor.submit(QUICK)
        await asyncio.sleep(0)
        world.engines[0].is_paused = True
        llm.release()
        with pytest.raises(ConflictError, match="not running steps"):
            await answer
        await running.task
        assert life.supervisor.state is State.READY

    lived(world, in_service(act))
    assert world.suites == [None]


def test_an_engine_that_is_awake_is_not_woken(tmp_path: Path) -> None:
    """The refusal says where to look."""

    async def act(life: Life) -> None:
        with pytest.raises(ConflictError, match="is not asleep") as caught:
            life.supervisor.submit(WAKE)
        assert "/statusz" in caught.value.remedy

    lived(World(tmp_path), in_service(act))


def test_sleep_needs_the_flag(tmp_path: Path) -> None:
    """Without sleep mode vLLM frees nothing, and reports no error."""

    async def act(life: Life) -> None:
        life.world.engines[0].facts = FACTS
        assert not FACTS.has_sleep_mode
        with pytest.raises(ConflictError, match="sleep mode is off") as caught:
            life.supervisor.submit(SLEEP)
        assert "--enable-sleep-mode" in caught.value.remedy

    lived(World(tmp_path), in_service(act))


def test_a_restart_lets_streams_end_and_replays_the_rest(tmp_path: Path) -> None:
    """The old engine finishes answers that have begun, and the next one runs all other requests."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        llm = world.engines[0].llm
        begun = await begun_stream(world, life)
        once = Client(life, "once", is_consumed=True)
        queued = Client(life, "queued")
        await llm.until_received(3)
        answer = life.supervisor.submit(RESTART)
        late = Client(life, "late")
        await life.until(State.RECOVERING)
        assert life.supervisor.is_recovering
        assert life.supervisor.eta_seconds is not None
        llm.release()
        await answer
        await asyncio.gather(begun.task, once.task, queued.task, late.task)
        assert "late" not in llm.received
        assert set(world.engines[1].llm.received) <= {"queued", "late"}
        await life.until(State.READY)

    life = lived(world, in_service(act))
    assert counter_values(life.engine_deaths)["requested"] == 1
    assert sum(world.requests.lost.values()) == 0


def test_a_restart_does_not_wait_for_what_can_go_on(tmp_path: Path) -> None:
    """All others would wait for its end, although it loses nothing."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        begun = await begun_stream(world, life, is_continuable=True)
        await life.supervisor.submit(RESTART)
        await life.until(State.READY)
        await begun.task

    lived(world, in_service(act), supervision=PATIENT)
    assert (world.requests.continued, sum(world.requests.lost.values())) == (1, 0)


def test_a_restart_does_not_wait_for_ever(tmp_path: Path) -> None:
    """A stream that outlasts the drain timeout ends with the reason, and is counted."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        begun = await begun_stream(world, life)
        await life.supervisor.submit(RESTART)
        with pytest.raises(Exception, match="The engine was restarted"):
            await begun.task
        await life.until(State.READY)

    lived(world, in_service(act), supervision=IMPATIENT)
    assert (world.requests.lost["drained"], sum(world.requests.lost.values())) == (1, 1)


def test_a_stop_does_not_wait_for_ever(tmp_path: Path) -> None:
    """A stream that is still running when the engine ends says that the server has shut down."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        begun = await begun_stream(world, life)
        life.supervisor.request_stop()
        with pytest.raises(Exception, match=r"The server has shut down\."):
            await begun.task

    lived(world, in_service(act), supervision=IMPATIENT)
    assert (world.requests.lost["drained"], sum(world.requests.lost.values())) == (1, 1)


def test_commands_need_an_engine(tmp_path: Path) -> None:
    """In STARTING the error says when to try again; in DRAINING and STOPPED it is final."""
    halt = Halt()
    world = World(tmp_path, starting=halt)

    async def act(life: Life) -> None:
        await halt.entered.wait()
        assert refusals(life, QUICK, SLEEP, WAKE, RESTART) == [NotReadyError] * 4
        with pytest.raises(NotReadyError) as refused:
            life.supervisor.submit(QUICK)
        assert refused.value.remedy == "try again when the server is READY."
        halt.released.set()
        await life.until(State.READY)
        assert refusals(life, WAKE) == [ConflictError]
        life.supervisor.request_stop()
        await life.until(State.STOPPED)
        assert refusals(life, QUICK, RESTART) == [ConflictError] * 2

    lived(world, act)


def test_a_stop_cancels_a_probe_for_waiting_requests(tmp_path: Path) -> None:
    """They are served before the clean end, and the command fails with a reason."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        await life.until(State.READY)
        world.probing = halt = Halt()
        answer = life.supervisor.submit(QUICK)
        await halt.entered.wait()
        waiting = Client(life, "late")
        world.draining = until_answered = Halt()
        life.supervisor.request_stop()
        with pytest.raises(NotReadyError, match="shutting down"):
            await answer
        await waiting.task
        until_answered.released.set()

    life = lived(world, act)
    assert life.error is None
    assert life.states[-2:] == ["DRAINING", "STOPPED"]


def test_a_death_ends_a_command(tmp_path: Path) -> None:
    """The command fails with the death, and the next engine accepts commands."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        world.probing = halt = Halt()
        answer = life.supervisor.submit(QUICK)
        await halt.entered.wait()
        world.probing = _nothing
        world.engines[0].die(PLUG_PULLED)
        with pytest.raises(NotReadyError, match="a test pulled the plug"):
            await answer
        await life.until(State.READY)
        await life.supervisor.submit(QUICK)

    life = lived(world, in_service(act))
    assert counter_values(life.engine_deaths)["core_exit"] == 1


@pytest.mark.parametrize("is_woken", [False, True])
def test_a_death_in_a_proof_that_may_have_caused_it_costs_the_green_light(
    tmp_path: Path, *, is_woken: bool
) -> None:
    """The whole suite proves the next engine, as after a probe that failed."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        if is_woken:
            await life.supervisor.submit(SLEEP)
        world.probing = halt = Halt()
        answer = life.supervisor.submit(WAKE if is_woken else QUICK)
        await halt.entered.wait()
        world.probing = again = Halt()
        world.engines[0].die(RAISED)
        with pytest.raises(NotReadyError, match="ZeroDivisionError"):
            await answer
        await again.entered.wait()
        report = life.supervisor.status().probe
        assert report is not None
        assert not report.passed
        again.released.set()
        await life.until(State.READY)

    lived(world, in_service(act))
    assert world.suites == [None, "quick", None]
    assert "one request" not in world.events


async def _nothing() -> None:
    """Return at once."""


def test_a_sleeping_engine_can_be_restarted(tmp_path: Path) -> None:
    """The restart also wakes it."""

    async def act(life: Life) -> None:
        await life.supervisor.submit(SLEEP)
        await life.supervisor.submit(RESTART)
        await life.until(State.READY)

    life = lived(World(tmp_path), in_service(act))
    assert life.states[3:7] == ["SLEEPING", "RECOVERING", "RECOVERING", "PROBING"]


def test_a_stop_while_asleep_is_clean(tmp_path: Path) -> None:
    """There are no requests to wait for."""

    async def act(life: Life) -> None:
        await life.supervisor.submit(SLEEP)

    life = lived(World(tmp_path), in_service(act))
    assert life.error is None
    assert life.states[-3:] == ["SLEEPING", "DRAINING", "STOPPED"]


def test_a_stop_takes_the_place_of_a_restart(tmp_path: Path) -> None:
    """This engine serves the requests that waited for the next one, and the end is clean."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        await life.until(State.READY)
        llm = world.engines[0].llm
        begun = await begun_stream(world, life)
        answer = life.supervisor.submit(RESTART)
        await life.until(State.RECOVERING)
        late = Client(life, "late")
        world.draining = until_answered = Halt()
        life.supervisor.request_stop()
        with pytest.raises(NotReadyError, match="shutting down"):
            await answer
        llm.release()
        await asyncio.gather(begun.task, late.task)
        until_answered.released.set()

    life = lived(world, act)
    assert life.error is None
    assert len(world.engines) == 1
    assert sum(world.requests.lost.values()) == 0


def test_a_stop_takes_the_place_of_a_sleep_that_waits(tmp_path: Path) -> None:
    """The requests that it held are served before the clean end."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        await life.until(State.READY)
        llm = world.engines[0].llm
        llm.hold()
        running = Client(life, "long")
        await llm.until_received(1)
        answer = life.supervisor.submit(SLEEP)
        await asyncio.sleep(0)
        late = Client(life, "late")
        world.draining = until_answered = Halt()
        life.supervisor.request_stop()
        with pytest.raises(ConflictError, match="DRAINING"):
            await answer
        await llm.until_received(2)
        llm.release()
        await asyncio.gather(running.task, late.task)
        until_answered.released.set()

    life = lived(world, act, supervision=PATIENT)
    assert life.error is None
    assert sum(world.requests.lost.values()) == 0


def test_an_engine_that_is_proven_for_a_drain_is_not_restarted(tmp_path: Path) -> None:
    """The server shuts down, and a caller waits for a result."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        await life.until(State.READY)
        world.draining = until_answered = Halt()
        life.supervisor.request_stop()
        await until_answered.entered.wait()
        with pytest.raises(ConflictError, match="DRAINING"):
            life.supervisor.request_restart("too late")
        until_answered.released.set()

    lived(world, act)
    assert len(world.engines) == 1
