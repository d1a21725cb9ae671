"""Which calls wait for an engine, which it has, and since when it has owed one an output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.engine.request import Call


class EngineLoad:
    """The calls that wait and those that the engine has. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._owed = 0
        self.held = 0
        """How many wait for an engine."""
        self.in_engine = 0
        """How many the engine has, those that it owes nothing included."""
        self.busy_since_seconds: float | None = None
        """Since when the engine has owed somebody an output; None while it owes nobody one."""

    async def woken(self, call: Call) -> None:
        """Return when somebody wakes the call."""
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
        """While entered, the engine has the call."""
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
        """The engine owes the call an output, unless it waits for more of the prompt itself."""
        if not (call.is_streamed or call.is_owed):
            call.is_owed = True
            self._owed += 1
            if self._owed == 1:
                self.busy_since_seconds = self._clock()

    def rests(self, call: Call) -> None:
        """The engine owes the call nothing for now."""
        if call.is_owed:
            call.is_owed = False
            self._owed -= 1
            if not self._owed:
                self.busy_since_seconds = None


def wake(call: Call) -> None:
    """Let the call look again whether it may run."""
    if call.waiter is not None and not call.waiter.done():
        call.waiter.set_result(None)
