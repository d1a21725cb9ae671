"""What the rest of Holdfast may ask of an engine. `async_llm` answers it with vLLM; tests with a fake."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from holdfast.records import EngineFacts, RankStats


class Engine(Protocol):
    """One generation of a running engine."""

    @property
    def generation(self) -> int:
        """Counts from 1."""

    @property
    def facts(self) -> EngineFacts:
        """Sizes and capabilities, constant for this generation."""

    def ranks(self) -> tuple[RankStats, ...]:
        """What every rank last wrote. Never waits for the engine; works after its death."""

    def scheduling_held(self) -> AbstractAsyncContextManager[None]:
        """While entered, requests queue up and no step is scheduled; leaving schedules them together."""

    async def queued_requests(self) -> int:
        """Requests that the engine has accepted and not finished."""

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache."""

    async def until_dead(self) -> str:
        """Return, within a second of the death of any of its processes, the cause of it."""
