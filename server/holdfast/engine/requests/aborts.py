"""Was an abort asked for? An engine that ends aborts its requests as if it had been asked to.

A core that got SIGTERM does so for seconds before it ends, and nothing in vLLM tells the two apart.
Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from holdfast.engine.requests.request import EngineOutputs, EngineRequest
from holdfast.request_context import current_request


class Aborts:
    """The aborts that the engine of one `ReplayManager` was asked for."""

    def __init__(self, outputs: EngineOutputs, requests: Iterable[EngineRequest]) -> None:
        """Take all requests, as they are at any time."""
        self._outputs = outputs
        self._requests = requests
        self.generation = 0
        """The number of the last engine that has started; 0 before the first."""
        self.is_paused = False
        """Whether the engine was told to stop scheduling or to sleep, so any abort is expected."""
        self.pauses = 0
        """How many calls that pause engines have begun."""
        self._overdue_calls = 0
        """How many calls that pause or resume it are pending, in which it should make steps."""
        self.on_unexpected: Callable[[], None] = lambda: None
        """Called when the engine aborts a request that it was not asked to abort."""

    def engine_started(self, generation: int) -> None:
        """Record that there is another engine, which was asked for nothing yet."""
        self.generation, self.is_paused = generation, False

    def begin_pause(self) -> int:
        """Record that the engine is being paused, and return the number of the pause."""
        self.pauses += 1
        self.is_paused = True
        return self.pauses

    def settle(self, pauses: int, *, is_paused: bool) -> None:
        """Record whether the engine is paused after a call, unless another pause has begun since.

        Calls may overlap, and the engine is sent them in the order in which they began, see
        `pauses.Pauses`. `pauses` is how many pauses had begun when the call began.
        """
        if self.pauses == pauses:
            self.is_paused = is_paused

    @property
    def stops_steps(self) -> bool:
        """Whether the engine makes no steps because it is paused or asleep."""
        return self.is_paused and not self._overdue_calls

    @contextmanager
    def steps_due_after(self, seconds: float) -> Iterator[None]:
        """Have the engine make steps while a call that pauses or resumes it is pending.

        They are due once the call has taken this long.
        """
        is_due = False

        def become_due() -> None:
            nonlocal is_due
            is_due = True
            self._overdue_calls += 1

        timer = asyncio.get_running_loop().call_later(seconds, become_due)
        try:
            yield
        finally:
            timer.cancel()
            self._overdue_calls -= is_due

    def allowed(self, request_ids: Iterable[str]) -> Iterable[str]:
        """Return those that the running task may have aborted: a client only what it asked for.

        vLLM's routes abort by IDs that clients choose, and another client may have chosen the same.
        What runs for an operator has neither capacity nor a session.
        """
        context = current_request()
        if context.capacity is None and context.session is None:
            return request_ids
        own = {request.request_id for request in self._requests if request.context is context}
        return own.intersection(request_ids)

    def expect_all(self) -> None:
        """Record that the engine is being asked to abort all its requests.

        Those of an engine that is gone go on at this one once their callers have noticed.
        """
        for request in self._requests:
            is_present = request.is_in_engine and request.generation == self.generation
            request.is_abort_expected |= is_present

    def expect(self, request_ids: frozenset[str]) -> None:
        """Record that the engine is being asked to abort these requests."""
        for request in self._requests:
            request.is_abort_expected |= request.request_id in request_ids

    def came(self, internal_ids: Iterable[str]) -> None:
        """Record what the engine has aborted: with a pause in effect, it was asked to.

        A caller that reads slowly takes such an abort long after the pause has ended. A request
        that a pause leaves in the engine is not recorded, since that engine may end unasked later.
        """
        if self.is_paused:
            ids = chain.from_iterable(map(self._outputs.request_ids, internal_ids))
            self.expect(frozenset(ids))

    async def abort(self, llm: Any | None, request: EngineRequest) -> None:
        """Have the engine, if any, forget a request, and its caller get an output that says so."""
        if llm is None:
            return
        try:
            await llm.abort(request.request_id)
        except Exception as error:
            if not self._outputs.is_death(error, llm):
                raise

    def is_unexpected(
        self, request: EngineRequest, output: Any, *, is_on_trial: bool = False
    ) -> bool:
        """Return whether an engine aborts the request unasked, and report that of the present one.

        A caller that reads slowly may take an abort by an engine that is gone. A request on trial
        is one of the present engine.
        """
        if not self._outputs.is_abort(output) or request.is_abort_expected:
            return False
        if not is_on_trial and request.generation != self.generation:
            return True
        if self.is_paused:
            return False
        self.on_unexpected()
        return True
