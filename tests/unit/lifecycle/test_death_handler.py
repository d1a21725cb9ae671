"""The budget of restarts: explained deaths are refunded, and accusing ones cause brown-outs."""

from __future__ import annotations

import pytest

from holdfast.engine.blame import Verdict
from holdfast.errors import EngineLostError
from holdfast.lifecycle.death_handler import (
    MAX_BACKOFF_SECONDS,
    MAX_BROWNOUT_SECONDS,
    MIN_BROWNOUT_SECONDS,
    RestartBudget,
)
from holdfast.records import Death
from stub_engine import FakeClock

KILLED = Death("core_exit", "EngineCore was killed")
RAISED = Death("worker_exception", "rank 0: ZeroDivisionError", blames_requests=True)
NOBODY = Verdict()
UNSOLVED = Verdict(has_suspects=True)
ALONE = Verdict(1, has_suspects=True)
CHARGED = Verdict(1, is_charged=True, has_suspects=True)
TRIED = Verdict(2, is_charged=True, has_suspects=True)


def wait(budget: RestartBudget, verdict: Verdict = NOBODY) -> float:
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
    with pytest.raises(EngineLostError):
        wait(budget, CHARGED)


def test_a_death_that_a_key_answers_for_is_given_back() -> None:
    """Any number of them may come: other keys do not wait for what one key is charged."""
    budget = RestartBudget(2, 100, FakeClock())
    assert [wait(budget, CHARGED) for _ in range(10)] == [0] * 10
    assert budget.left == 2


def test_a_trial_gives_back_two_deaths() -> None:
    """It explains the death before it, and its own."""
    budget = RestartBudget(2, 100, FakeClock())
    wait(budget, UNSOLVED)
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
    wait(budget)
    wait(budget)
    with pytest.raises(EngineLostError):
        wait(budget)


def test_a_neighbour_that_takes_the_memory_does_not_end_the_server() -> None:
    """Neither an engine nor the hardware is to blame, and a new process would meet it, too."""
    budget, death = RestartBudget(2, 10_000, FakeClock()), Death("host_memory", "1 MiB is left")
    waits = []
    for _ in range(6):
        budget.count(death, NOBODY)
        waits.append(budget.wait_seconds(death))
    assert waits[:3] == [0, 1, MIN_BROWNOUT_SECONDS]
    assert waits[-1] == MAX_BROWNOUT_SECONDS
    assert [wait(budget), wait(budget)] == [MAX_BROWNOUT_SECONDS] * 2


def test_a_restart_on_request_is_free() -> None:
    """A requested death says nothing about the engine."""
    budget = RestartBudget(1, 100, FakeClock())
    for _ in range(3):
        budget.count(Death("requested", "an operator"), NOBODY)
    assert budget.left == 1
