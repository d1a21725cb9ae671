"""Places in the engine that say what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class APlace:
    """`tracked.Place`, of which there is always another."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.given = asyncio.Event()

    def give(self) -> None:
        """Write it down."""
        self.said.append("given")
        self.given.set()

    async def take(self) -> None:
        """Write it down."""
        self.said.append("taken")


class ASession:
    """`tracked.Session`, for each of whose calls there is a place."""

    def __init__(self) -> None:
        self.said: list[str] = []

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Write it down."""
        self.said.append("called")
        try:
            yield
        finally:
            self.said.append("done")
