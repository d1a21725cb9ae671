"""The context of one HTTP request, shared by the API layers and the engine requests it makes.

vLLM's OpenAI layer is between the two and passes nothing on, so the record travels in a context
variable of the task. `api` implements the protocols for `engine`, which must not import it.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.errors import HoldfastError, NotReadyError, OverloadedError

REQUEST_ID_HEADER = "x-request-id"

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
"""It excludes spaces, so that a client cannot forge a field of our log line."""
_OWN_ID_BYTES = 16


def request_id_from(values: Iterable[bytes]) -> str:
    """Return the id of a request from the values of its `X-Request-Id`: the first, or a new one."""
    first = next(iter(values), b"")
    return first.decode() if _REQUEST_ID.fullmatch(first) else secrets.token_hex(_OWN_ID_BYTES)


class HeldCapacity(Protocol):
    """The capacity that a request holds while the engine works for it."""

    def release(self) -> None:
        """Give the capacity to the next request. A second call has no effect."""

    async def acquire(self) -> None:
        """Return when the request has capacity again, at once if it still has it.

        Raises:
            NotReadyError: the gate was closed for too long.
            OverloadedError: too many wait, or the key has been suspended.
        """


class Session(Protocol):
    """A connection that stays open between its calls, and holds capacity only during a call."""

    def call(self) -> AbstractAsyncContextManager[None]:
        """Wait for capacity, and hold it while entered.

        Raises:
            NotReadyError, OverloadedError: there is none, see `HeldCapacity.acquire`; or the key
                has used up its day, see `Usage.refusal`.
        """


class Usage(Protocol):
    """Counts for the key of a request what engines do for it."""

    def refusal(self) -> OverloadedError | None:
        """Return and count the refusal of a key that has used up its day; None if it has not."""

    def request_began(self) -> None:
        """Count the request, when an engine is given it. A further call has no effect."""

    def count_tokens(self, prompt_tokens: int, output_tokens: int) -> None:
        """Count tokens that an engine has read and generated."""


@dataclass(slots=True)
class RequestContext:
    """One request. The request log creates it; each layer records what it learns."""

    request_id: str = ""
    """The client's id of the request, or ours; the response carries it."""
    key: str = ""
    """The name of the request's key, never the key itself; empty if no key is needed."""
    number: int = 0
    """A later request of this server has a larger number."""
    is_probe: bool = False
    """Whether it is the probe's own: it may use an unready engine, and is never replayed."""
    may_be_retried: bool | None = None
    """Whether the client may retry it; None where the status code says enough."""
    retry_after_seconds: int | None = None
    """After which time it may be sent again; None if that is unknown."""
    is_broken: bool = False
    """Whether its response breaks off."""
    error: str = ""
    """Why it was refused or lost, in one word; empty while no reason is known."""
    route: str = ""
    """The path template of our route that answers it; empty if none of ours does."""
    engine_scope: Mapping[str, Any] | None = None
    """The scope that vLLM's application got; vLLM's router stores its route there."""
    received_seconds: float | None = None
    """When it was complete, by `time.monotonic()`; None before that."""
    entered_seconds: float | None = None
    """When vLLM's application got it, by `time.monotonic()`; None before that."""
    engine_request_id: str = ""
    """vLLM's id of its first engine request, which vLLM's own log lines contain."""
    generation: int = 0
    """The latest generation of the engine that got it; 0 if none."""
    first_generation: int = 0
    """The first generation of the engine that got it; 0 if none."""
    replays: int = 0
    """How often one of its engine requests was replayed on another generation."""
    continued_at_tokens: tuple[int, ...] = ()
    """After how many tokens of an answer another generation went on with it, each time."""
    prompt_tokens: int = 0
    """Tokens of its prompts that the engine has processed."""
    output_tokens: int = 0
    """Tokens that the engine has generated for it."""
    is_cut: bool = False
    """Whether a finished answer to it was ended by a limit or a stop string, not by the model."""
    waited_seconds: float = 0.0
    """How long it waited for an engine; concurrent waits count once."""
    waiting_calls: int = 0
    """How many of its engine requests wait for an engine now."""
    waiting_since_seconds: float = 0.0
    """When the first of those began to wait."""
    prompts: int = 1
    """How many prompts it brought; each of them gets all its parameters."""
    prompt_logprobs: dict[str, int] = field(default_factory=dict)
    """How many log-probs of prompts it wants, by the engine request of each prompt."""
    sequences: int = 0
    """How many of its sequences the engine has, or will get when it is their turn."""
    beam_searches: int = 0
    """How many beam searches it runs; each makes an engine request for each beam and token."""
    begins_search: bool = False
    """Whether its next engine request is the first of a beam search."""
    engine_is_done: Callable[[], None] = lambda: None
    """Called when the engine has none of its sequences any more, even if the client still reads."""

    capacity: HeldCapacity | None = None
    """None if the capacity of the request is not counted."""
    session: Session | None = None
    """None for a single request."""
    usage: Usage | None = None
    """None if nothing is counted for its key, or it has none."""
    media: Any = None
    """What its media may take, see `engine.media.budgets`; None before the first of them."""
    absences: int = 0
    """How many of its steps wait for something other than the engine."""

    @property
    def has_outlived_engine(self) -> bool:
        """Whether an engine before its latest one has had it."""
        return 0 < self.first_generation < self.generation

    def given_to(self, generation: int) -> None:
        """Record that a generation of the engine has one of its engine requests."""
        self.first_generation = self.first_generation or generation
        self.generation = generation
        if self.usage is not None:
            self.usage.request_began()

    def on_trial(self) -> RequestContext:
        """Return the context of a trial of one of its engine requests, which an engine has had.

        What the trial takes does not count for its key or its capacity.
        """
        return RequestContext(
            self.request_id,
            first_generation=self.first_generation,
            generation=self.generation + 1,
        )

    def count_tokens(self, prompt_tokens: int, output_tokens: int) -> None:
        """Add tokens that the engine has processed for it."""
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        if self.usage is not None:
            self.usage.count_tokens(prompt_tokens, output_tokens)

    def advise(self, error: HoldfastError, *, may_be_retried: bool) -> None:
        """Record whether the client may retry it, and when, unless `error` advises otherwise."""
        self.may_be_retried, self.retry_after_seconds = may_be_retried, None
        timed = (NotReadyError, OverloadedError)
        if isinstance(error, timed) and error.may_be_retried == may_be_retried:
            self.retry_after_seconds = error.retry_after_seconds

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Lend its capacity to others while entered: it waits for something other than the engine.

        After the last such step it waits for capacity again, unless the step failed.

        Raises:
            NotReadyError, OverloadedError: there is none, see `HeldCapacity.acquire`.
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

    def release_if_done(self) -> None:
        """Give its capacity to others if the engine has nothing of it and no beam search runs.

        Between two tokens of a beam search, others would take the capacity for whole answers.
        """
        if not (self.sequences or self.beam_searches):
            self.engine_is_done()

    async def regain_capacity(self) -> None:
        """Wait for capacity if the engine was done with the request, and is to get more of it.

        Raises:
            NotReadyError, OverloadedError: there is none, see `HeldCapacity.acquire`.
        """
        if self.capacity is not None and self.first_generation and not self.sequences:
            with self.waiting():
                await self.capacity.acquire()

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Keep its capacity while entered, in which a beam search goes on."""
        self.beam_searches += 1
        self.begins_search = True
        try:
            yield
        finally:
            self.beam_searches -= 1
            self.release_if_done()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time while entered as waiting."""
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
"""The request that the running task serves, or None. The request log sets it."""


def current_request() -> RequestContext:
    """Return the context of the request that the running task serves, or an unused one."""
    return REQUEST.get() or RequestContext()


FREQUENT_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"}
)
