"""What becomes of one HTTP request: known to the front door and to the calls it makes.

vLLM's OpenAI layer stands between the two and passes nothing on, so the record travels with the
context of the task.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol


class HeldCapacity(Protocol):
    """What a request holds while the engine works for it."""

    def release(self) -> None:
        """Let the next have it. Once is enough."""

    async def acquire(self) -> None:
        """Return when there is one again; at once if it has one.

        Raises:
            NotReadyError: the gate was closed for too long. OverloadedError: too many wait.
        """


class Session(Protocol):
    """What stays open between its calls, and holds a place for each of them alone."""

    def call(self) -> AbstractAsyncContextManager[None]:
        """While entered, it holds a place, for which it waits first.

        Raises:
            NotReadyError, OverloadedError: there is none, see `Place.take`.
        """


@dataclass(slots=True)
class RequestContext:
    """One request. The front door makes it; whoever learns something of it writes it down."""

    request_id: str = ""
    """As the client named it, or as we did; the answer carries it."""
    key: str = ""
    """The name of the key that the request came with, never the key; empty where none is needed."""
    is_probe: bool = False
    """The probe's own: it goes to an engine that is not ready, and is never sent again."""
    may_be_retried: bool | None = None
    """Whether the client may send it again; None where the status code says enough."""
    is_broken: bool = False
    """Whether its answer ends in the middle."""
    error: str = ""
    """Why it was refused or lost, in one word; empty while nobody knows of a reason."""
    route: str = ""
    """The path of our route that answers it, with its parameters left open; empty if none does."""
    engine_scope: Mapping[str, Any] | None = None
    """What vLLM's application was given, whose router leaves its route there."""
    received_seconds: float | None = None
    """When it was there whole, by `time.monotonic()`; None while it was not."""
    entered_seconds: float | None = None
    """When vLLM's application got it, by `time.monotonic()`; None while it did not."""
    engine_request_id: str = ""
    """The name that vLLM gave its first call, which vLLM's own log lines carry."""
    generation: int = 0
    """The last generation of the engine that had it; 0 if none."""
    replays: int = 0
    """How often a call of it was given to another generation."""
    prompt_tokens: int = 0
    """Tokens of the prompts that the engine has taken in for it."""
    output_tokens: int = 0
    """Tokens that the engine has made for it."""
    waited_seconds: float = 0.0
    """How long it waited for an engine; calls that wait side by side count once."""
    waiting_calls: int = 0
    """How many calls of it wait for an engine now."""
    waiting_since_seconds: float = 0.0
    """Since when any of them waits."""
    sequences: int = 0
    """How many sequences of it the engine has, or is to have when it is their turn."""
    engine_is_done: Callable[[], None] = lambda: None
    """Called when the engine has no sequence of it any more, however slowly its client reads."""

    capacity: HeldCapacity | None = None
    """None where none is counted."""
    session: Session | None = None
    """None where it is a single request."""
    absences: int = 0
    """How many steps of it wait for something else than the engine."""

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """While entered, it waits for something else than the engine, and others have its place.

        With its last such step it waits for a place again, unless the step failed.

        Raises:
            NotReadyError, OverloadedError: there is none, see `Place.take`.
        """
        self.absences += 1
        if self.capacity is not None:
            self.capacity.release()
        try:
            yield
        finally:
            self.absences -= 1
        if self.capacity is not None and not self.absences:
            with self.waiting():
                await self.capacity.acquire()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While entered, a call of it waits."""
        if not self.waiting_calls:
            self.waiting_since_seconds = time.monotonic()
        self.waiting_calls += 1
        try:
            yield
        finally:
            self.waiting_calls -= 1
            if not self.waiting_calls:
                self.waited_seconds += time.monotonic() - self.waiting_since_seconds


REQUEST: ContextVar[RequestContext | None] = ContextVar("holdfast_request", default=None)
"""The request that the running task serves; None outside of any. The request log sets it."""


def current_request() -> RequestContext:
    """The record of the request that the running task serves; outside of any, one nobody reads."""
    return REQUEST.get() or RequestContext()


FREQUENT_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"}
)
