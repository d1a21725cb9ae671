"""What state is the server in, why and since when? Only the supervisor changes it."""

from __future__ import annotations

import asyncio
import time

from holdfast.lifecycle.states import Generation, State, is_allowed
from holdfast.telemetry.progress import Progress


class StateMachine:
    """Holds the state, allows only `states.TRANSITIONS`, and wakes those that wait for a change."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._moved = asyncio.Event()
        self.state = State.STARTING
        self.reason = "importing vLLM"
        """The reason for the state, in our words, which anyone may read."""
        self.detail = ""
        """What the engine or an operator said about it: for operators, since it may name paths."""
        self.since_unix_seconds = time.time()
        self.generation = Generation()
        """The generation of the engine that the state is about."""
        self.has_been_ready = False

    @property
    def is_recovering(self) -> bool:
        """Whether an engine that was lost, or served, is being replaced or proven again."""
        is_back_soon = self.has_been_ready or self.generation.replaces is not None
        return self.state is State.RECOVERING or (self.state is State.PROBING and is_back_soon)

    async def until_moved(self) -> None:
        """Return when the state has changed."""
        await self._moved.wait()

    def enter(self, target: State, reason: str, detail: str = "") -> None:
        """Follow the engine into a state, or set a new reason for the present one.

        While the server drains, the engine may end and start, and the state stays DRAINING.
        """
        if target is self.state:
            self._set(target, reason, detail)
        elif self.state is not State.DRAINING:
            self.move(target, reason, detail)

    def move(self, target: State, reason: str, detail: str = "") -> None:
        """Change the state.

        Raises:
            RuntimeError: the table has no such move.
        """
        if not is_allowed(self.state, target):
            raise RuntimeError(f"no transition from {self.state} to {target}")
        self._set(target, reason, detail)

    def _set(self, state: State, reason: str, detail: str) -> None:
        self.state, self.since_unix_seconds = state, time.time()
        self.reason, self.detail = reason, detail
        self.has_been_ready = self.has_been_ready or state is State.READY
        self._progress.state_changed(state, f"{reason}: {detail}" if detail else reason)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
