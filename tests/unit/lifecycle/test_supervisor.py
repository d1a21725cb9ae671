"""The life of a server with a scripted engine and prober: states, restarts, ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from counter_values import counter_values
from holdfast.engine.baseline import BaselineWatch
from holdfast.errors import (
    ConflictError,
    EngineLostError,
    EngineStartError,
    HoldfastError,
    ProbeFailedError,
    UsageError,
)
from holdfast.labels import DeathCause
from holdfast.lifecycle import supervisor
from holdfast.lifecycle.death_handler import MIN_BROWNOUT_SECONDS
from holdfast.lifecycle.proof import MAX_PASSES
from holdfast.lifecycle.states import TRANSITIONS, State, StateMachine
from holdfast.records import (
    Death,
)
from holdfast.request_context import REQUEST, RequestContext
from holdfast.settings import ProbeSettings, SupervisionSettings, WorkspaceSettings
from holdfast.verify.baseline import Baseline, RecordedSequence
from scripted_life import (
    FAILED,
    GREW,
    LIMITED,
    PASSED,
    PLUG_PULLED,
    RAISED,
    REFUSING,
    SHORT,
    Client,
    Halt,
    Life,
    Moves,
    NodeLostOnce,
    World,
    _ask,
    _die,
    _revived,
    at_once,
    fail_to_load,
    fail_to_start,
    lived,
    stopped_in,
    unplugged_in,
)
from scripted_llm import AnsweredError, Output
from stub_engine import FakeClock


def test_a_proven_engine_is_ready_until_the_stop(tmp_path: Path) -> None:
    """It goes from STARTING to STOPPED, and each event happens once, in order."""
    world = World(tmp_path)
    life = lived(world, stopped_in(State.READY))
    assert life.error is None
    assert life.states == ["STARTING", "PROBING", "READY", "DRAINING", "STOPPED"]
    assert world.events[:5] == ["engine 1 runs", "mounted", "probe counted", "ready", "drained"]
    assert sorted(world.events[5:]) == ["counters of 1 ranks kept", "engine 1 stopped"]


def test_the_status_of_each_state(tmp_path: Path) -> None:
    """The status has the engine from PROBING on and the proof from READY on, and keeps both."""
    probing = Halt()
    world = World(tmp_path, probing=probing)
    seen = {}

    async def look(life: Life) -> None:
        seen["STARTING"] = life.supervisor.status()
        await probing.entered.wait()
        seen["PROBING"] = life.supervisor.status()
        probing.released.set()
        await life.until(State.READY)
        seen["READY"] = life.supervisor.status()
        life.supervisor.request_stop()

    life = lived(world, look)
    seen["STOPPED"] = life.supervisor.status()
    assert {name: status.state for name, status in seen.items()} == {name: name for name in seen}
    assert [status.engine.generation for status in seen.values()] == [0, 1, 1, 1]
    assert [status.engine.starts for status in seen.values()] == [0, 1, 1, 1]
    assert [len(status.ranks) for status in seen.values()] == [0, 1, 1, 1]
    assert [status.has_engine for status in seen.values()] == [False, True, True, False]
    assert [status.has_been_ready for status in seen.values()] == [False, False, True, True]
    assert [status.probe for status in seen.values()] == [None, None, PASSED, PASSED]
    assert {"import", "processes", "probe"} <= set(seen["READY"].start_phases)
    assert seen["READY"].engine.last_start_seconds is not None
    assert "1000 tokens proven" in seen["READY"].reason


@pytest.mark.parametrize("stuck", ["loading", "starting", "mounting", "probing"])
def test_a_stop_before_ready_does_not_drain(tmp_path: Path, stuck: str) -> None:
    """The start is cancelled in any stage, since no request was admitted."""
    halt = Halt()
    world = World(tmp_path)
    setattr(world, stuck, halt)

    async def stop(life: Life) -> None:
        await halt.entered.wait()
        life.supervisor.request_stop()

    life = lived(world, stop)
    assert life.error is None
    assert life.states[-2:] == ["DRAINING", "STOPPED"]
    assert "READY" not in life.states
    assert "drained" not in world.events
    assert world.events.count("engine 1 runs") == world.events.count("engine 1 stopped")


def test_an_engine_that_dies_before_the_proof_is_replaced(tmp_path: Path) -> None:
    """Its adapters are loaded then, and what was asked of it has no answer."""
    mounting = Halt()
    world = World(tmp_path, mounting=mounting)

    async def kill(life: Life) -> None:
        await mounting.entered.wait()
        world.engines[0].die(PLUG_PULLED)
        await life.until(State.RECOVERING)
        mounting.released.set()
        await stopped_in(State.READY)(life)

    life = lived(world, kill)
    assert life.error is None
    assert life.states[:4] == ["STARTING", "RECOVERING", "PROBING", "READY"]
    assert world.deaths == [PLUG_PULLED]


@pytest.mark.parametrize("is_known", [False, True])
def test_an_adapter_that_does_not_load_because_the_engine_died_ends_no_server(
    tmp_path: Path, *, is_known: bool
) -> None:
    """Whichever comes first, the error of the call or the death."""
    world = World(tmp_path)

    async def fail_as_the_engine_dies() -> None:
        if len(world.engines) == 1:
            world.engines[0].die(PLUG_PULLED)
            while is_known and not world.engines[0].is_given_up:  # noqa: ASYNC110 - as below
                await asyncio.sleep(0)
            raise EngineLostError("the engine died before it had the adapter.")

    world.mounting = fail_as_the_engine_dies
    life = lived(world, stopped_in(State.READY))
    assert life.error is None
    assert world.deaths == [PLUG_PULLED]


def test_asking_twice_is_asking_once(tmp_path: Path) -> None:
    """A second request to stop changes nothing."""

    async def ask_twice(life: Life) -> None:
        await life.until(State.READY)
        life.supervisor.request_stop()
        life.supervisor.request_stop()

    assert lived(World(tmp_path), ask_twice).states[-2:] == ["DRAINING", "STOPPED"]


def test_an_engine_that_dies_while_draining_is_not_a_failure(tmp_path: Path) -> None:
    """The stop was requested, so the end is clean, and the death is not an error."""
    draining = Halt()
    world = World(tmp_path, draining=draining)

    async def kill(life: Life) -> None:
        await life.until(State.READY)
        life.supervisor.request_stop()
        await draining.entered.wait()
        world.engines[0].die(PLUG_PULLED)
        await asyncio.sleep(0)
        draining.released.set()

    life = lived(world, kill)
    assert life.error is None
    assert life.states[-1] == "STOPPED"


def test_a_spent_budget_is_an_engine_lost(tmp_path: Path) -> None:
    """With no restart left, the server is FAILED with the cause (exit 5)."""
    world = World(tmp_path)

    async def kill(life: Life) -> None:
        await life.until(State.READY)
        world.engines[0].die(Death("out_of_memory", "rank 0: out of memory"))

    life = lived(world, kill, supervision=SupervisionSettings(max_engine_restarts=0))
    assert isinstance(life.error, EngineLostError)
    assert "rank 0: out of memory" in life.error.cause
    assert "--max-engine-restarts" in life.error.remedy
    assert life.states[-1] == "FAILED"
    assert "out of memory" in life.supervisor.status().engine.last_exit
    assert world.events.count("counters of 1 ranks kept") == 1


@pytest.mark.parametrize(
    ("stage", "failing", "error"),
    [("loading", fail_to_load, UsageError), ("starting", fail_to_start, EngineStartError)],
)
def test_a_failed_start_is_told_as_it_is(
    tmp_path: Path,
    stage: str,
    failing: Callable[[], Awaitable[None]],
    error: type[HoldfastError],
) -> None:
    """The server is FAILED with the host's error, and does not try again."""
    world = World(tmp_path)
    setattr(world, stage, failing)
    life = lived(world)
    assert type(life.error) is error
    assert life.states == ["STARTING", "FAILED"]
    assert life.supervisor.reason == error.outline
    assert life.supervisor.status().detail in life.error.cause
    assert world.events == []


