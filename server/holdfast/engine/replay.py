"""Replays engine requests after a death: each one that has yielded nothing goes to the next engine.

Requests wait here while there is no engine, and go to the next generation in order of arrival,
except those to blame for the death, see `blame`.

Belongs to one event loop. `EngineOutputs` hides what is peculiar to vLLM.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any

from holdfast.engine.blame import Blame, Verdict
from holdfast.engine.request import (
    EngineLoad,
    EngineOutputs,
    EngineRequest,
    Losses,
    Method,
    loss_of,
    lost_error,
    quarantine_error,
    wake,
)
from holdfast.engine.suspicions import Suspicions
from holdfast.errors import (
    HoldfastError,
    RequestLostError,
)
from holdfast.labels import LossReason
from holdfast.records import Death
from holdfast.request_context import current_request

Unsent = Callable[[Callable[[str], Iterable[str]]], frozenset[str]]

MAX_REQUEST_ID_CHARACTERS = 128
"""A longer request ID is replaced, as is one with other than visible ASCII characters."""


class ReplayManager:
    """Holds every engine request in flight, and alone decides when each may run."""

    def __init__(
        self,
        outputs: EngineOutputs,
        suspicions: Suspicions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outputs = outputs
        self._requests: dict[EngineRequest, None] = {}  # in the order in which they came
        self._load = EngineLoad(clock)
        self._llm: Any | None = None
        self._generation = 0
        self._is_open = False
        self._end: tuple[HoldfastError, LossReason] | None = None
        self._suspicions = suspicions or Suspicions()
        self._blame = Blame(
            outputs,
            self._suspicions,
            in_step=lambda: self.in_step(),  # noqa: PLW0108 - it is set later
            refused=wake,
            clock=clock,
        )
        self._digesting = ThreadPoolExecutor(1, thread_name_prefix="holdfast-digests")
        self._losses = Losses(outputs)
        self.replayed = 0
        """How many times a request was given to a later generation."""
        self.is_paused = False
        """Whether the engine was told to stop scheduling or to sleep."""
        self.on_unexpected_abort: Callable[[], None] = lambda: None
        """Called when the engine aborts a request that it was not asked to abort."""
        self.in_step: Callable[[], Iterable[str]] = tuple
        """Returns vLLM's internal IDs of the requests in the running steps."""
        self.unsent: Unsent = lambda _: frozenset()
        """Returns the IDs of requests that are queued here and have not reached the engine."""

    @property
    def lost(self) -> Mapping[LossReason, int]:
        """How many requests were lost, by reason."""
        return self._losses.counts

    @property
    def held(self) -> int:
        """How many requests wait for an engine."""
        return self._load.held

    @property
    def in_engine(self) -> int:
        """How many requests the engine has."""
        return self._load.in_engine

    @property
    def busy_since_seconds(self) -> float | None:
        """Since when some request has been waiting for an output; None while none is."""
        return self._load.busy_since_seconds

    @property
    def unreplayable(self) -> int:
        """How many of the engine's requests would be lost with it: they cannot be replayed."""
        return sum(
            request.is_in_engine and (request.has_yielded or not request.is_replayable)
            for request in self._requests
        )

    # The life of an engine

    def engine_started(self, llm: Any, generation: int) -> None:
        """Record that an engine is up: the probe may use it."""
        self._llm, self._generation = llm, generation
        self._end = None
        self.is_paused = False
        self._wake()

    def open(self) -> None:
        """Let every request use the proven engine, those that have waited longest first."""
        self._is_open, self._end = True, None
        self._wake()

    def hold(self) -> None:
        """Make new requests wait; those in the engine go on."""
        self._is_open = False

    def engine_ended(self) -> None:
        """Record that the engine is gone: from now on requests wait."""
        self._llm, self._is_open = None, False

    def fail(self, error: HoldfastError, reason: LossReason) -> None:
        """Raise `error` in waiting requests, and in new ones until an engine starts after all."""
        self._end = (error, reason)
        self._wake()

    def has(self, matches: Callable[[Mapping[str, Any]], bool]) -> bool:
        """Whether any request has arguments that `matches` accepts."""
        return any(matches(request.arguments) for request in self._requests)

    def refuse(self, matches: Callable[[Mapping[str, Any]], bool], error: HoldfastError) -> None:
        """Raise `error` in each waiting request that `matches` accepts; it goes to no engine."""
        for request in self._requests:
            if matches(request.arguments) and not request.is_in_engine:
                request.refusal = error
        self._wake()

    def expect_aborts(self) -> None:
        """Record that the engine is being asked to abort all its requests."""
        for request in self._requests:
            request.is_abort_expected |= request.is_in_engine

    def expect_no_aborts(self) -> None:
        """Record that no abort was asked for: from now on an abort means a death again."""
        for request in self._requests:
            request.is_abort_expected = False

    def expect_abort(self, request_ids: frozenset[str]) -> None:
        """Record that the engine is being asked to abort these requests."""
        for request in self._requests:
            request.is_abort_expected |= request.request_id in request_ids

    # One request

    def run(self, method: Method, arguments: Mapping[str, Any]) -> AsyncIterator[Any]:
        """Yield what the engine yields for a request, trying new generations until one yields.

        Raises what the engine raises, except its death, and these as vLLM's own exceptions:
            QuarantinedError: engines have died of this request or one like it; raised at once,
                while a response can still have its own status.
            SuspectedError: the engine died, and the request may have caused it.
            RequestLostError: the engine died, and the request cannot be replayed.
            NotReadyError: no engine will come.
        """
        named = {**arguments, "request_id": _safe_request_id(str(arguments.get("request_id", "")))}
        request = EngineRequest(
            method,
            named,
            current_request(),
            is_replayable=self._outputs.is_replayable(arguments),
            is_streamed=self._outputs.is_streamed(arguments),
        )
        if self._blame.is_quarantined(request):
            raise self._losses.record(request, quarantine_error(), "quarantined")
        return self._stream(request)

    async def _stream(self, request: EngineRequest) -> AsyncIterator[Any]:
        with self._registered(request):
            while True:
                llm = await self._engine_for(request)
                try:
                    with self._load.track(request):
                        run = getattr(llm, request.method)
                        async with aclosing(run(**request.arguments)) as outputs:
                            async for output in outputs:
                                if self._is_unexpected_abort(request, output):
                                    break
                                self._record_output(request, output)
                                request.has_yielded = True
                                # The time that a client takes to read is not the engine's.
                                self._load.mark_delivered(request)
                                yield output
                                self._load.mark_pending(request)
                            else:
                                return
                except (asyncio.CancelledError, GeneratorExit):
                    self._record_departure(request)
                    raise
                except Exception as error:
                    if not self._outputs.is_death(error, llm):
                        raise
                    if self._outputs.is_unsent(error):
                        request.generation = 0
                self._keep_or_fail(request)
                # A waiting request must not keep the dead engine, whose sockets are collected soon.
                del llm, run, outputs

    @contextmanager
    def _registered(self, request: EngineRequest) -> Iterator[None]:
        self._requests[request] = None
        context = request.context
        context.engine_request_id = context.engine_request_id or request.request_id
        try:
            yield
        finally:
            del self._requests[request]

    async def _engine_for(self, request: EngineRequest) -> Any:
        """Return the engine as soon as the request may use it."""
        while not self._may_run(request):
            if request.refusal is not None:
                raise self._losses.record(request, request.refusal, loss_of(request.refusal))
            if self._end is not None:
                raise self._losses.record(request, *self._end)
            await self._load.wait(request)
        if request.generation:
            self.replayed += 1
            request.context.replays += 1
        request.generation = request.context.generation = self._generation
        return self._llm

    def _may_run(self, request: EngineRequest) -> bool:
        is_fresh = self._llm is not None and request.generation < self._generation
        is_admitted = request.refusal is None and (self._is_open or request.context.is_probe)
        return is_fresh and is_admitted

    def _record_output(self, request: EngineRequest, output: Any) -> None:
        if not request.has_yielded:
            request.context.prompt_tokens += self._outputs.prompt_tokens(output)
        request.context.output_tokens += self._outputs.new_tokens(output)
        request.context.is_cut |= self._outputs.is_cut(output)

    def _is_unexpected_abort(self, request: EngineRequest, output: Any) -> bool:
        """Whether the engine aborts as if asked to end, though we did not ask it."""
        if not self._outputs.is_abort(output) or request.is_abort_expected or self.is_paused:
            return False
        self.on_unexpected_abort()
        return True

    def _keep_or_fail(self, request: EngineRequest) -> None:
        """Keep a request whose engine died for the next engine, or fail it here."""
        if request.context.is_probe:
            raise self._outputs.as_vllm_error(RequestLostError("the engine died under the probe"))
        if request.has_yielded or not request.is_replayable:
            self._record_departure(request)
            reason: LossReason = "stream_broken" if request.has_yielded else "not_replayable"
            raise self._losses.record(request, lost_error(), reason)

    def _record_departure(self, request: EngineRequest) -> None:
        if not request.context.is_probe:
            # A prompt may contain hundreds of megabytes of images.
            request.digesting = self._digesting.submit(self._outputs.digest_of, request.arguments)
        self._blame.request_left(request)

    def _wake(self) -> None:
        """Have every waiting request check again whether it may run, in order of arrival."""
        for request in self._requests:
            wake(request)

    # Which request is to blame

    def assign_blame(self, death: Death) -> Verdict:
        """Work out which requests may have caused a death, and return the verdict."""
        unsent = self.unsent(self._outputs.request_ids)
        present = [
            request
            for request in self._requests
            if request.generation == self._generation
            and not request.context.is_probe
            and request.request_id not in unsent
        ]
        return self._blame.assign_blame(death, present)

    async def try_suspects(self, seconds: float) -> bool:
        """Run the suspects of the last death on their own; False if the engine dies of them.

        Suspects not tried within `seconds` are refused.
        """
        return await self._blame.try_suspects(self._run_trial, seconds)

    async def _run_trial(self, requests: Sequence[EngineRequest]) -> bool:
        """Run requests until all are past the point of the last death; False if the engine dies."""
        llm = self._llm
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
        arguments = self._outputs.trial_arguments(request.method, request.arguments)
        with self._load.track(request):
            async with aclosing(getattr(llm, request.method)(**arguments)) as outputs:
                async for output in outputs:
                    is_past = self._outputs.context_tokens(output) > request.reached_tokens
                    if is_past or self._is_unexpected_abort(request, output):
                        return

    def suspended_seconds(self, key: str) -> float:
        """Return how long a key that has ended several engines must wait; 0 if it need not."""
        return self._suspicions.suspended_seconds(key)

    def save(self) -> None:
        """Save what is known of suspects. May wait for the disk, so not for the event loop."""
        self._suspicions.save()


def _safe_request_id(given: str) -> str:
    """Shorten a request ID to fit a worker's record of its step, but keep it distinct."""
    if len(given) <= MAX_REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable():
        return given
    digest = hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    visible = "".join(char for char in given if char.isascii() and char.isprintable())
    return f"{visible[: MAX_REQUEST_ID_CHARACTERS - len(digest) - 1]}~{digest}"
