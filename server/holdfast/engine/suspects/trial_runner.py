"""Runs suspects of a death in the next engine, which gets no other request meanwhile.

`blame` decides which are tried together. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from holdfast.engine.requests.aborts import Aborts
from holdfast.engine.requests.load import EngineLoad
from holdfast.engine.requests.request import EngineOutputs, EngineRequest
from holdfast.engine.suspects.blame import Blame
from holdfast.request_context import REQUEST

STEP_LOOK_SECONDS = 0.01


class TrialRunner:
    """Runs requests as far as they got when an engine died, on behalf of one `ReplayManager`."""

    def __init__(
        self, outputs: EngineOutputs, load: EngineLoad, aborts: Aborts, blame: Blame
    ) -> None:
        self._outputs = outputs
        self._load = load
        self._aborts = aborts
        self._blame = blame

    async def run(
        self, llm: Any, requests: Sequence[EngineRequest]
    ) -> Sequence[EngineRequest] | None:
        """Run requests until all are past the point of the last death; None if the engine dies.

        A request that is overdue is stopped, with its next token or in its step, and returned. That
        one hangs in the engine only the rule of stalls can tell. At the end no step with any of
        them is running, so that what the engine dies of later was not theirs.
        """
        if not requests:
            return ()
        running = [asyncio.create_task(self._run_past_death(llm, request)) for request in requests]
        try:
            outcomes = await asyncio.gather(*running, return_exceptions=True)
        finally:
            for task in running:
                task.cancel()
        if any(self._is_end(outcome, llm) for outcome in outcomes):
            return None
        # A request's own error is not a death: its caller gets it when the request runs again.
        if any(isinstance(outcome, Exception) for outcome in outcomes):
            self._blame.cast_doubt()
        return [
            request for request, outcome in zip(requests, outcomes, strict=True) if outcome is False
        ]

    def _is_end(self, outcome: object, llm: Any) -> bool:
        """Whether the engine has died, or aborts its requests because it ends."""
        is_death = isinstance(outcome, Exception) and self._outputs.is_death(outcome, llm)
        return is_death or outcome is None

    async def _run_past_death(self, llm: Any, request: EngineRequest) -> bool | None:
        """Return whether the request got past the point, not overdue; None if the engine ends."""
        # Otherwise vLLM's limits for new requests apply, and what they refuse would pass its trial.
        REQUEST.set(request.context.on_trial())
        found = self._outputs.continued_arguments(request.arguments, request.sent, llm)
        arguments = self._outputs.trial_arguments(request.method, found or request.arguments)
        request.is_abort_expected = False  # this engine has not been asked to
        with self._load.track(request):
            async with aclosing(getattr(llm, request.method)(**arguments)) as outputs:
                has_passed = await self._read_past_death(request, outputs)
            if has_passed is None:
                return None
            # Still as one that an output is due to, so that a hang of this step is a stall.
            await self._until_out_of_steps(request)
        return has_passed

    async def _read_past_death(
        self, request: EngineRequest, outputs: AsyncIterator[Any]
    ) -> bool | None:
        """Read outputs until the request is past the point or overdue; see `_run_past_death`.

        Outputs that are cut off abort the request.
        """
        output = None
        try:
            async with asyncio.timeout(None) as limit:
                stopping = asyncio.create_task(self._stop_when_overdue(request, limit))
                try:
                    async for output in outputs:
                        if self._aborts.is_unexpected(request, output, is_on_trial=True):
                            return None
                        if self._outputs.context_tokens(output) > request.reached_tokens:
                            return True
                        if self._blame.seconds_until_overdue() <= 0:
                            return False
                finally:
                    stopping.cancel()
        except TimeoutError:
            if not limit.expired():  # it is the request's own error
                raise
            return False
        if not self._is_as_far(request, output):
            self._blame.cast_doubt()
        return True

    def _is_as_far(self, request: EngineRequest, last_output: Any) -> bool:
        """Whether an answer, sampled again, is as long as it was when the engine died."""
        if last_output is None or not self._outputs.is_answer(last_output):
            return False
        return self._outputs.context_tokens(last_output) >= request.reached_tokens

    async def _stop_when_overdue(self, request: EngineRequest, limit: asyncio.Timeout) -> None:
        """Let the time of a request be over once it is overdue, and the engine works for it.

        One that is in no step may hang the engine, and the next trial would be blamed for that.
        """
        await asyncio.sleep(self._blame.seconds_until_overdue())
        while not self._blame.is_in_step(request):  # noqa: ASYNC110 - it can only be polled
            await asyncio.sleep(STEP_LOOK_SECONDS)
        limit.reschedule(asyncio.get_running_loop().time())

    async def _until_out_of_steps(self, request: EngineRequest) -> None:
        """Wait for the step that vLLM began before it knew that the trial was over."""
        await asyncio.sleep(STEP_LOOK_SECONDS)  # between two steps there is none to see
        while self._blame.is_in_step(request):  # noqa: ASYNC110 - it can only be polled
            await asyncio.sleep(STEP_LOOK_SECONDS)