@pytest.mark.parametrize("restarts", [1, 0])
def test_what_an_engine_said_is_not_the_reason_that_anyone_reads(
    tmp_path: Path, restarts: int
) -> None:
    """The reason is the cause in our words; the detail has the exception, with paths and pids."""
    said = "Worker_TP0 pid 4242:\n  File '/opt/models/secret.py'"
    seen: list[tuple[str, str]] = []
    world = World(tmp_path)

    async def kill(life: Life) -> None:
        await life.until(State.READY)
        world.engines[0].die(Death("worker_exception", said))
        await life.until(State.RECOVERING if restarts else State.FAILED)
        seen.append((life.supervisor.reason, life.supervisor.status().detail))
        life.supervisor.request_stop()

    lived(world, kill, supervision=SupervisionSettings(max_engine_restarts=restarts))
    ((reason, detail),) = seen
    assert reason in {"the engine died: worker_exception", EngineLostError.outline}
    assert said in detail


@pytest.mark.parametrize("cause", ["worker_exception", "host_memory"])
def test_what_an_engine_said_is_not_the_reason_for_a_brown_out(
    tmp_path: Path, cause: DeathCause
) -> None:
    """The reason names the wait in our words; the detail has the exception, paths and pids."""
    said = "Worker_TP0 pid 4242:\n  File '/opt/models/secret.py'"
    seen: list[tuple[str, str]] = []
    world = World(tmp_path)

    async def act(life: Life) -> None:
        for number in range(2):
            await life.until(State.READY)
            world.engines[-1].llm.hold()
            asking = asyncio.create_task(_ask(world.requests, f"killer {number}"))
            await world.engines[-1].llm.until_received(1)
            world.engines[-1].die(Death(cause, said, blames_requests=cause == "worker_exception"))
            await life.until(State.RECOVERING)
        while "next start is in 60 s" not in life.supervisor.reason:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        seen.append((life.supervisor.reason, life.supervisor.status().detail))
        life.supervisor.request_stop()
        await asyncio.wait({asking})

    lived(world, act, supervision=SupervisionSettings(max_engine_restarts=1))
    ((reason, detail),) = seen
    assert "secret" not in reason
    assert said in detail


