"""The table of states: every state can be reached, and STOPPED is final."""

from __future__ import annotations

import pytest

from holdfast.lifecycle.states import (
    HEALTHY,
    HOPELESS,
    SERVING,
    TRANSITIONS,
    Generation,
    GenerationOutcome,
    State,
    StateMachine,
    is_allowed,
)
from holdfast.records import Death

ENDING = {State.DRAINING, State.FAILED, State.STOPPED}


def reachable(source: State) -> set[State]:
    """Return every state that can be reached from `source`, including itself."""
    found, open_ends = {source}, [source]
    while open_ends:
        new = TRANSITIONS[open_ends.pop()] - found
        found |= new
        open_ends += new
    return found


def test_every_state_stands_in_the_table() -> None:
    """Every state has a row."""
    assert set(TRANSITIONS) == set(State)


def test_every_state_is_reached_from_the_start() -> None:
    """STARTING leads everywhere."""
    assert reachable(State.STARTING) == set(State)


@pytest.mark.parametrize("state", State)
def test_every_state_can_end(state: State) -> None:
    """STOPPED can be reached from everywhere."""
    assert State.STOPPED in reachable(state)


def test_stopped_is_the_end() -> None:
    """Nothing follows STOPPED."""
    assert TRANSITIONS[State.STOPPED] == frozenset()


@pytest.mark.parametrize("state", State)
def test_no_state_follows_itself(state: State) -> None:
    """Entering a state is an event; it cannot happen within the state."""
    assert not is_allowed(state, state)


@pytest.mark.parametrize("state", [s for s in State if s not in ENDING])
def test_a_stop_is_possible_while_it_lives(state: State) -> None:
    """Every state of a generations server leads to DRAINING, and may fail."""
    assert is_allowed(state, State.DRAINING)
    assert is_allowed(state, State.FAILED)


@pytest.mark.parametrize("state", State)
def test_nothing_is_ready_unproven(state: State) -> None:
    """READY follows only PROBING."""
    assert is_allowed(state, State.READY) is (state is State.PROBING)


def test_what_is_derived_from_the_state() -> None:
    """A serving state is healthy, and a hopeless state is neither."""
    assert SERVING <= HEALTHY
    assert not HOPELESS & HEALTHY


def test_a_new_reason_does_not_begin_the_state_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has lasted since it was entered, whatever it was for."""
    monkeypatch.setattr("holdfast.lifecycle.states.time.time", iter(range(100)).__next__)
    machine = StateMachine(lambda _state, _reason: None)
    machine.move(State.PROBING, "running the suite")
    since = machine.since_unix_seconds
    machine.enter(State.PROBING, "running it again")
    assert (machine.reason, machine.since_unix_seconds) == ("running it again", since)
    machine.move(State.READY, "proven")
    assert machine.since_unix_seconds > since


def test_a_generation_keeps_what_it_makes_up_for() -> None:
    """A learned restart of the first is a start; that of a later one is still a recovery."""
    died, learned = GenerationOutcome(Death("core_exit", "gone")), GenerationOutcome()
    generations = [Generation()]
    for outcome in (learned, died, learned):
        generations.append(generations[-1].after(outcome))
    assert [one.number for one in generations] == [1, 2, 3, 4]
    assert [one.replaces for one in generations] == [None, None, died.death, died.death]
    assert [one.starts_in for one in generations] == [
        "STARTING",
        "STARTING",
        "RECOVERING",
        "RECOVERING",
    ]


@pytest.mark.parametrize("generation", [Generation(), Generation(2, Death("core_exit", "gone"))])
def test_a_generation_goes_back_to_where_it_starts(generation: Generation) -> None:
    """The table allows it from PROBING, since the outcome is unknown before."""
    assert is_allowed(State.PROBING, generation.starts_in)
