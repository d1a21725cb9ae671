"""Which prompts give way while the host is short of memory? Long ones wait, or are given up.

A prompt is long if it takes more than one step or more than an eighth of the longest context: what
a shorter one needs, the engine has needed already. A prompt that waits here lends its capacity to
others, and the engine does not know it yet. Belongs to one event loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import chain

from holdfast.engine.requests.request import EngineOutputs, EngineRequest, wake
from holdfast.errors import HostMemoryError, NotReadyError, OverloadedError
from holdfast.records import EngineFacts

CONTEXT_SHARE = 8
RECENT_SECONDS = 10.0
"""A prompt that was given up this recently may still be why the memory runs out: allocators keep
what they took."""


def long_prompt_tokens(facts: EngineFacts) -> int:
    """Return the length above which a prompt is long."""
    return min(facts.max_num_batched_tokens, facts.max_model_len // CONTEXT_SHARE)


class LongPrompts:
    """The long prompts of one `ReplayManager`."""

    def __init__(
        self,
        outputs: EngineOutputs,
        requests: Iterable[EngineRequest],
        abort: Callable[[EngineRequest], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take all requests in the order of arrival, as they are at any time."""
        self._outputs = outputs
        self._requests = requests
        self._abort = abort
        self._clock = clock
        self.are_held = False
        """Whether long prompts have to wait."""
        self._given_up: list[tuple[float, int]] = []
        """When prompts that had yielded nothing were given up in the engine, and their lengths."""
        self._prefilling: Callable[[], Iterable[str]] = tuple
        self._long_tokens: float = math.inf
        self.on_held: Callable[[], None] = lambda: None
        """Called with each prompt that has to wait."""
        self.on_given_up: Callable[[], None] = lambda: None
        """Called with each prompt that is given up."""

    def engine_started(self, facts: EngineFacts, prefilling: Callable[[], Iterable[str]]) -> None:
        """Take what a new engine calls long; `prefilling` names the sequences that it has to read.

        Those are vLLM's internal IDs.
        """
        self._long_tokens, self._prefilling = long_prompt_tokens(facts), prefilling

    def engine_ended(self) -> None:
        """Forget the engine's sequences: it is gone, and no prompt waits for memory any more.

        Those that did wait for the next engine, and get their capacity back when it starts.
        """
        self._prefilling, self.are_held = tuple, False
        self._given_up = []
        for request in self._waiting():
            request.held_since_seconds = None

    # Waiting

    def hold(self, *, are_held: bool) -> None:
        """Have long prompts wait from now on, or let all of them go on."""
        self.are_held = are_held
        if not are_held:
            for request in self._waiting():
                wake(request)

    def must_wait(self, request: EngineRequest) -> bool:
        """Whether the request may not go to the engine now; cheap while nothing has to wait.

        A stream that goes on does not wait: its client has a part of the answer.
        """
        is_held = self.are_held and not (request.has_yielded or request.context.is_probe)
        return is_held and self.is_long(request)

    def is_long(self, request: EngineRequest) -> bool:
        """Whether it is long for the engine, or for the last one."""
        return self._tokens(request) > self._long_tokens

    @asynccontextmanager
    async def waiting(self, request: EngineRequest) -> AsyncIterator[None]:
        """While entered, the request waits; if for memory, it lends its capacity to others.

        Raises the exception that vLLM's routes expect if no capacity comes back in time.
        """
        if not self.must_wait(request):
            yield
            return
        if request.held_since_seconds is None:
            request.held_since_seconds = self._clock()
            self.on_held()
        try:
            async with request.context.away():
                yield
        except (NotReadyError, OverloadedError) as error:
            may_be_retried = error.may_be_retried and not request.deaths
            request.context.advise(error, may_be_retried=may_be_retried)
            raise self._outputs.as_vllm_error(error) from error
        finally:
            if not self.must_wait(request):
                request.held_since_seconds = None

    # Giving up

    async def give_up_longest(self) -> None:
        """Refuse the longest prompt that the engine is processing, or else the longest that waits.

        A stream that goes on is refused only if no other is processed. The caller gets
        HostMemoryError. The probe's own prompts are never refused.
        """
        clients = [one for one in self._running() if not one.context.is_probe]
        fresh = [one for one in clients if not one.has_yielded]
        chosen = max(fresh or clients or self._waiting(), key=self._tokens, default=None)
        if chosen is not None:
            await self._give_up(chosen)

    async def give_up_overdue(self, limit_seconds: float) -> None:
        """Refuse the prompts that have waited for `limit_seconds`."""
        since = self._clock() - limit_seconds
        for request in self._waiting():
            if (request.held_since_seconds or 0.0) <= since:
                await self._give_up(request)

    def suspect_tokens(self) -> int:
        """Return the length of the longest prompt that may have taken the memory; 0 if none may.

        The engine is processing it, or it was given up in the last seconds. It may be the probe's,
        but not a stream that goes on: an engine has served its size, and it is read again after
        each death, so that it would always be there.
        """
        fresh = (one for one in self._running() if not one.has_yielded)
        given_up = (tokens for _, tokens in self._recently_given_up())
        return max(chain(map(self._tokens, fresh), given_up), default=0)

    def probe_tokens(self) -> int:
        """Return the length of the longest prompt of the probe that the engine is processing."""
        probes = (one for one in self._running() if one.context.is_probe)
        return max(map(self._tokens, probes), default=0)

    async def _give_up(self, request: EngineRequest) -> None:
        request.refusal = HostMemoryError(
            "The host is short of memory, so this long prompt was aborted. Try again later."
        )
        self.on_given_up()
        if not request.is_in_engine:
            wake(request)
            return
        if not request.has_yielded:
            given_up = (self._clock(), self._tokens(request))
            self._given_up = [*self._recently_given_up(), given_up]
        request.is_abort_expected = True
        await self._abort(request)

    def _recently_given_up(self) -> list[tuple[float, int]]:
        since_seconds = self._clock() - RECENT_SECONDS
        return [one for one in self._given_up if one[0] >= since_seconds]

    def _waiting(self) -> list[EngineRequest]:
        return [
            request
            for request in self._requests
            if request.held_since_seconds is not None and request.refusal is None
        ]

    def _running(self) -> list[EngineRequest]:
        """Return the long prompts that the engine has and has not read to their end."""
        names = set(chain.from_iterable(map(self._outputs.request_ids, self._prefilling())))
        return [
            request
            for request in self._requests
            if request.is_in_engine
            and request.refusal is None
            and request.request_id in names
            and self.is_long(request)
        ]

    def _tokens(self, request: EngineRequest) -> int:
        """Return what the engine has to read: of a stream that goes on, also what was sent."""
        return self._outputs.given_tokens(request.arguments) + len(request.sent.token_ids)