def test_a_failed_probe_names_step_and_cause(tmp_path: Path) -> None:
    """The server is FAILED, the engine is gone, and its counters are kept."""
    world = World(tmp_path, reports=(FAILED,))
    life = lived(world)
    assert isinstance(life.error, ProbeFailedError)
    assert "full_context" in life.error.cause
    assert "attention.py:10 needs 7 MB and holds 5" in life.error.cause
    assert "--workspace-reserve" in life.error.remedy
    assert life.states == ["STARTING", "PROBING", "FAILED"]
    assert world.events.count("engine 1 stopped") == 1
    assert life.supervisor.status().probe == FAILED


def test_a_refusal_in_the_probe_is_learned_from(tmp_path: Path) -> None:
    """The engine is started again with what the first one needed, and is proven."""
    world = World(tmp_path, reports=(FAILED, PASSED), ranks=(REFUSING,))
    life = lived(world, stopped_in(State.READY))
    assert life.error is None
    assert life.states[:5] == ["STARTING", "PROBING", "STARTING", "PROBING", "READY"]
    assert world.specs[0].learned == ()
    assert world.specs[1].learned
    assert [spec.generation for spec in world.specs] == [1, 2]
    assert world.events.count("counters of 1 ranks kept") == 2
    assert life.supervisor.status().engine.starts == 2


def test_a_second_refusal_is_a_failure(tmp_path: Path) -> None:
    """There is one learned restart, not a loop."""
    world = World(tmp_path, reports=(FAILED,), ranks=(REFUSING,))
    life = lived(world)
    assert isinstance(life.error, ProbeFailedError)
    assert len(world.specs) == 2


def test_growth_without_a_restart_is_probed_again(tmp_path: Path) -> None:
    """With `never` the same engine passes the suite again, and is READY without growth."""
    world = World(tmp_path, reports=(GREW, PASSED))
    workspace = WorkspaceSettings(learned_restart="never")
    life = lived(world, stopped_in(State.READY), workspace=workspace)
    assert life.states == ["STARTING", "PROBING", "READY", "DRAINING", "STOPPED"]
    assert len(world.specs) == 1
    assert world.events.count("probe counted") == 2


def test_growth_without_end_is_a_failure(tmp_path: Path) -> None:
    """After this many passes with growth nothing is proven."""
    world = World(tmp_path, reports=(GREW,))
    life = lived(world, workspace=WorkspaceSettings(learned_restart="never"))
    assert isinstance(life.error, ProbeFailedError)
    assert f"pass {MAX_PASSES}" in life.error.cause
    assert world.events.count("probe counted") == MAX_PASSES


