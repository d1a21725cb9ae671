"""The budget of restarts: the first is free of waiting, the last is the last, and time heals."""

from __future__ import annotations

from fakes import FakeClock
from holdfast.lifecycle.restarts import LONGEST_BACKOFF_SECONDS, RestartBudget


def test_the_first_restart_waits_for_nothing() -> None:
    """Clients are waiting; each further one waits twice as long."""
    budget = RestartBudget(4, 100, FakeClock())
    assert [budget.take() for _ in range(5)] == [0, 1, 2, 4, None]


def test_no_back_off_is_without_end() -> None:
    """It stops to grow."""
    budget = RestartBudget(20, 100, FakeClock())
    assert [budget.take() for _ in range(20)][-1] == LONGEST_BACKOFF_SECONDS


def test_restarts_are_forgotten_after_the_window() -> None:
    """Only those within it count."""
    clock = FakeClock()
    budget = RestartBudget(2, 100, clock)
    budget.take()
    clock.now_seconds += 60
    budget.take()
    assert budget.left == 0
    clock.now_seconds += 40
    assert budget.left == 1
    assert budget.take() == 1


def test_a_budget_of_none_allows_none() -> None:
    """`--max-engine-restarts 0`."""
    assert RestartBudget(0, 100, FakeClock()).take() is None
