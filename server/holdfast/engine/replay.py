"""Knows which generation has each call of `generate()` and `encode()`, and which calls wait.

A call that has yielded nothing outlives its engine: it waits here, and goes to the next generation
in order of arrival, unless it is to blame for the death, see `blame`.

Belongs to one event loop. `Dialect` hides what is peculiar to vLLM.
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
from holdfast.engine.load import EngineLoad, wake
from holdfast.engine.losses import Losses, loss_of, lost_error, quarantine_error
from holdfast.engine.request import Call, Dialect, Method
from holdfast.engine.suspicions import Suspicions
from holdfast.errors import (
    HoldfastError,
    RequestLostError,
)
from holdfast.records import Death, LossReason
from holdfast.request_context import current_request

Unsent = Callable[[Callable[[str], Iterable[str]]], frozenset[str]]

LONGEST_NAME = 128
"""A request's name is replaced if it is longer, or not made of visible ASCII characters only."""


class Calls:
    """Holds the calls of all callers, and alone decides when each may run."""

    def __init__(
        self,
        dialect: Dialect,
        suspicions: Suspicions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dialect = dialect
        self._calls: dict[Call, None] = {}  # in the order in which they came
        self._load = EngineLoad(clock)
        self._llm: Any | None = None
        self._generation = 0
        self._is_open = False
        self._end: tuple[HoldfastError, LossReason] | None = None
        self._suspicions = suspicions or Suspicions()
        self._blame = Blame(
            dialect,
            self._suspicions,
            in_step=lambda: self.in_step(),  # noqa: PLW0108 - it is set later
            refused=wake,
            clock=clock,
        )
        self._digesting = ThreadPoolExecutor(1, thread_name_prefix="holdfast-digests")
        self._losses = Losses(dialect)
        self.replayed = 0
        """How many times a call was given to a later generation."""
        self.is_paused = False
        """Whether the engine was told to stop scheduling or to sleep."""
        self.gave_up: Callable[[], None] = lambda: None
        """Called when the engine aborts requests that nobody asked it to abort."""
        self.in_step: Callable[[], Iterable[str]] = tuple
        """The engine's own names of the requests in the running steps."""
        self.unsent: Unsent = lambda _: frozenset()
        """The calls that wait for their turn and have not reached the engine at all."""

    @property
    def lost(self) -> Mapping[LossReason, int]:
        """Calls that the death of an engine ended, by reason."""
        return self._losses.counts

    @property
    def held(self) -> int:
        """How many calls wait for an engine."""
        return self._load.held

    @property
    def in_engine(self) -> int:
        """How many calls the engine has."""
        return self._load.in_engine

    @property
    def busy_since_seconds(self) -> float | None:
        """Since when the engine has owed an output to some caller; None while it owes none."""
        return self._load.busy_since_seconds

    @property
    def begun(self) -> int:
        """How many of the engine's calls its end would break: they cannot be made again."""
        return sum(
            call.is_in_engine and (call.has_yielded or not call.is_replayable)
            for call in self._calls
        )

    # The life of an engine

    def started(self, llm: Any, generation: int) -> None:
        """Record that an engine is up: the probe may use it."""
        self._llm, self._generation = llm, generation
        self._end = None
        self.is_paused = False
        self._wake()

    def opened(self) -> None:
        """Let every call use the proven engine, those that have waited longest first."""
        self._is_open, self._end = True, None
        self._wake()

    def hold(self) -> None:
        """Make new calls wait; those in the engine go on."""
        self._is_open = False

    def ended(self) -> None:
        """Record that the engine is gone: from now on calls wait."""
        self._llm, self._is_open = None, False

    def fail(self, error: HoldfastError, reason: LossReason) -> None:
        """Raise `error` in waiting calls, and in each new one until an engine starts after all."""
        self._end = (error, reason)
        self._wake()

    def has(self, is_meant: Callable[[Mapping[str, Any]], bool]) -> bool:
        """Whether any call has arguments that `is_meant` accepts."""
        return any(is_meant(call.arguments) for call in self._calls)

    def refuse(self, is_meant: Callable[[Mapping[str, Any]], bool], error: HoldfastError) -> None:
        """Raise `error` in each waiting call that `is_meant` accepts; it goes to no engine."""
        for call in self._calls:
            if is_meant(call.arguments) and not call.is_in_engine:
                call.refusal = error
        self._wake()

    def expect_aborts(self) -> None:
        """Record that the engine is being asked to abort all its requests."""
        for call in self._calls:
            call.is_abort_expected = call.is_abort_expected or call.is_in_engine

    def forgive_aborts(self) -> None:
        """Record that no abort is asked for any more: from now on an abort is a death again."""
        for call in self._calls:
            call.is_abort_expected = False

    def expect_abort(self, request_ids: frozenset[str]) -> None:
        """Record that the engine is being asked to abort these requests."""
        for call in self._calls:
            call.is_abort_expected = call.is_abort_expected or call.request_id in request_ids

    # A call

    def run(self, method: Method, arguments: Mapping[str, Any]) -> AsyncIterator[Any]:
        """Yield what the engine yields for a call, trying new generations until one yields.

        Raises what the engine raises, except its death, and these as vLLM's own exceptions:
            QuarantinedError: engines have died of this call or one like it; raised at once,
                while an answer can still have its own status.
            SuspectedError: the engine died, and the call may have caused it.
            RequestLostError: the engine died, and the call cannot be made again.
            NotReadyError: no engine will come.
        """
        named = {**arguments, "request_id": _tame(str(arguments.get("request_id", "")))}
        call = Call(
            method,
            named,
            current_request(),
            is_replayable=self._dialect.is_replayable(arguments),
            is_streamed=self._dialect.is_streamed(arguments),
        )
        if self._blame.is_quarantined(call):
            raise self._losses.lifted(call, quarantine_error(), "quarantined")
        return self._outputs(call)

    async def _outputs(self, call: Call) -> AsyncIterator[Any]:
        with self._entered(call):
            while True:
                llm = await self._turn(call)
                try:
                    with self._load.of(call):
                        async with aclosing(getattr(llm, call.method)(**call.arguments)) as outputs:
                            async for output in outputs:
                                if self._is_given_up(call, output):
                                    break
                                self._count_tokens(call, output)
                                call.has_yielded = True
                                # A slow client's reading does not count as the engine's work.
                                self._load.rests(call)
                                yield output
                                self._load.works(call)
                            else:
                                return
                except (asyncio.CancelledError, GeneratorExit):
                    self._leave(call)
                    raise
                except Exception as error:
                    if not self._dialect.is_death(error, llm):
                        raise
                    if self._dialect.is_unsent(error):
                        call.generation = 0
                self._outlive(call)
                # A waiting call must not keep the dead engine, whose sockets are collected soon.
                del llm, outputs

    @contextmanager
    def _entered(self, call: Call) -> Iterator[None]:
        self._calls[call] = None
        context = call.context
        context.engine_request_id = context.engine_request_id or call.request_id
        try:
            yield
        finally:
            del self._calls[call]

    async def _turn(self, call: Call) -> Any:
        """Return the engine as soon as the call may use it."""
        while not self._may_run(call):
            if call.refusal is not None:
                raise self._losses.lifted(call, call.refusal, loss_of(call.refusal))
            if self._end is not None:
                raise self._losses.lifted(call, *self._end)
            await self._load.woken(call)
        if call.generation:
            self.replayed += 1
            call.context.replays += 1
        call.generation = call.context.generation = self._generation
        return self._llm

    def _may_run(self, call: Call) -> bool:
        is_fresh = self._llm is not None and call.generation < self._generation
        is_admitted = call.refusal is None and (self._is_open or call.context.is_probe)
        return is_fresh and is_admitted

    def _count_tokens(self, call: Call, output: Any) -> None:
        if not call.has_yielded:
            call.context.prompt_tokens += self._dialect.prompt_tokens(output)
        call.context.output_tokens += self._dialect.new_tokens(output)

    def _is_given_up(self, call: Call, output: Any) -> bool:
        """Whether the engine answers as if asked to end, though we did not ask it."""
        if not self._dialect.is_abort(output) or call.is_abort_expected or self.is_paused:
            return False
        self.gave_up()
        return True

    def _outlive(self, call: Call) -> None:
        """Keep a call whose engine died for the next engine, or end it here."""
        if call.context.is_probe:
            raise self._dialect.lifted(RequestLostError("the engine died under the probe"))
        if call.has_yielded or not call.is_replayable:
            self._leave(call)
            reason: LossReason = "stream_broken" if call.has_yielded else "not_replayable"
            raise self._losses.lifted(call, lost_error(), reason)

    def _leave(self, call: Call) -> None:
        if not call.context.is_probe:
            # A prompt may contain hundreds of megabytes of images.
            call.digesting = self._digesting.submit(self._dialect.identity, call.arguments)
        self._blame.left(call)

    def _wake(self) -> None:
        """Let every waiting call look again, in order of arrival."""
        for call in self._calls:
            wake(call)

    # Which call is to blame

    def accuse(self, death: Death) -> Verdict:
        """Work out which calls may have caused a death, and return the verdict."""
        unsent = self.unsent(self._dialect.request_ids)
        present = [
            call
            for call in self._calls
            if call.generation == self._generation
            and not call.context.is_probe
            and call.request_id not in unsent
        ]
        return self._blame.accuse(death, present)

    async def try_suspects(self, seconds: float) -> bool:
        """Run the suspects of the last death without other calls; False if the engine dies of them.

        Suspects not tried within `seconds` are refused.
        """
        return await self._blame.try_suspects(self._survive, seconds)

    async def _survive(self, calls: Sequence[Call]) -> bool:
        """Run calls until all are past the point of the last death; False if the engine dies."""
        llm = self._llm
        running = [asyncio.create_task(self._run_past_the_point(llm, call)) for call in calls]
        try:
            await asyncio.wait(running)
            errors = [None if one.cancelled() else one.exception() for one in running]
        finally:
            for one in running:
                one.cancel()
        # A call's own error is not a death: its caller gets it when the call runs for good.
        return not any(
            isinstance(error, Exception) and self._dialect.is_death(error, llm) for error in errors
        )

    async def _run_past_the_point(self, llm: Any, call: Call) -> None:
        arguments = self._dialect.for_trial(call.method, call.arguments)
        with self._load.of(call):
            async with aclosing(getattr(llm, call.method)(**arguments)) as outputs:
                async for output in outputs:
                    is_past = self._dialect.context_tokens(output) > call.reached_tokens
                    if is_past or self._is_given_up(call, output):
                        return

    def suspended_seconds(self, key: str) -> float:
        """How long a key that has ended several engines must wait; 0 if it need not."""
        return self._suspicions.suspended_seconds(key)

    def save(self) -> None:
        """Save what is known of suspects. May wait for the disk, so not for the event loop."""
        self._suspicions.save()


def _tame(name: str) -> str:
    """Shorten a name to fit a worker's record of what it runs, but keep it distinct."""
    if len(name) <= LONGEST_NAME and name.isascii() and name.isprintable():
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    visible = "".join(one for one in name if one.isascii() and one.isprintable())
    return f"{visible[: LONGEST_NAME - len(digest) - 1]}~{digest}"