def test_deny_is_in_force_before_ready(tmp_path: Path) -> None:
    """Growth is allowed for the probe until the proof."""
    world = World(tmp_path)
    lived(world, stopped_in(State.READY), workspace=WorkspaceSettings(growth="deny"))
    assert world.specs[0].growth == "alongside"
    assert world.engines[0].policies == ["deny"]


def test_with_deny_a_proof_that_took_growth_does_not_hold_for_the_next_engine(
    tmp_path: Path,
) -> None:
    """No engine starts with what it needs reserved, so the next one has to grow as well."""
    world = World(tmp_path, reports=(GREW, GREW, PASSED), ranks=(SHORT,))

    async def start() -> None:
        if world.specs[-1].learned:
            await fail_to_start()

    async def act(life: Life) -> None:
        await life.until(State.READY)
        world.engines[-1].die(PLUG_PULLED)
        await life.until(State.RECOVERING)
        await stopped_in(State.READY)(life)

    world.starting = start
    life = lived(world, act, workspace=WorkspaceSettings(growth="deny"))
    assert life.error is None
    assert "one request" not in world.events
    assert [engine.policies for engine in world.engines] == [[], ["deny"], ["deny"]]


def test_an_engine_that_dies_of_its_policy_is_replaced(tmp_path: Path) -> None:
    """Its proof is valid, and its death is reported like any other."""
    halt = Halt()
    world = World(tmp_path, probing=halt)

    async def act(life: Life) -> None:
        await halt.entered.wait()
        world.engines[0].policy_death = PLUG_PULLED
        halt.released.set()
        await life.until(State.RECOVERING)
        await stopped_in(State.READY)(life)

    life = lived(world, act, workspace=WorkspaceSettings(growth="deny"))
    assert life.error is None
    assert counter_values(life.engine_deaths)["core_exit"] == 1


def test_a_limited_proof_is_ready_and_says_so(tmp_path: Path) -> None:
    """The reason names the smaller size."""
    reasons = []

    async def look(life: Life) -> None:
        await life.until(State.READY)
        reasons.append(life.supervisor.reason)
        life.supervisor.request_stop()

    lived(World(tmp_path, reports=(LIMITED,)), look)
    assert "500 tokens" in reasons[0]
    assert "limited" in reasons[0]


def test_a_limited_proof_is_a_failure_where_a_whole_one_is_required(tmp_path: Path) -> None:
    """With `--probe-require-full` it ends the server (exit 4), with the step and the reason."""
    world = World(tmp_path, reports=(LIMITED,))
    life = lived(world, probe=ProbeSettings(requires_full=True))
    assert isinstance(life.error, ProbeFailedError)
    assert "500 tokens (context_sweep: no time was left)" in life.error.cause
    assert "--probe-require-full" in life.error.remedy


@pytest.mark.parametrize("source", State)
def test_no_move_is_made_that_is_not_in_the_table(source: State) -> None:
    """Such a move would be our bug, so it raises."""
    for target in set(State) - TRANSITIONS[source]:
        state_machine = StateMachine(Moves().state_changed)
        state_machine.state = source
        with pytest.raises(RuntimeError, match=f"no transition from {source} to {target}"):
            state_machine.move(target, "for fun")
        assert state_machine.state is source


def test_a_dead_engine_is_replaced(tmp_path: Path) -> None:
    """The same process recovers; the death is counted and reported."""
    world = World(tmp_path)
    life = _revived(world, PLUG_PULLED)
    assert life.error is None
    assert life.states[3:6] == ["RECOVERING", "PROBING", "READY"]
    assert counter_values(life.engine_deaths)["core_exit"] == 1
    assert world.deaths == [PLUG_PULLED]
    report = life.supervisor.status().engine
    assert (report.generation, report.restarts, report.starts) == (2, 1, 2)
    assert "a test pulled the plug" in report.last_exit


def test_a_call_that_comes_after_the_death_goes_to_the_next_engine(tmp_path: Path) -> None:
    """It waits while the dead engine stops, and is not a suspect."""
    stopping = Halt()
    world = World(tmp_path, stopping=stopping)
    answers: list[list[Output]] = []

    async def act(life: Life) -> None:
        await _die(life, RAISED)
        await stopping.entered.wait()
        asking = asyncio.create_task(_ask(world.requests, "late"))
        while not world.requests.held:  # noqa: ASYNC110 - the loop is all there is
            await asyncio.sleep(0)
        stopping.released.set()
        await life.until(State.READY)
        answers.append(await asking)
        life.supervisor.request_stop()

    life = lived(world, act)
    assert life.error is None
    assert [len(answer) for answer in answers] == [1]
    assert [engine.llm.received for engine in world.engines] == [[], ["late"]]


