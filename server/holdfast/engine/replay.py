"""Replays engine requests after a death, and lets streams go on where they stopped.

Requests wait here while there is no engine, and go to the next generation in order of arrival,
except those to blame for the death, see `suspects.blame`. One that has yielded nothing starts over.
A stream goes on after what was sent if its state follows from that, see `requests.continuation`.

Belongs to one event loop. `EngineOutputs` hides what is peculiar to vLLM.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

from holdfast.engine.requests.aborts import Aborts
from holdfast.engine.requests.arrivals import Arrivals
from holdfast.engine.requests.load import EngineLoad
from holdfast.engine.requests.long_prompts import LongPrompts
from holdfast.engine.requests.request import (
    EngineOutputs,
    EngineRequest,
    Losses,
    Method,
    aborted_error,
    await_turn,
    has_not_gone_on,
    lost_error,
    quarantine_error,
    require_progress,
    suspected_error,
    wake,
)
from holdfast.engine.requests.request_progress import RequestProgress, Traffic
from holdfast.engine.suspects.blame import Blame, BlameVerdict
from holdfast.engine.suspects.presence import Presence
from holdfast.engine.suspects.suspicions import Suspicions
from holdfast.engine.suspects.trial_runner import TrialRunner
from holdfast.errors import HoldfastError, RequestLostError, suspended_error
from holdfast.labels import LossReason
from holdfast.records import Death


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
        self.arrivals = Arrivals(outputs, self._requests)
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
        self._losses = Losses(outputs)
        self.aborts = Aborts(outputs, self._requests)
        self._trial_runner = TrialRunner(outputs, self._load, self.aborts, self._blame)
        self.long_prompts = LongPrompts(
            outputs, self._requests, lambda request: self.aborts.abort(self._llm, request), clock
        )
        """The requests that give way while the host is short of memory."""
        self.presence = Presence(outputs, self._requests, self._blame, self.long_prompts.is_long)
        """The requests that the engine has, until it is known what it died of."""
        self.progress = RequestProgress(outputs, self._requests)
        """How far the requests are."""
        self.traffic = Traffic(outputs, clock)
        """What clients were sent."""
        self.replayed = 0
        """How many times a request started over in a later generation."""
        self.continued = 0
        """How many times a stream went on in a later generation."""
        self.in_step: Callable[[], Iterable[str]] = tuple
        """Returns vLLM's internal IDs of the requests in the running steps."""

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
    def given(self) -> int:
        """How many requests engines were given, each once, not counting those of the probe."""
        return self._load.given

    @property
    def busy_since_seconds(self) -> float | None:
        """Since when some request has been waiting for an output; None while none is."""
        return self._load.busy_since_seconds

    @property
    def lost_with_engine(self) -> int:
        """How many of the requests that the engine is at work on would be lost with it."""
        return sum(not request.outlives_engine for request in self.presence.unfinished())

    # The life of an engine

    def engine_started(self, llm: Any, generation: int) -> None:
        """Record that an engine is up: the probe may use it."""
        self._llm, self._generation, self._end = llm, generation, None
        self.presence.engine_started(generation)
        self.aborts.engine_started(generation)
        self._wake()

    def open(self) -> None:
        """Let every request use the proven engine, those that have waited longest first."""
        self._is_open, self._end = True, None
        self._wake()

    def hold(self) -> None:
        """Make new requests wait; those in the engine go on."""
        self._is_open = False

    def plan_end(self, error: HoldfastError) -> None:
        """Raise `error` in what is lost with the engine: it is about to be ended on purpose."""
        if self._llm is not None:  # else it has died already, which is what its readers are told
            self._losses.plan_end(self._generation, error)

    def engine_ended(self) -> None:
        """Record that the engine is gone: from now on requests wait."""
        self._llm, self._is_open = None, False
        self.presence.engine_ended()
        self.long_prompts.engine_ended()

    def forget_engine(self) -> None:
        """Let go of an engine whose death was blamed: its sockets are collected with it."""
        self.in_step = tuple
        self.presence.forget_engine()
        self.aborts.on_unexpected = lambda: None
        self.progress.reached_tokens = dict

    def fail(self, error: HoldfastError, reason: LossReason) -> None:
        """Raise `error` in waiting requests, and in new ones until an engine starts after all.

        Suspects get SuspectedError: a router would take any other to the next server.
        """
        self._blame.refuse_untried()
        self._end = (error, reason)
        self._wake()

    def arguments(self) -> list[Mapping[str, Any]]:
        """Return the arguments of every request, and of suspects whose clients have left."""
        return [request.arguments for request in (*self._requests, *self._blame.suspects)]

    def refuse(self, matches: Callable[[EngineRequest], bool], error: HoldfastError) -> None:
        """Raise `error` in each request that `matches` accepts, unless the engine in use has it."""
        # A suspect whose client has left is not tried then.
        for request in (*self._requests, *self._blame.suspects):
            # A client that reads slowly has not noticed yet that the last engine has died.
            is_alive = self._llm is not None and request.generation == self._generation
            if matches(request) and not (request.is_in_engine and is_alive):
                request.refusal = error
        self._wake()

    # One request

    def run(self, method: Method, arguments: Mapping[str, Any]) -> AsyncIterator[Any]:
        """Yield what the engine yields for a request, trying new generations after its death.

        Raises what the engine raises, except its death, and these as vLLM's own exceptions:
            QuarantinedError: engines have died of this request or one like it; raised at once,
                while a response can still have its own status, unless the prompt is large.
            SuspectedError: the engine died, and the request may have caused it.
            KeySuspendedError: requests of its key have ended engines since it was admitted.
            RequestLostError: the engine died, and the request can neither start over nor go on.
            NotReadyError: no engine will come.
            HostMemoryError: the prompt is long, and the host is short of memory.
        """
        request = self.arrivals.request(method, arguments)
        if self._blame.is_quarantined(request):
            raise self._losses.record(request, quarantine_error(), "quarantined")
        return self._stream(request)

    async def _stream(self, request: EngineRequest) -> AsyncIterator[Any]:
        with self._registered(request):
            while True:
                llm = await self._engine_for(request)
                arguments = self._begin(llm, request)
                begun_tokens = len(request.sent.token_ids)
                try:
                    with self._load.track(request):
                        run = getattr(llm, request.method)
                        async with aclosing(run(**arguments)) as outputs:
                            async for output in outputs:
                                self._raise_refusal(request, output)
                                if self.aborts.is_unexpected(request, output):
                                    break
                                self._raise_abort(request, output)
                                if self._outputs.is_failure(output):
                                    require_progress(request, begun_tokens)
                                self._record_output(request, output)
                                request.has_yielded = True
                                # The time that a client takes to read is not the engine's.
                                self._load.mark_delivered(request)
                                yield output
                                self._load.mark_pending(request)
                            else:
                                return
                except Exception as error:
                    is_dead = self._outputs.is_death(error, llm)
                    if not is_dead and has_not_gone_on(request, begun_tokens):
                        raise self._losses.record(request, lost_error(), "stream_broken") from error
                    if not is_dead:
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
        except (asyncio.CancelledError, GeneratorExit):
            self.presence.request_left(request)
            raise
        finally:
            del self._requests[request]

    async def _engine_for(self, request: EngineRequest) -> Any:
        """Return the engine as soon as the request may use it."""
        if await self._blame.is_quarantined_though_large(request):
            raise self._losses.record(request, quarantine_error(), "quarantined")
        self._raise_suspension(request)
        if not request.generation:
            await await_turn(request, self._losses)
        while not self._may_run(request):
            self._raise_suspension(request)  # nothing wakes one that waits for its capacity
            if self._end is not None:
                raise self._losses.record(request, *self._end)
            async with self.long_prompts.waiting(request):
                await self._load.wait(request)
                self._raise_suspension(request)
        return self._llm

    def _begin(self, llm: Any, request: EngineRequest) -> Mapping[str, Any]:
        """Return the arguments for this engine, and count the request if another has had it."""
        arguments = self._outputs.continued_arguments(request.arguments, request.sent, llm)
        if arguments is None:
            raise self._losses.without_room(request)
        sent_tokens = len(request.sent.token_ids)
        if request.generation and sent_tokens:
            self.continued += 1
            request.context.continued_at_tokens += (sent_tokens,)
        elif request.generation:
            self.replayed += 1
            request.context.replays += 1
        request.generation = request.given_generation = self._generation
        request.is_abort_expected = request.is_finished = False  # those were of another engine
        request.context.given_to(self._generation)
        return arguments

    def _may_run(self, request: EngineRequest) -> bool:
        is_fresh = self._llm is not None and request.given_generation < self._generation
        is_admitted = request.refusal is None and (self._is_open or request.context.is_probe)
        return is_fresh and is_admitted and not self.long_prompts.must_wait(request)

    def _raise_refusal(self, request: EngineRequest, output: Any = None) -> None:
        if request.refusal is not None and not (output and self._outputs.is_answer(output)):
            raise self._losses.refused(request, request.refusal)

    def _raise_abort(self, request: EngineRequest, output: Any) -> None:
        """Raise for an abort that was asked for, and that the output cannot tell the client."""
        if request.method == "encode" and self._outputs.is_abort(output):
            raise self._losses.refused(request, aborted_error())

    def _raise_suspension(self, request: EngineRequest) -> None:
        """Raise the refusal of a request, also if its key was suspended after it was admitted."""
        self._raise_refusal(request)  # which says more
        seconds = self.suspended_seconds(request.context.key)
        if seconds and request.deaths:
            raise self._losses.record(request, suspected_error(), "suspected")
        if seconds:
            raise self._losses.record(request, suspended_error(seconds), "key_suspended")

    def _record_output(self, request: EngineRequest, output: Any) -> None:
        self.traffic.count(request, output)
        request.context.is_cut |= self._outputs.is_cut(output)
        if request.is_continuable:
            self._outputs.add_sent(request.sent, output)
            self._blame.output_came(request)

    def _keep_or_fail(self, request: EngineRequest) -> None:
        """Keep a request whose engine died for the next engine, or fail it here."""
        if request.context.is_probe:
            raise self._outputs.as_vllm_error(RequestLostError("the engine died under the probe"))
        if not request.outlives_engine:
            self.presence.request_left(request)
            raise self._losses.lost(request)

    def _wake(self) -> None:
        """Have every waiting request check again whether it may run, in order of arrival."""
        for request in self._requests:
            wake(request)

    # Which request is to blame

    def assign_blame(self, death: Death) -> BlameVerdict:
        """Work out which requests may have caused a death, and return the verdict."""
        return self.presence.judge(death)

    async def try_suspects(self, seconds: float) -> bool:
        """Run the last death's suspects alone for `seconds`; False if the engine dies of them."""
        return await self._blame.try_suspects(partial(self._trial_runner.run, self._llm), seconds)

    def verdict_of_trials(self) -> BlameVerdict:
        """Return once what the trials have shown of the death before them."""
        return self._blame.verdict_of_trials()

    def is_suspect(self, request_id: str) -> bool:
        """Whether the request with this ID runs on its own now, or will be tried on its own."""
        return any(request.request_id == request_id for request in self._blame.suspects)

    def suspended_seconds(self, key: str) -> float:
        """Return how long a key that has ended several engines must wait; 0 if it need not."""
        return self._suspicions.suspended_seconds(key)

    def save(self) -> None:
        """Have what is known of suspects written to disk, without waiting for it."""
        self._suspicions.save_soon()
