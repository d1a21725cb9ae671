"""What does a start do now? Listens to its progress on the way to the log or the terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from holdfast.records import ProbeStep
from holdfast.telemetry.progress import Progress

OnState = Callable[[str, str], None]
"""Receives a state of the server and its reason."""


@dataclass(frozen=True, slots=True)
class Activity:
    """A phase of a start, and the step and size if it is the probe."""

    phase: str
    since_unix_seconds: float
    step: str = ""
    detail: str = ""
    tokens: int = 0


class WatchedProgress:
    """A `Progress` that passes every event on, and keeps what is being done. Any thread may use it.

    `on_state` is called with each state that the server enters, and with each new reason.
    """

    def __init__(
        self, inner: Progress, on_state: OnState, clock: Callable[[], float] = time.time
    ) -> None:
        self._inner = inner
        self._on_state = on_state
        self._clock = clock
        self._lock = threading.Lock()
        self._activity: Activity | None = None

    @property
    def activity(self) -> Activity | None:
        """What is being done; None between two starts."""
        with self._lock:
            return self._activity

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._inner.__exit__(*details)

    def phase_started(self, name: str) -> None:
        """Keep the phase."""
        self._begin(Activity(name, self._clock()))
        self._inner.phase_started(name)

    def phase_finished(self, name: str, seconds: float) -> None:
        """Forget the phase."""
        with self._lock:
            if self._activity is not None and self._activity.phase == name:
                self._activity = None
        self._inner.phase_finished(name, seconds)

    def step_started(self, step: str, detail: str, tokens: int) -> None:
        """Keep the step of the probe."""
        self._begin(Activity("probe", self._clock(), step, detail, tokens))
        self._inner.step_started(step, detail, tokens)

    def step_finished(self, step: ProbeStep) -> None:
        """Pass it on: the next step, or the end of the probe, replaces this one."""
        self._inner.step_finished(step)

    def state_changed(self, state: str, reason: str) -> None:
        """Tell the state."""
        self._on_state(state, reason)
        self._inner.state_changed(state, reason)

    def ready(self, summary: str) -> None:
        """Pass it on."""
        self._inner.ready(summary)

    def _begin(self, activity: Activity) -> None:
        with self._lock:
            self._activity = activity