def test_a_death_that_the_trials_explain_delays_no_start(tmp_path: Path) -> None:
    """The key of requests that cannot be tried is charged once the next engine is up."""
    world = World(tmp_path)
    delays: list[float] = []

    async def act(life: Life) -> None:
        for number in range(2):
            await life.until(State.READY)
            llm = world.engines[number].llm
            llm.hold()
            REQUEST.set(RequestContext(key="good"))
            good = Client(life, f"good#{number}").task
            REQUEST.set(RequestContext(key="bad"))
            calls = [Client(life, name, is_consumed=True).task for name in "pq"]
            await llm.until_received(3)
            world.engines[number].die(RAISED)
            await asyncio.wait(calls)
            assert all(isinstance(call.exception(), AnsweredError) for call in calls)
            await life.until(State.RECOVERING)
            await good
        await life.until(State.READY)
        delays.append(life.supervisor._deaths._budget.wait_seconds(RAISED))
        life.supervisor.request_stop()

    assert lived(world, act).error is None
    assert delays == [0.0]


def test_calls_to_a_dead_engine_end_at_once(tmp_path: Path) -> None:
    """It ends before the engine is stopped, even if no process has ended, as in a stall."""
    stopping = Halt()
    world = World(tmp_path, stopping=stopping)
    seen: list[bool] = []

    async def act(life: Life) -> None:
        await life.until(State.READY)
        seen.append(world.engines[0].is_given_up)
        world.engines[0].die(PLUG_PULLED)
        await stopping.entered.wait()
        seen.append(world.engines[0].is_given_up)
        stopping.released.set()
        await stopped_in(State.READY)(life)

    lived(world, act)
    assert seen == [False, True]


def test_a_proof_that_stands_is_not_given_again(tmp_path: Path) -> None:
    """One request is enough, and the report of the suite is kept."""
    world = World(tmp_path)
    life = _revived(world, PLUG_PULLED)
    assert world.events.count("one request") == 1
    assert world.events.count("probe counted") == 2
    assert life.supervisor.status().probe == PASSED


def test_a_refused_workspace_takes_the_whole_proof_again(tmp_path: Path) -> None:
    """The whole suite runs with the size that was learned from the refusal."""
    world = World(tmp_path)
    _revived(world, Death("workspace_rejection", "rank 0", blames_requests=True))
    assert "one request" not in world.events
    assert world.specs[1].learned


def test_a_first_proof_that_a_signal_ended_is_tried_again(tmp_path: Path) -> None:
    """The proof did not cause it, so the server recovers and runs the whole suite."""
    probing = Halt()
    world = World(tmp_path, reports=(FAILED, PASSED), probing=probing)

    life = lived(world, unplugged_in(probing))
    assert life.error is None
    assert life.states[:5] == ["STARTING", "PROBING", "RECOVERING", "PROBING", "READY"]
    assert "one request" not in world.events


def test_a_first_proof_that_ends_the_engine_is_a_failure(tmp_path: Path) -> None:
    """Another start would end the same way: exit 4, with step and cause; the death counts."""
    probing = Halt()
    world = World(tmp_path, reports=(FAILED,), probing=probing)

    async def act(_life: Life) -> None:
        await probing.entered.wait()
        world.engines[0].die(RAISED)
        probing.released.set()

    life = lived(world, act)
    assert isinstance(life.error, ProbeFailedError)
    assert counter_values(life.engine_deaths)["worker_exception"] == 1
    assert len(world.specs) == 1


