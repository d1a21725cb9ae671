"""Where does the server stand? The state, why and since when; the supervisor alone moves it."""

from __future__ import annotations

import asyncio
import time

from holdfast.lifecycle.states import Generation, State, is_allowed
from holdfast.telemetry.progress import Progress


class StateMachine:
    """Moves through `states.TRANSITIONS`, and tells who waits for it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._moved = asyncio.Event()
        self.state = State.STARTING
        self.reason = "importing vLLM"
        """Why it stands there, in our words: for anyone who asks."""
        self.detail = ""
        """What the engine or an operator said of it, which may name paths: not for everyone."""
        self.since_unix_seconds = time.time()
        self.generation = Generation()
        """The engine of which all this is said."""
        self.has_been_ready = False

    @property
    def is_recovering(self) -> bool:
        """Whether an engine that was lost, or that served, is replaced or proven again."""
        is_back_soon = self.has_been_ready or self.generation.replaces is not None
        return self.state is State.RECOVERING or (self.state is State.PROBING and is_back_soon)

    async def until_moved(self) -> None:
        """Return when the state has changed."""
        await self._moved.wait()

    def enter(self, target: State, reason: str, detail: str = "") -> None:
        """Move as the engine's life goes; while draining it may come and go, and the state stays.

        An engine that fails to come back is still being recovered, for another reason.
        """
        if target is self.state:
            self._set(target, reason, detail)
        elif self.state is not State.DRAINING:
            self.move(target, reason, detail)

    def move(self, target: State, reason: str, detail: str = "") -> None:
        """Enter another state.

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
