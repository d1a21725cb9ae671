"""A place in the engine that says what became of it."""

from __future__ import annotations

import asyncio


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
