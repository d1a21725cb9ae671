"""What happened in the last 24 hours? States, deaths, growths and proofs, bounded in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from holdfast.telemetry.logs import iso_time

HORIZON_SECONDS = 24 * 3600.0
MAX_EVENTS = 512
"""An engine may die every minute. Of too many events the oldest growths go first."""
MAX_TEXT_CHARACTERS = 500
"""A reason may quote an exception, which may quote anything."""

EventKind = Literal["state", "death", "growth", "probe", "verify"]
TimelineEvent = Mapping[str, Any]


class Timeline:
    """The newest events, by their numbers, which increase. Any thread may add and read.

    The last state before the oldest event is kept, so that the states have no gap at the beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Take a clock of Unix seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._number = 0
        self._events: dict[int, tuple[float, TimelineEvent]] = {}
        """With the times by which they leave, which increase as their numbers do."""
        self._first_state: tuple[int, TimelineEvent] | None = None
        self._last_state: int | None = None
        """The number of the state that lasts."""

    def add(self, kind: EventKind, *, generation: int, **facts: object) -> None:
        """Add an event of now; texts are shortened. A state that goes on only gets a new reason."""
        shortened = {name: _shortened(fact) for name, fact in facts.items()}
        with self._lock:
            at_seconds = self._clock()
            if kind == "state" and self._is_lasting(generation, shortened["state"]):
                self._replace_reason(shortened["reason"])
                return
            self._number += 1
            event = {
                "at": iso_time(at_seconds),
                "kind": kind,
                **shortened,
                "generation": generation,
            }
            self._events[self._number] = (at_seconds, MappingProxyType(event))
            if kind == "state":
                self._last_state = self._number
            self._drop_old(at_seconds)

    def events(self) -> Mapping[str, TimelineEvent]:
        """Return the events by their numbers, oldest first.

        An event that has not changed is the same object at each call.
        """
        with self._lock:
            self._drop_old(self._clock())
            first = dict([self._first_state]) if self._first_state is not None else {}
            newer = {number: event for number, (_, event) in self._events.items()}
        return {str(number): event for number, event in {**first, **newer}.items()}

    def _is_lasting(self, generation: int, state: object) -> bool:
        last = self._last_event()
        return last is not None and (last["state"], last["generation"]) == (state, generation)

    def _replace_reason(self, reason: object) -> None:
        last = self._last_event()
        if last is None or self._last_state is None or last["reason"] == reason:
            return
        changed = MappingProxyType({**last, "reason": reason})
        if self._last_state in self._events:
            at_seconds, _ = self._events[self._last_state]
            self._events[self._last_state] = (at_seconds, changed)
        else:
            self._first_state = (self._last_state, changed)

    def _last_event(self) -> TimelineEvent | None:
        """Return the state that lasts, even if it began before all other events."""
        if self._last_state in self._events:
            return self._events[self._last_state][1]
        return self._first_state[1] if self._first_state is not None else None

    def _drop_old(self, now_seconds: float) -> None:
        self._follow_clock_back(now_seconds)
        while self._events:
            number, (at_seconds, _) = next(iter(self._events.items()))
            if at_seconds > now_seconds - HORIZON_SECONDS:
                break
            self._drop(number)
        while len(self._events) > MAX_EVENTS:
            self._drop(self._least_needed())

    def _follow_clock_back(self, now_seconds: float) -> None:
        """Have events whose time is yet to come leave as if they were of now."""
        if any(at_seconds > now_seconds for at_seconds, _ in self._events.values()):
            self._events = {
                number: (min(at_seconds, now_seconds), event)
                for number, (at_seconds, event) in self._events.items()
            }

    def _least_needed(self) -> int:
        """Return the oldest growth, as there may be many, or else the oldest event."""
        growths = (n for n, (_, event) in self._events.items() if event["kind"] == "growth")
        return next(growths, next(iter(self._events)))

    def _drop(self, number: int) -> None:
        _, event = self._events.pop(number)
        if event["kind"] == "state":
            self._first_state = (number, event)


def _shortened(fact: object) -> object:
    if isinstance(fact, str) and len(fact) > MAX_TEXT_CHARACTERS:
        return f"{fact[: MAX_TEXT_CHARACTERS - 3]}..."
    return fact
