"""The page shows what the log shows."""

from __future__ import annotations

import logging
from typing import Self

from holdfast.records import ProbeStep
from holdfast.status_page.activity import Activity, WatchedProgress
from holdfast.telemetry.progress import LogProgress


class Noted(LogProgress):
    """Notes which events reached it."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("test"))
        self.events: list[str] = []

    def __enter__(self) -> Self:
        self.events.append("entered")
        return self

    def __exit__(self, *_: object) -> None:
        self.events.append("left")

    def phase_started(self, name: str) -> None:
        self.events.append(f"{name} started")

    def phase_finished(self, name: str, seconds: float) -> None:
        self.events.append(f"{name} took {seconds}")

    def step_started(self, step: str, detail: str, tokens: int) -> None:
        self.events.append(f"{step} {detail} {tokens}")

    def step_finished(self, step: ProbeStep) -> None:
        self.events.append(f"{step.name} {step.outcome}")

    def state_changed(self, state: str, reason: str) -> None:
        self.events.append(f"{state}: {reason}")

    def ready(self, summary: str) -> None:
        self.events.append(summary)


def test_every_event_is_passed_on() -> None:
    """In its order, and a state is told to the page as well."""
    noted, states = Noted(), []
    progress = WatchedProgress(noted, lambda *state: states.append(state))
    with progress:
        progress.phase_started("load")
        progress.phase_finished("load", 2.0)
        progress.step_started("full_context", "1 of 2", 512)
        progress.step_finished(ProbeStep("full_context", "passed", 1.0))
        progress.state_changed("READY", "512 tokens proven")
        progress.ready("served")
    assert noted.events == [
        "entered",
        "load started",
        "load took 2.0",
        "full_context 1 of 2 512",
        "full_context passed",
        "READY: 512 tokens proven",
        "served",
        "left",
    ]
    assert states == [("READY", "512 tokens proven")]


def test_the_activity_is_that_of_now() -> None:
    """A phase, and within the probe its step, until the phase is over."""
    progress = WatchedProgress(Noted(), lambda *_: None, clock=lambda: 5.0)
    seen = [progress.activity]
    progress.phase_started("load")
    seen.append(progress.activity)
    progress.phase_started("probe")
    progress.phase_finished("load", 1.0)
    progress.step_started("full_context", "", 512)
    seen.append(progress.activity)
    progress.phase_finished("probe", 2.0)
    seen.append(progress.activity)
    assert seen == [
        None,
        Activity("load", 5.0),
        Activity("probe", 5.0, "full_context", "", 512),
        None,
    ]
