"""Every call of `generate()` and `encode()`: which generation has it, and which ones wait.

A call that has yielded nothing outlives its engine: it waits here, and goes to the next generation
in the order in which all of them came, unless it is to blame for the death, see `blame`.

Belongs to one event loop. What is peculiar to vLLM is behind `Dialect`.
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
"""A longer name of a request, or one of other characters than ASCII's visible ones, is replaced."""


class Calls:
    """The calls of all callers, and the one place that decides when each may run."""

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
        """Calls that were given to another generation than the first."""
        self.is_paused = False
        """Whether somebody told the engine not to schedule, or to sleep."""
        self.gave_up: Callable[[], None] = lambda: None
        """Called when the engine gives requests up that nobody asked it to."""
        self.in_step: Callable[[], Iterable[str]] = tuple
        """What the engine calls the requests of the steps that run now."""
        self.unsent: Unsent = lambda _: frozenset()
        """The calls that wait for their turn, of which the engine has had nothing."""

    @property
    def lost(self) -> Mapping[LossReason, int]:
        """Calls that the death of an engine ended, by reason."""
        return self._losses.counts

    @property
    def held(self) -> int:
        """Calls that wait for an engine."""
        return self._load.held

    @property
    def in_engine(self) -> int:
        """Calls that the engine has."""
        return self._load.in_engine

    @property
    def busy_since_seconds(self) -> float | None:
        """Since when the engine has owed somebody an output; None while it owes nobody one."""
        return self._load.busy_since_seconds

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

    def run(self, method: Method, arguments: Mapping[str, Any]) -> AsyncIterator[Any]:
        """What the engine yields for a call; from as many generations as it takes to get a first.

        Raises what the engine raises, but for its death, and, lifted to vLLM's own:
            QuarantinedError: engines have died of the call, or of one like it; raised at once,
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
                                # A client that reads slowly is no work of the engine.
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
                # While it waits it must not keep the dead engine, whose sockets are collected soon.
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
        """The engine, as soon as the call may use it."""
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
        """Whether the engine answers as one does that was asked to end, unknown to us."""
        if not self._dialect.is_abort(output) or call.is_abort_expected or self.is_paused:
            return False
        self.gave_up()
        return True

    def _outlive(self, call: Call) -> None:
        """The engine died under the call: it stays for the next, or ends here."""
        if call.context.is_probe:
            raise self._dialect.lifted(RequestLostError("the engine died under the probe"))
        if call.has_yielded or not call.is_replayable:
            self._leave(call)
            reason: LossReason = "stream_broken" if call.has_yielded else "not_replayable"
            raise self._losses.lifted(call, lost_error(), reason)

    def _leave(self, call: Call) -> None:
        if not call.context.is_probe:
            # A prompt may have hundreds of megabytes of images.
            call.digesting = self._digesting.submit(self._dialect.identity, call.arguments)
        self._blame.left(call)

    def _wake(self) -> None:
        """Let everybody who waits look again, in the order in which they came."""
        for call in self._calls:
            wake(call)

    # Who is to blame

    def accuse(self, death: Death) -> Verdict:
        """Take in who may have caused a death, and say what it has shown."""
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
        """Let the suspects of the last death run without others; False if the engine dies of them.

        Those that have not been tried after `seconds` are refused.
        """
        return await self._blame.try_suspects(self._survive, seconds)

    async def _survive(self, calls: Sequence[Call]) -> bool:
        """Run them until all are past the point of the last death; False if the engine dies."""
        llm = self._llm
        running = [asyncio.create_task(self._run_past_the_point(llm, call)) for call in calls]
        try:
            await asyncio.wait(running)
            errors = [None if one.cancelled() else one.exception() for one in running]
        finally:
            for one in running:
                one.cancel()
        # An error of its own is not a death: its caller gets it when it runs for good.
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
        """How long a key has to wait that has ended several engines; 0 if it need not."""
        return self._suspicions.suspended_seconds(key)

    def save(self) -> None:
        """Write down what is known of suspects. May wait for the disk: not for the event loop."""
        self._suspicions.save()


def _tame(name: str) -> str:
    """A name that fits where a worker writes down what it runs, and still tells two apart."""
    if len(name) <= LONGEST_NAME and name.isascii() and name.isprintable():
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    visible = "".join(one for one in name if one.isascii() and one.isprintable())
    return f"{visible[: LONGEST_NAME - len(digest) - 1]}~{digest}"
