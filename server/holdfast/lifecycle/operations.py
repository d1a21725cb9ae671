"""A proven engine at work: what operators may ask of it, one thing at a time, until its end.

The engine is proven, put to sleep and ended only when nothing of a client is in it, so that each
order begins in the same way: what comes waits, and what runs has until the drain time-out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from holdfast.engine.interface import Engine
from holdfast.engine.replay import Calls
from holdfast.errors import ConflictError, HoldfastError, NotReadyError
from holdfast.lifecycle.commands import (
    Order,
    ProbeOrder,
    Proven,
    ProvenSuite,
    Rest,
    RestartOrder,
    SleepOrder,
    WakeOrder,
)
from holdfast.lifecycle.proof import Prober, Proof, failure
from holdfast.lifecycle.races import Fate
from holdfast.lifecycle.state_machine import Standing
from holdfast.lifecycle.states import State
from holdfast.records import SLEEP_TAGS, Death, ProbeReport, SleepTag

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05


class Service:
    """One generation from its proof to its end. Belongs to the supervisor."""

    def __init__(  # noqa: PLR0913 - the supervisor lends what it has
        self,
        engine: Engine,
        calls: Calls,
        fate: Fate,
        *,
        standing: Standing,
        proof: Proof,
        prober: Callable[[], Prober],
        open_up: Callable[[], None],
        condemned: asyncio.Future[Death],
        patience_seconds: float,
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._fate = fate
        self._standing = standing
        self._proof = proof
        self._prober = prober
        self._open_up = open_up
        self._condemned = condemned
        self._patience_seconds = patience_seconds
        self._proofs: dict[ProvenSuite, tuple[float, ProbeReport]] = {}
        self._asleep = frozenset[SleepTag]()
        self._running: tuple[Order, asyncio.Task[Any], asyncio.Future[Any]] | None = None

    def take(self, order: Order) -> asyncio.Future[Any]:
        """Begin to carry an order out; its answer, or why there is none. Like ones are one.

        Raises:
            ConflictError: another one is being carried out, or the state forbids it.
        """
        if self._running is not None:
            running, _, answer = self._running
            if running == order:
                return answer
            raise ConflictError(
                f"{running} is already in progress.", remedy="try again when it has finished."
            )
        work = self._work(order)
        answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_heard)
        task = asyncio.create_task(work, name=f"order: {order}")
        self._running = (order, task, answer)
        task.add_done_callback(lambda _: self._answer(task, answer))
        return answer

    def drain(self) -> None:
        """Nothing new is begun; a proof that somebody asked for is not worth to wait for."""
        if self._running is not None and isinstance(self._running[0], ProbeOrder | RestartOrder):
            self._running[1].cancel()

    async def end(self) -> None:
        """Break off what is being carried out."""
        if self._running is not None:
            _, task, _ = self._running
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})

    def _work(self, order: Order) -> Coroutine[Any, Any, Any]:
        if self._has_died:
            raise ConflictError(
                "the engine is shutting down.", remedy="try again when the next one is READY."
            )
        is_asleep = self._standing.state is State.SLEEPING
        match order:
            case WakeOrder():
                if not is_asleep:
                    raise ConflictError("the server is not asleep")
                return self._wake(order)
            case RestartOrder():
                return self._restart(order, is_asleep=is_asleep)
            case _ if is_asleep:
                raise ConflictError("the server is asleep.", remedy="wake it first.")
            case SleepOrder():
                self._require_sleep_mode()
                return self._sleep(order)
            case ProbeOrder():
                return self._probe(order)

    def _answer(self, task: asyncio.Task[Any], answer: asyncio.Future[Any]) -> None:
        self._running = None
        if answer.done():
            return
        if not task.cancelled():
            error = task.exception()
            answer.set_exception(error) if error else answer.set_result(task.result())
            return
        died = self._fate.done() and not self._fate.cancelled()
        cause = f"the engine died: {self._fate.result()}" if died else "the server is shutting down"
        answer.set_exception(NotReadyError(cause))

    # Orders

    async def _probe(self, order: ProbeOrder) -> Proven:
        if (known := self._known(order)) is not None:
            return known
        async with self._quiet(str(order)):
            self._standing.enter(State.PROBING, f"running {order}, as requested")
            report = await self._prove(order.suite)
        return Proven(report, 0.0)

    async def _sleep(self, order: SleepOrder) -> Rest:
        async with self._quiet(str(order), is_abrupt=order.is_abrupt):
            self._standing.enter(State.SLEEPING, f"level {order.level}, as requested")
            self._calls.expect_aborts()
            self._asleep = SLEEP_TAGS
            await self._ask(self._engine.sleep(order.level))
        self._calls.fail(NotReadyError("The server is asleep."), "drained")
        return Rest(self._asleep)

    async def _wake(self, order: WakeOrder) -> Rest:
        self._asleep = await self._ask(self._engine.wake(order.tags))
        if self._asleep:
            self._standing.enter(State.SLEEPING, f"still asleep: {', '.join(sorted(self._asleep))}")
            return Rest(self._asleep)
        self._standing.enter(State.PROBING, "awake again, running the quick suite")
        report = await self._prove("quick")
        self._reopen()
        return Rest(self._asleep, report)

    async def _restart(self, order: RestartOrder, *, is_asleep: bool) -> None:
        self._calls.hold()
        self._standing.enter(State.RECOVERING, "restarting, as requested", order.reason)
        try:
            if not is_asleep and not await self._until(lambda: not self._calls.begun):
                logger.warning("the restart cuts off %d answers", self._calls.begun)
        except asyncio.CancelledError:
            self._reopen()
            raise
        self._condemn(Death("requested", order.reason))

    # What they have in common

    @asynccontextmanager
    async def _quiet(self, what: str, *, is_abrupt: bool = False) -> AsyncIterator[None]:
        """While entered, nothing of a client is in the engine, and what comes waits.

        Raises:
            ConflictError: requests ran for longer than the drain time-out; they run on.
        """
        self._calls.hold()
        try:
            if not is_abrupt and not await self._until(lambda: not self._calls.in_engine):
                raise ConflictError(
                    f"{self._calls.in_engine} requests were still running after "
                    f"{self._patience_seconds:.0f} s, so there was no time for {what}.",
                    remedy="try again when fewer requests are running, or raise --drain-timeout.",
                )
            if self._standing.state is not State.READY:
                raise ConflictError(f"the server is {self._standing.state}")
            yield
        finally:
            self._reopen()

    async def _until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition, but not longer than the drain time-out."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_seconds):
                while not condition():  # noqa: ASYNC110 - an event would cost every request
                    await asyncio.sleep(POLL_SECONDS)
        return condition()

    def _reopen(self) -> None:
        """Serve again, unless the engine is asleep, lost or about to be."""
        if not self._asleep and not self._has_died:
            self._open_up()

    async def _prove(self, suite: ProvenSuite) -> ProbeReport:
        """Run a suite; an engine that fails it is ended, since its green light would be false."""
        report = await self._proof.give_again(self._engine, self._prober(), self._fate, suite)
        if report.passed:
            self._proofs[suite] = (time.monotonic(), report)
        else:
            self._condemn(Death("unknown", f"it failed the probe in {failure(report)}"))
        return report

    def _known(self, order: ProbeOrder) -> Proven | None:
        now = time.monotonic()
        known = [
            Proven(report, now - at)
            for suite, (at, report) in self._proofs.items()
            if suite in {order.suite, "worst-case"} and now - at <= order.youngest_seconds
        ]
        return min(known, key=lambda proven: proven.age_seconds, default=None)

    async def _ask(self, asked: Coroutine[Any, Any, Any]) -> Any:
        """Have the engine change; where that fails nobody knows what it is, and it is ended."""
        try:
            return await asked
        except HoldfastError as error:
            self._condemn(Death("unknown", error.cause))
            raise

    def _condemn(self, death: Death) -> None:
        if not self._condemned.done():
            self._condemned.set_result(death)

    @property
    def _has_died(self) -> bool:
        return self._fate.done() or self._condemned.done()

    def _require_sleep_mode(self) -> None:
        if not self._engine.facts.has_sleep_mode:
            raise ConflictError(
                "sleep mode is off.",
                remedy="start with --enable-sleep-mode; vLLM supports it on GPUs, not on the CPU.",
            )


def _heard(answer: asyncio.Future[Any]) -> None:
    """Take note of an error that nobody may wait for, such as that of a restart."""
    if not answer.cancelled():
        answer.exception()
