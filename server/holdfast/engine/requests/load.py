"""Counts the requests that wait for an engine, and those that it has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.engine.requests.request import EngineRequest


class EngineLoad:
    """Counts waiting requests and those that the engine has. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pending = 0
        self.held = 0
        """How many requests wait for an engine."""
        self.in_engine = 0
        """How many requests the engine has, including those whose callers are reading."""
        self.busy_since_seconds: float | None = None
        """Since when some request has been waiting for an output; None while none is."""
        self.given = 0
        """How many requests engines were given, each once, not counting those of the probe."""

    async def wait(self, request: EngineRequest) -> None:
        """Return when `wake` is called for this request."""
        request.waiter = asyncio.get_running_loop().create_future()
        self.held += 1
        try:
            with request.context.waiting():
                await request.waiter
        finally:
            self.held -= 1
            request.waiter = None

    @contextmanager
    def track(self, request: EngineRequest) -> Iterator[None]:
        """Count the request as in the engine while entered."""
        request.is_in_engine = True
        self.in_engine += 1
        is_new = not (request.has_been_given or request.is_later_step)
        self.given += is_new and not request.context.is_probe
        request.has_been_given = True
        self.mark_pending(request)
        try:
            yield
        finally:
            self.mark_delivered(request)
            request.is_in_engine = False
            self.in_engine -= 1

    def mark_pending(self, request: EngineRequest) -> None:
        """Record that an output is due, unless the engine waits for more of the prompt itself."""
        if not (request.is_streamed or request.is_pending):
            request.is_pending = True
            self._pending += 1
            if self._pending == 1:
                self.busy_since_seconds = self._clock()

    def mark_delivered(self, request: EngineRequest) -> None:
        """Record that no output is due until the caller asks for the next."""
        if request.is_pending:
            request.is_pending = False
            self._pending -= 1
            if not self._pending:
                self.busy_since_seconds = None