def test_a_start_that_fails_while_recovering_is_tried_again(tmp_path: Path) -> None:
    """The failed start is counted, and takes one more from the budget."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        await life.until(State.READY)
        world.starting = fail_once
        world.engines[-1].die(PLUG_PULLED)
        await life.until(State.RECOVERING)
        await life.until(State.READY)
        life.supervisor.request_stop()

    async def fail_once() -> None:
        world.starting = at_once
        await fail_to_start()

    life = lived(world, act)
    assert life.error is None
    assert counter_values(life.engine_deaths)["start_failure"] == 1
    assert [death.cause for death in world.deaths] == ["core_exit", "start_failure"]
    assert life.supervisor.restarts_left == SupervisionSettings().max_engine_restarts - 2


def test_a_budget_is_spent_in_the_end(tmp_path: Path) -> None:
    """One more death than restarts ends the server (exit 5)."""
    world = World(tmp_path)

    async def act(life: Life) -> None:
        await _die(life, PLUG_PULLED)
        await _die(life, PLUG_PULLED)

    life = lived(world, act, supervision=SupervisionSettings(max_engine_restarts=1))
    assert isinstance(life.error, EngineLostError)
    assert len(world.specs) == 2


def test_requests_alone_do_not_end_the_server(tmp_path: Path) -> None:
    """Beyond the budget it recovers after minutes, says so, and still stops on request."""
    world = World(tmp_path)
    seen: list[float] = []

    async def act(life: Life) -> None:
        for number in range(2):
            await life.until(State.READY)
            world.engines[-1].llm.hold()
            killer = asyncio.create_task(_ask(world.requests, f"killer {number}"))
            await world.engines[-1].llm.until_received(1)
            world.engines[-1].die(RAISED)
            with pytest.raises(AnsweredError):
                await killer
            await life.until(State.RECOVERING)
        while "next start is in 60 s" not in life.supervisor.reason:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        seen.append(life.supervisor.eta_seconds or 0.0)
        life.supervisor.request_stop()

    life = lived(world, act, supervision=SupervisionSettings(max_engine_restarts=1))
    assert life.error is None
    assert State.FAILED not in life.states
    assert seen[0] > MIN_BROWNOUT_SECONDS / 2


def test_what_a_canary_found_ends_with_its_engine(tmp_path: Path) -> None:
    """The next one has had none, so the restart that the runbook asks for ends the alert."""
    sequence = RecordedSequence((1, 2), (), (((2, -0.5),),))
    compared = BaselineWatch(Baseline(sequences=(sequence,)))

    async def act(life: Life) -> None:
        await life.until(State.READY)
        compared.judge("probe", 0.0)
        compared.judge("canary", 1.0)
        await _die(life, PLUG_PULLED)
        await life.until(State.READY)
        life.supervisor.request_stop()

    lived(World(tmp_path), act, baseline=compared)
    assert compared.last().keys() == {"probe"}


def test_a_first_recovery_is_forecast_without_the_time_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for what the next start does not do."""
    monkeypatch.setattr(supervisor, "first_guess", lambda _seconds, _phases: 777.0)

    async def act(life: Life) -> None:
        await life.until(State.READY)
        await _die(life, PLUG_PULLED)
        assert life.supervisor.eta_seconds == pytest.approx(777.0, abs=60.0)
        await life.until(State.READY)
        life.supervisor.request_stop()

    lived(World(tmp_path), act)


def test_a_restart_on_request_costs_no_budget(tmp_path: Path) -> None:
    """The death is counted as requested."""

    async def act(life: Life) -> None:
        await life.until(State.READY)
        life.supervisor.request_restart("new weights")
        await life.until(State.RECOVERING)
        await life.until(State.READY)
        life.supervisor.request_stop()

    life = lived(World(tmp_path), act)
    assert counter_values(life.engine_deaths)["requested"] == 1
    assert life.supervisor.restarts_left == SupervisionSettings().max_engine_restarts
    with pytest.raises(ConflictError, match="STOPPED"):
        life.supervisor.request_restart("nothing runs any more")


def test_an_engine_that_dies_while_draining_comes_back_for_what_is_in_flight(
    tmp_path: Path,
) -> None:
    """The state stays DRAINING, and the end is clean."""
    draining = Halt()
    world = World(tmp_path, draining=draining)

    async def act(life: Life) -> None:
        await life.until(State.READY)
        life.supervisor.request_stop()
        await draining.entered.wait()
        world.engines[0].die(PLUG_PULLED)
        while len(world.specs) < 2:  # noqa: ASYNC110 - the loop is all there is
            await asyncio.sleep(0)
        draining.released.set()

    life = lived(world, act)
    assert life.error is None
    assert life.states == ["STARTING", "PROBING", "READY", "DRAINING", "STOPPED"]


