"""Capacity in the engine that records what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ScriptedCapacity:
    """A `HeldCapacity` that can be acquired again, unless there is an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.said: list[str] = []
        self.given = asyncio.Event()
        self._error = error

    def release(self) -> None:
        """Record the call."""
        self.said.append("given")
        self.given.set()

    async def acquire(self) -> None:
        """Record the call, or fail."""
        if self._error is not None:
            raise self._error
        self.said.append("taken")


class ScriptedSession:
    """A `Session` that has capacity for each call."""

    def __init__(self) -> None:
        self.said: list[str] = []

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Record the call."""
        self.said.append("called")
        try:
            yield
        finally:
            self.said.append("done")
