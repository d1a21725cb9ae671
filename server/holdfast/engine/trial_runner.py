"""Runs suspects of a death in the next engine, which gets no other request meanwhile.

`blame` decides which are tried together. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from holdfast.engine.aborts import Aborts
from holdfast.engine.request import EngineLoad, EngineOutputs, EngineRequest


class TrialRunner:
    """Runs requests as far as they got when an engine died, on behalf of one `ReplayManager`."""

    def __init__(self, outputs: EngineOutputs, load: EngineLoad, aborts: Aborts) -> None:
        self._outputs = outputs
        self._load = load
        self._aborts = aborts

    async def run(self, llm: Any, requests: Sequence[EngineRequest]) -> bool:
        """Run requests until all are past the point of the last death; False if the engine dies."""
        if not requests:
            return True
        running = [asyncio.create_task(self._run_past_death(llm, request)) for request in requests]
        try:
            await asyncio.wait(running)
            errors = [None if task.cancelled() else task.exception() for task in running]
        finally:
            for task in running:
                task.cancel()
        # A request's own error is not a death: its caller gets it when the request runs again.
        return not any(
            isinstance(error, Exception) and self._outputs.is_death(error, llm) for error in errors
        )

    async def _run_past_death(self, llm: Any, request: EngineRequest) -> None:
        found = self._outputs.continued_arguments(request.arguments, request.sent, llm)
        arguments = self._outputs.trial_arguments(request.method, found or request.arguments)
        with self._load.track(request):
            async with aclosing(getattr(llm, request.method)(**arguments)) as outputs:
                async for output in outputs:
                    is_past = self._outputs.context_tokens(output) > request.reached_tokens
                    if is_past or self._aborts.is_unexpected(request, output):
                        return