def test_requests_lost_while_draining_are_not_a_clean_end(tmp_path: Path) -> None:
    """The budget is spent with requests in flight (exit 5)."""
    draining = Halt()
    world = World(tmp_path, draining=draining)

    async def act(life: Life) -> None:
        await life.until(State.READY)
        life.supervisor.request_stop()
        await draining.entered.wait()
        world.engines[0].die(PLUG_PULLED)

    life = lived(world, act, supervision=SupervisionSettings(max_engine_restarts=0))
    assert isinstance(life.error, EngineLostError)


def test_a_recovery_promises_what_the_last_start_took(tmp_path: Path) -> None:
    """The time is known while recovering, and is None in READY."""
    starting = Halt()
    world = World(tmp_path)
    seen = []

    async def act(life: Life) -> None:
        await life.until(State.READY)
        seen.append(life.supervisor.eta_seconds)
        world.starting = starting
        world.engines[0].die(PLUG_PULLED)
        await starting.entered.wait()
        seen.append(life.supervisor.eta_seconds)
        assert life.supervisor.is_recovering
        life.supervisor.request_stop()

    lived(world, act)
    assert seen[0] is None
    assert seen[1] is not None


def test_a_learned_restart_while_recovering_is_part_of_it(tmp_path: Path) -> None:
    """A signal ended the first proof and the second grew: the state is RECOVERING until READY."""
    probing = Halt()
    world = World(tmp_path, reports=(FAILED, GREW, PASSED), probing=probing)

    async def start() -> None:
        if len(world.specs) > 1:
            world.ranks = (SHORT,)

    world.starting = start
    life = lived(world, unplugged_in(probing))
    assert life.error is None
    assert len(world.specs) == 3
    assert life.states.count(State.STARTING) == 1


def test_a_reservation_with_which_nothing_starts_is_given_up(tmp_path: Path) -> None:
    """If the learned restart fails, the next start is without it, and READY follows."""
    world = World(tmp_path, reports=(GREW, GREW, PASSED), ranks=(SHORT,))

    async def start() -> None:
        if world.specs[-1].learned:
            await fail_to_start()

    world.starting = start
    life = lived(world, stopped_in(State.READY))
    assert life.error is None
    assert [bool(spec.learned) for spec in world.specs] == [False, True, False]


def test_a_reservation_with_which_nothing_starts_is_not_tried_for_ever(
    tmp_path: Path,
) -> None:
    """It fails for the next server, too, and the one after that grows and becomes ready at once."""
    test_a_reservation_with_which_nothing_starts_is_given_up(tmp_path)

    async def start() -> None:
        if following.specs[-1].learned:
            await fail_to_start()

    following = World(tmp_path, reports=(GREW, PASSED), ranks=(SHORT,), starting=start)
    lived(following, stopped_in(State.READY))
    assert [bool(spec.learned) for spec in following.specs] == [True, False]
    world = World(tmp_path, reports=(GREW, PASSED), ranks=(SHORT,))
    life = lived(world, stopped_in(State.READY))
    assert life.error is None
    assert [bool(spec.learned) for spec in world.specs] == [False]


def test_a_node_that_is_lost_while_the_engine_starts_is_waited_for(tmp_path: Path) -> None:
    """The server does not end, whereas it does when an engine cannot start."""
    life = lived(World(tmp_path, starting=NodeLostOnce()), stopped_in(State.READY))
    assert life.error is None
    assert life.states[:4] == ["STARTING", "RECOVERING", "PROBING", "READY"]
    assert counter_values(life.engine_deaths)["node_lost"] == 1


def test_a_start_that_waits_for_other_nodes_says_so(tmp_path: Path) -> None:
    """The state is that of a start."""
    world = World(tmp_path, missing=["waiting for other nodes: 0 of 1 joined"])
    life = lived(world, stopped_in(State.READY))
    assert life.states[:4] == ["STARTING", "STARTING", "PROBING", "READY"]
    assert life.reasons[0] == "waiting for other nodes: 0 of 1 joined"


def test_a_wait_for_other_nodes_is_not_remembered_as_part_of_a_start(tmp_path: Path) -> None:
    """They can join at any time, and the next start has them sooner or later."""
    clock = FakeClock()

    class LateNodes(World):
        async def until_startable(self, on_wait: Callable[[str], None]) -> None:
            await super().until_startable(on_wait)
            clock.now_seconds += 3600

    lived(LateNodes(tmp_path), stopped_in(State.READY), clock=clock)
    (times,) = (tmp_path / "learned").glob("times-*.json")
    assert json.loads(times.read_text())["start"] == [0]
