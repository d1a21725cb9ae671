"""Every call of `generate()` and `encode()`: which generation has it, and which ones wait.

A call that has yielded nothing outlives its engine: it waits here, and goes to the next generation
in the order in which all of them came. Who is to blame for a death is found out by trial: suspects
run alone until they have got past the point where the engine died; one that kills it again is
quarantined, and the others go on together.

Belongs to one event loop. What is peculiar to vLLM is behind `Dialect`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from types import MappingProxyType
from typing import Any

from holdfast.engine.call import Call, Dialect, Method
from holdfast.engine.quarantine import Quarantine
from holdfast.engine.tracked import tracked_request
from holdfast.errors import HoldfastError, NotReadyError, QuarantinedError, RequestLostError
from holdfast.records import LOSS_REASONS, Death, LossReason, Suspect

logger = logging.getLogger("holdfast.engine")

TRIALS_SECONDS = 120.0
"""After so long no further suspect is tried alone: those that are left go on with the others."""


class Calls:
    """The calls of all callers, and the one place that decides when each may run."""

    def __init__(self, dialect: Dialect, clock: Callable[[], float] = time.monotonic) -> None:
        self._dialect = dialect
        self._clock = clock
        self._calls: dict[Call, None] = {}  # in the order in which they came
        self._llm: Any | None = None
        self._generation = 0
        self._is_open = False
        self._end: tuple[HoldfastError, LossReason] | None = None
        self._on_trial: Call | None = None
        self._in_engine = 0
        self._owed = 0
        self._quarantine = Quarantine(dialect)
        self._lost: dict[LossReason, int] = dict.fromkeys(LOSS_REASONS, 0)
        self.held = 0
        """Calls that wait for an engine."""
        self.replayed = 0
        """Calls that were given to another generation than the first."""
        self.busy_since_seconds: float | None = None
        """Since when the engine has owed somebody an output; None while it owes nobody one."""
        self.is_paused = False
        """Whether somebody told the engine not to schedule, or to sleep."""
        self.gave_up: Callable[[], None] = lambda: None
        """Called when the engine gives requests up that nobody asked it to."""

    @property
    def lost(self) -> Mapping[LossReason, int]:
        """Calls that the death of an engine ended, by reason."""
        return MappingProxyType(self._lost)

    @property
    def in_engine(self) -> int:
        """Calls that the engine has."""
        return self._in_engine

    @property
    def begun(self) -> int:
        """Calls that the engine has and that its end would break: nobody can make them again."""
        return sum(
            call.is_in_engine and (call.has_yielded or not call.is_replayable)
            for call in self._calls
        )

    # The life of an engine

    def started(self, llm: Any, generation: int) -> None:
        """An engine is up: the probe may use it."""
        self._llm, self._generation = llm, generation
        self._end = None
        self.is_paused = False
        self._wake()

    def opened(self) -> None:
        """The engine is proven: everybody may use it, first those that have waited longest."""
        self._is_open, self._end = True, None
        self._wake()

    def hold(self) -> None:
        """From now on calls wait; those that the engine has go on."""
        self._is_open = False

    def ended(self) -> None:
        """The engine is gone: from now on calls wait."""
        self._llm, self._is_open = None, False

    def fail(self, error: HoldfastError, reason: LossReason) -> None:
        """No engine will come: whoever waits, or comes before one does, gets `error`."""
        self._end = (error, reason)
        self._wake()

    def has(self, is_meant: Callable[[Mapping[str, Any]], bool]) -> bool:
        """Whether there is a call with such arguments."""
        return any(is_meant(call.arguments) for call in self._calls)

    def refuse(self, is_meant: Callable[[Mapping[str, Any]], bool], error: HoldfastError) -> None:
        """Calls with such arguments that wait get `error`, and go to no engine."""
        for call in self._calls:
            if is_meant(call.arguments) and not call.is_in_engine:
                call.refusal = error
        self._wake()

    def expect_aborts(self) -> None:
        """Somebody asks the engine to give up what it has."""
        for call in self._calls:
            call.is_abort_expected = call.is_abort_expected or call.is_in_engine

    def forgive_aborts(self) -> None:
        """Whoever asked for it is done: from now on an abort is a death again."""
        for call in self._calls:
            call.is_abort_expected = False

    def expect_abort(self, request_ids: frozenset[str]) -> None:
        """Somebody asks the engine to give up these requests."""
        for call in self._calls:
            call.is_abort_expected = call.is_abort_expected or call.request_id in request_ids

    # A call

    async def run(self, method: Method, arguments: Mapping[str, Any]) -> AsyncIterator[Any]:
        """What the engine yields for a call; from as many generations as it takes to get a first.

        Raises what the engine raises, but for its death, and, lifted to vLLM's own:
            RequestLostError: it died, and the call cannot be made again.
            QuarantinedError: the call, or one like it, ended an engine alone.
            NotReadyError: no engine will come.
        """
        with self._entered(method, arguments) as call:
            while True:
                llm = await self._turn(call)
                try:
                    with self._in(call):
                        async with aclosing(getattr(llm, method)(**arguments)) as outputs:
                            async for output in outputs:
                                if self._is_given_up(call, output):
                                    break
                                self._count_tokens(call, output)
                                call.has_yielded = True
                                # A client that reads slowly is no work of the engine.
                                self._rests(call)
                                yield output
                                self._works(call)
                            else:
                                return
                except Exception as error:
                    if not self._dialect.is_death(error, llm):
                        raise
                self._outlive(call)

    @contextmanager
    def _entered(self, method: Method, arguments: Mapping[str, Any]) -> Iterator[Call]:
        tracked = tracked_request()
        call = Call(method, arguments, tracked, self._dialect.is_replayable(arguments))
        if self._quarantine.has(arguments):
            raise self._lift(call, _quarantine_error(), "quarantined")
        self._calls[call] = None
        tracked.engine_request_id = tracked.engine_request_id or call.request_id
        try:
            yield call
        finally:
            del self._calls[call]
            if call.trial is not None:
                call.trial.cancel()

    async def _turn(self, call: Call) -> Any:
        """The engine, as soon as the call may use it."""
        while not self._may_run(call):
            if call.is_quarantined:
                raise self._lift(call, _quarantine_error(), "quarantined")
            if call.refusal is not None:
                raise self._lift(call, call.refusal, "not_replayable")
            if self._end is not None:
                raise self._lift(call, *self._end)
            call.waiter = asyncio.get_running_loop().create_future()
            self.held += 1
            try:
                with call.tracked.waiting():
                    await call.waiter
            finally:
                self.held -= 1
                call.waiter = None
        if call.generation:
            self.replayed += 1
            call.tracked.replays += 1
        call.generation = call.tracked.generation = self._generation
        return self._llm

    def _may_run(self, call: Call) -> bool:
        is_fresh = self._llm is not None and call.generation < self._generation
        is_refused = call.is_quarantined or call.refusal is not None
        return is_fresh and not is_refused and (self._is_open or call.tracked.is_probe)

    @contextmanager
    def _in(self, call: Call) -> Iterator[None]:
        call.is_in_engine = True
        self._in_engine += 1
        self._works(call)
        try:
            yield
        finally:
            self._rests(call)
            call.is_in_engine = False
            self._in_engine -= 1

    def _works(self, call: Call) -> None:
        """The engine owes the call an output. A prompt that comes as a stream may be waited for."""
        if call.is_replayable and not call.is_owed:
            call.is_owed = True
            self._owed += 1
            if self._owed == 1:
                self.busy_since_seconds = self._clock()

    def _rests(self, call: Call) -> None:
        """The engine owes the call nothing for now."""
        if call.is_owed:
            call.is_owed = False
            self._owed -= 1
            if not self._owed:
                self.busy_since_seconds = None

    def _count_tokens(self, call: Call, output: Any) -> None:
        if not call.has_yielded:
            call.tracked.prompt_tokens += self._dialect.prompt_tokens(output)
        call.tracked.output_tokens += self._dialect.new_tokens(output)

    def _is_given_up(self, call: Call, output: Any) -> bool:
        """Whether the engine answers as one does that was asked to end, unknown to us."""
        if not self._dialect.is_abort(output) or call.is_abort_expected or self.is_paused:
            return False
        self.gave_up()
        return True

    def _outlive(self, call: Call) -> None:
        """The engine died under the call: it stays for the next, or ends here."""
        if call.tracked.is_probe:
            raise self._dialect.lifted(RequestLostError("the engine died under the probe"))
        if call.has_yielded:
            raise self._lift(call, _lost_answer(), "stream_broken")
        if not call.is_replayable:
            raise self._lift(call, _lost_answer(), "not_replayable")

    def _lift(self, call: Call, error: HoldfastError, reason: LossReason) -> Exception:
        self._lost[reason] += 1
        call.tracked.is_broken = True
        call.tracked.error = reason
        if reason != "not_replayable":  # the client can make the same request again, as we cannot
            call.tracked.may_be_retried = isinstance(error, NotReadyError)
        return self._dialect.lifted(error)

    def _wake(self) -> None:
        """Let everybody who waits look again, in the order in which they came."""
        for call in self._calls:
            if call.waiter is not None and not call.waiter.done():
                call.waiter.set_result(None)

    # Who is to blame

    def accuse(self, death: Death) -> None:
        """Take in who may have caused a death; who did it alone is quarantined."""
        tried, self._on_trial = self._on_trial, None
        if not death.is_accusing:
            return
        if tried is not None:
            self._put_into_quarantine(tried)
            return
        for call in self._calls:
            is_there = call.generation == self._generation and not call.has_yielded
            if is_there and not call.tracked.is_probe and (suspect := self._suspect(call, death)):
                call.suspicion = suspect
                call.strikes += 1

    async def try_suspects(self) -> bool:
        """Let each suspect run alone, those in prefill first; False if the engine dies of it."""
        suspects = sorted(
            (call for call in self._calls if call.suspicion is not None), key=_trial_order
        )
        deadline = self._clock() + TRIALS_SECONDS
        for place, call in enumerate(suspects):
            if self._clock() > deadline:
                logger.warning("%d suspects are let go untried", len(suspects) - place)
                break
            if call in self._calls and not await self._is_innocent(call):
                return False
        for call in suspects:
            call.suspicion = None
        return True

    async def _is_innocent(self, call: Call) -> bool:
        """Run it alone until it is past the point of the last death; False if the engine dies."""
        logger.info("trying request %s alone, since an engine died with it", call.request_id)
        self._on_trial = call
        call.trial = asyncio.create_task(self._try(call))
        llm = self._llm
        try:
            await asyncio.wait({call.trial})
            error = None if call.trial.cancelled() else call.trial.exception()
        finally:
            call.trial.cancel()
            call.trial = None
        if isinstance(error, Exception) and self._dialect.is_death(error, llm):
            return False
        # Its client has left, or it is past the point, or the error is its own: its caller gets
        # that when it runs for good.
        self._on_trial = None
        return True

    async def _try(self, call: Call) -> None:
        arguments = self._dialect.for_trial(call.method, call.arguments)
        reached_tokens = call.suspicion.reached_tokens if call.suspicion else 0
        with self._in(call):
            async with aclosing(getattr(self._llm, call.method)(**arguments)) as outputs:
                async for output in outputs:
                    is_past = self._dialect.context_tokens(output) > reached_tokens
                    if is_past or self._is_given_up(call, output):
                        return

    def _suspect(self, call: Call, death: Death) -> Suspect | None:
        if death.suspects is None:
            return Suspect(call.request_id, 0, is_prefill=False)
        return next(
            (
                suspect
                for suspect in death.suspects
                if self._dialect.is_same_request(suspect.request_id, call.request_id)
            ),
            None,
        )

    def _put_into_quarantine(self, call: Call) -> None:
        if call not in self._calls:
            return
        logger.error(
            "request %s is quarantined: an engine died with it, and again with it alone",
            call.request_id,
        )
        self._quarantine.add(call.arguments)
        call.is_quarantined = True
        if call.waiter is not None and not call.waiter.done():
            call.waiter.set_result(None)


def _trial_order(call: Call) -> tuple[int, bool]:
    is_prefill = call.suspicion is not None and call.suspicion.is_prefill
    return -call.strikes, not is_prefill


def _lost_answer() -> RequestLostError:
    return RequestLostError("The engine died while it worked on this request.")


def _quarantine_error() -> QuarantinedError:
    return QuarantinedError(
        "This request ended the engine while it was the only one in it, and is not tried again."
    )
