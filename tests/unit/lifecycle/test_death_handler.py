"""The budget of restarts: explained deaths are refunded, and accusing ones cause brown-outs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from holdfast.engine.suspects.blame import BlameVerdict
from holdfast.errors import EngineLostError, QuarantinedError, SuspectedError
from holdfast.labels import DeathCause
from holdfast.lifecycle.death_handler import (
    MAX_BACKOFF_SECONDS,
    MAX_BROWNOUT_SECONDS,
    MIN_BROWNOUT_SECONDS,
    RestartBudget,
)
from holdfast.records import Death
from holdfast.request_context import RequestContext
from replay_harness import TRIAL_SECONDS, ReplayHarness, answered, run_scene
from scripted_llm import AnsweredError, ScriptedLLM
from stub_engine import FakeClock

KILLED = Death("core_exit", "EngineCore was killed")
EXITED = Death("worker_exit", "the worker ended with exit code 1")
OUT_OF_MEMORY = Death("out_of_memory", "the kernel killed the worker for lack of memory")
RAISED = Death("worker_exception", "rank 0: ZeroDivisionError", blames_requests=True)
NOBODY = BlameVerdict()
UNSOLVED = BlameVerdict(has_suspects=True)
ALONE = BlameVerdict(1, has_suspects=True)
CHARGED = BlameVerdict(1, is_charged=True, has_suspects=True)
TRIED = BlameVerdict(2, is_charged=True, has_suspects=True)


def wait(budget: RestartBudget, verdict: BlameVerdict = NOBODY) -> float:
    """Return the wait after one more death."""
    death = RAISED if verdict.has_suspects else KILLED
    budget.count(death, verdict)
    return budget.wait_seconds(death)


def test_the_first_restart_waits_for_nothing() -> None:
    """The first restart is immediate, each further wait doubles, and the budget ends."""
    budget = RestartBudget(4, 100, FakeClock())
    assert [wait(budget) for _ in range(4)] == [0, 1, 2, 4]
    with pytest.raises(EngineLostError):
        wait(budget)


def test_no_back_off_is_without_end() -> None:
    """The wait stops growing."""
    budget = RestartBudget(20, 100, FakeClock())
    assert [wait(budget) for _ in range(20)][-1] == MAX_BACKOFF_SECONDS


def test_restarts_are_forgotten_after_the_window() -> None:
    """Only deaths within the window count."""
    clock = FakeClock()
    budget = RestartBudget(2, 100, clock)
    wait(budget)
    clock.now_seconds += 60
    wait(budget)
    assert budget.left == 0
    clock.now_seconds += 40
    assert budget.left == 1
    assert wait(budget) == 1


def test_a_budget_of_none_allows_none() -> None:
    """`--max-engine-restarts 0` leaves every restart to what supervises the process."""
    budget = RestartBudget(0, 100, FakeClock())
    with pytest.raises(EngineLostError) as caught:
        wait(budget, CHARGED)
    assert "restarts within" not in caught.value.cause
    assert "--max-engine-restarts 0 allows no restart." in caught.value.remedy


def test_a_death_that_a_key_answers_for_is_given_back() -> None:
    """Any number of them may come: other keys do not wait for what one key is charged."""
    budget = RestartBudget(2, 100, FakeClock())
    assert [wait(budget, CHARGED) for _ in range(10)] == [0] * 10
    assert budget.left == 2


def test_a_trial_gives_back_two_deaths() -> None:
    """It explains the death before it, and its own."""
    budget = RestartBudget(2, 100, FakeClock())
    wait(budget)
    assert budget.left == 1
    wait(budget, TRIED)
    assert budget.left == 2


def test_requests_alone_do_not_end_the_server() -> None:
    """Beyond the budget each start waits for minutes, explained or not, if no key is charged."""
    budget = RestartBudget(2, 10_000, FakeClock())
    waits = [wait(budget, verdict) for verdict in (ALONE, UNSOLVED, ALONE, ALONE, UNSOLVED, ALONE)]
    assert waits[:3] == [0, 1, MIN_BROWNOUT_SECONDS]
    assert waits[-1] == MAX_BROWNOUT_SECONDS


def test_requests_do_not_spend_the_budget_of_the_hardware() -> None:
    """A server in a brown-out still has all restarts for deaths that accuse no request."""
    budget = RestartBudget(2, 10_000, FakeClock())
    for _ in range(3):
        wait(budget, UNSOLVED)
    assert budget.left == 2
    wait(budget)
    wait(budget)
    assert budget.left == 0
    with pytest.raises(EngineLostError):
        wait(budget)


def test_no_request_explains_a_start_that_failed() -> None:
    """It failed between two deaths that one request explains; so do the starts after it."""
    budget, failed = RestartBudget(2, 10_000, FakeClock()), Death("start_failure", "no memory")
    wait(budget, UNSOLVED)
    budget.count(failed, NOBODY)
    wait(budget, BlameVerdict(2, has_suspects=True))
    assert budget.left == 1
    budget.count(failed, NOBODY)
    budget.count(failed, NOBODY)
    with pytest.raises(EngineLostError):
        budget.wait_seconds(failed)


@pytest.mark.parametrize("cause", ["host_memory", "node_lost"])
def test_what_a_neighbour_does_does_not_end_the_server(cause: DeathCause) -> None:
    """Neither the engine nor the hardware here is to blame, and a new process would meet it too."""
    budget, death = RestartBudget(2, 10_000, FakeClock()), Death(cause, "1 MiB is left")
    waits = []
    for _ in range(6):
        budget.count(death, NOBODY)
        waits.append(budget.wait_seconds(death))
    assert waits[:3] == [0, 1, MIN_BROWNOUT_SECONDS]
    assert waits[-1] == MAX_BROWNOUT_SECONDS
    assert budget.left == 2
    assert [wait(budget), wait(budget)] == [MAX_BROWNOUT_SECONDS] * 2


def test_a_restart_on_request_is_free() -> None:
    """A requested death says nothing about the engine."""
    budget = RestartBudget(1, 100, FakeClock())
    for _ in range(3):
        budget.count(Death("requested", "an operator"), NOBODY)
    assert budget.left == 1


async def supervise(
    harness: ReplayHarness, budget: RestartBudget, death: Death, poison: str
) -> None:
    """Run one engine after the other, each of which dies of the killers in this way."""
    while True:
        llm = harness.start(ScriptedLLM(poison=poison), is_open=False)
        if await harness.requests.try_suspects(TRIAL_SECONDS):
            harness.requests.open()
            await llm.died.wait()
        budget.count(death, harness.bury(death))
        budget.wait_seconds(death)


@asynccontextmanager
async def supervised(
    harness: ReplayHarness, death: Death, poison: str = "killer"
) -> AsyncIterator[RestartBudget]:
    """While entered, engines run; afterwards no death counts against the budget any more."""
    budget = RestartBudget(3, 1800, FakeClock())
    async with asyncio.TaskGroup() as tasks:
        supervising = tasks.create_task(supervise(harness, budget, death, poison))
        yield budget
        supervising.cancel()
    assert budget.left == 3


@pytest.mark.parametrize("death", [EXITED, OUT_OF_MEMORY])
@pytest.mark.parametrize("keys", [("", ""), ("a", "b")])
def test_a_request_that_ends_engines_from_outside_does_not_end_the_server(
    death: Death, keys: tuple[str, str]
) -> None:
    """It is sent once, beside an innocent one, which is answered."""

    async def scene(harness: ReplayHarness) -> None:
        killer, innocent = (
            harness.call(name, context=RequestContext(key=key))
            for name, key in zip(("killer", "innocent"), keys, strict=True)
        )
        async with supervised(harness, death):
            with answered(SuspectedError):
                await killer
            await innocent

    run_scene(scene)


@pytest.mark.parametrize("death", [EXITED, OUT_OF_MEMORY])
def test_what_ends_engines_from_outside_again_and_again_is_quarantined(death: Death) -> None:
    """After two deaths for each of the first two times, however often it is sent."""
    errors = []

    async def scene(harness: ReplayHarness) -> None:
        async with supervised(harness, death):
            for number in range(6):
                with pytest.raises(AnsweredError) as told:
                    await harness.call(f"killer#{number}")
                errors.append(type(told.value.error))

    harness = run_scene(scene)
    assert errors == [SuspectedError, *[QuarantinedError] * 5]
    assert harness.generation == 5


@pytest.mark.parametrize("death", [EXITED, OUT_OF_MEMORY])
def test_different_requests_that_end_engines_from_outside_do_not_end_the_server(
    death: Death,
) -> None:
    """Each is found at its second death; without keys, nobody is charged for either."""

    async def scene(harness: ReplayHarness) -> None:
        names = [f"killer{number}" for number in range(6)]
        async with supervised(harness, death, poison=" ".join(names)):
            for name in names:
                with answered(SuspectedError):
                    await harness.call(name)

    assert run_scene(scene).generation > 2 * 6


@pytest.mark.parametrize("death", [EXITED, OUT_OF_MEMORY])
def test_what_ends_engines_after_its_client_has_left_is_quarantined(death: Death) -> None:
    """The server waits longer and longer, and does not end."""

    async def scene(harness: ReplayHarness) -> None:
        budget = RestartBudget(3, 1800, FakeClock())
        for number in range(4):
            llm = harness.start()
            llm.hold()
            call = harness.call(f"killer#{number}")
            await llm.until_received(1)
            call.cancel()
            await asyncio.wait({call})
            budget.count(death, harness.bury(death))
            budget.wait_seconds(death)
        with answered(QuarantinedError):
            await harness.call("killer#5")

    run_scene(scene)


def test_clients_that_leave_do_not_spend_the_budget_of_the_hardware() -> None:
    """Each request was another one, so none is found; but one of them may have ended the engine."""

    async def scene(harness: ReplayHarness) -> None:
        budget = RestartBudget(3, 1800, FakeClock())
        waits = []
        for number in range(5):
            llm = harness.start()
            llm.hold()
            call = harness.call(f"killer {number}")
            await llm.until_received(1)
            call.cancel()
            await asyncio.wait({call})
            budget.count(OUT_OF_MEMORY, harness.bury(OUT_OF_MEMORY))
            waits.append(budget.wait_seconds(OUT_OF_MEMORY))
        assert waits[-1] >= MIN_BROWNOUT_SECONDS

    run_scene(scene)
