"""The last 24 hours stay in memory, and no more."""

from __future__ import annotations

from typing import Any

from holdfast.status_page.timeline import (
    HORIZON_SECONDS,
    MAX_EVENTS,
    MAX_TEXT_CHARACTERS,
    Timeline,
)
from stub_engine import FakeClock


def a_timeline() -> tuple[Timeline, FakeClock]:
    """An empty one, and its clock."""
    clock = FakeClock()
    return Timeline(clock), clock


def enter(timeline: Timeline, state: str, reason: str = "because", generation: int = 1) -> None:
    """Add a state."""
    timeline.add("state", generation=generation, state=state, reason=reason)


def told(timeline: Timeline, name: str) -> list[Any]:
    """One fact of each event, oldest first."""
    return [event.get(name) for event in timeline.events().values()]


def test_events_have_a_time_a_kind_and_their_facts() -> None:
    """Under numbers that increase."""
    timeline, clock = a_timeline()
    enter(timeline, "STARTING")
    clock.now_seconds += 1.5
    timeline.add("death", generation=1, cause="stall", reason="no step")
    assert list(timeline.events()) == ["1", "2"]
    assert timeline.events()["2"] == {
        "at": "1970-01-01T00:16:41.500+00:00",
        "kind": "death",
        "cause": "stall",
        "reason": "no step",
        "generation": 1,
    }


def test_a_new_reason_for_a_state_is_no_new_state() -> None:
    """The band of the state goes on; the next generation has a band of its own."""
    timeline, _ = a_timeline()
    enter(timeline, "STARTING", "loading vLLM and the model")
    timeline.add("growth", generation=1)
    enter(timeline, "STARTING", "waiting for a node")
    assert told(timeline, "reason") == ["waiting for a node", None]
    enter(timeline, "STARTING", "waiting for a node", generation=2)
    assert told(timeline, "generation") == [1, 1, 2]


def test_an_event_that_does_not_change_is_the_same_object() -> None:
    """A viewer compares hundreds of them twice a second."""
    timeline, _ = a_timeline()
    enter(timeline, "READY")
    assert timeline.events()["1"] is timeline.events()["1"]


def test_old_events_go_and_the_state_in_which_they_fell_stays() -> None:
    """The first band reaches to the left edge."""
    timeline, clock = a_timeline()
    enter(timeline, "STARTING")
    enter(timeline, "READY")
    timeline.add("probe", generation=1)
    clock.now_seconds += HORIZON_SECONDS
    assert told(timeline, "state") == ["READY"]
    enter(timeline, "READY", "another reason")
    assert told(timeline, "reason") == ["another reason"]
    enter(timeline, "RECOVERING")
    assert told(timeline, "state") == ["READY", "RECOVERING"]


def test_events_leave_even_if_the_clock_was_set_back() -> None:
    """Those whose time is yet to come too, and they hold back none that came after them."""
    timeline, clock = a_timeline()
    enter(timeline, "STARTING")
    now_seconds = clock.now_seconds
    clock.now_seconds += 365 * HORIZON_SECONDS
    timeline.add("death", generation=1)
    clock.now_seconds = now_seconds + 10.0
    enter(timeline, "READY")
    clock.now_seconds += HORIZON_SECONDS / 2
    timeline.add("probe", generation=1)
    assert told(timeline, "kind") == ["state", "death", "state", "probe"]
    clock.now_seconds += HORIZON_SECONDS / 2
    assert told(timeline, "kind") == ["state", "probe"]
    clock.now_seconds += HORIZON_SECONDS / 2
    assert told(timeline, "state") == ["READY"]


def test_only_so_many_events_are_kept() -> None:
    """An engine may die every minute."""
    timeline, _ = a_timeline()
    enter(timeline, "READY")
    for _ in range(3 * MAX_EVENTS):
        timeline.add("death", generation=1)
    events = timeline.events()
    assert len(events) == MAX_EVENTS + 1
    assert next(iter(events.values()))["state"] == "READY"
    assert list(events)[-1] == str(3 * MAX_EVENTS + 1)


def test_growths_go_before_other_events() -> None:
    """What died, and when, is asked first."""
    timeline, _ = a_timeline()
    timeline.add("death", generation=1)
    for _ in range(2 * MAX_EVENTS):
        timeline.add("growth", generation=1)
    kinds = told(timeline, "kind")
    assert (len(kinds), kinds[0], kinds.count("death")) == (MAX_EVENTS, "death", 1)


def test_long_texts_are_shortened() -> None:
    """A reason quotes an exception, which may quote a prompt's worth of text."""
    timeline, _ = a_timeline()
    timeline.add("death", generation=1, cause="unknown", reason="x" * 100_000)
    (reason,) = told(timeline, "reason")
    assert len(reason) == MAX_TEXT_CHARACTERS
    assert reason.endswith("...")
