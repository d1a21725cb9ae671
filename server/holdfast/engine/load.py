"""Tracks which calls wait, which the engine has, and since when it has owed an output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.engine.request import Call


class EngineLoad:
    """Tracks waiting calls and those that the engine has. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._owed = 0
        self.held = 0
        """How many calls wait for an engine."""
        self.in_engine = 0
        """How many calls the engine has, including those that it owes nothing."""
        self.busy_since_seconds: float | None = None
        """Since when the engine has owed an output to some caller; None while it owes none."""

    async def woken(self, call: Call) -> None:
        """Return when `wake` is called for this call."""
        call.waiter = asyncio.get_running_loop().create_future()
        self.held += 1
        try:
            with call.context.waiting():
                await call.waiter
        finally:
            self.held -= 1
            call.waiter = None

    @contextmanager
    def of(self, call: Call) -> Iterator[None]:
        """Count the call as in the engine while entered."""
        call.is_in_engine = True
        self.in_engine += 1
        self.works(call)
        try:
            yield
        finally:
            self.rests(call)
            call.is_in_engine = False
            self.in_engine -= 1

    def works(self, call: Call) -> None:
        """Record that the engine owes an output, unless it waits for more of the prompt itself."""
        if not (call.is_streamed or call.is_owed):
            call.is_owed = True
            self._owed += 1
            if self._owed == 1:
                self.busy_since_seconds = self._clock()

    def rests(self, call: Call) -> None:
        """Record that the engine owes the call nothing for now."""
        if call.is_owed:
            call.is_owed = False
            self._owed -= 1
            if not self._owed:
                self.busy_since_seconds = None


def wake(call: Call) -> None:
    """Let the call look again whether it may run."""
    if call.waiter is not None and not call.waiter.done():
        call.waiter.set_result(None)
