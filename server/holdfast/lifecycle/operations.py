"""Commands to a proven engine, of operators and of `recycling`, one at a time until it ends.

The engine is proven, put to sleep and ended only when it works on no request of a client. Each
command therefore begins in the same way: new requests wait, and running ones have until the drain
timeout. A client that reads slowly keeps nobody waiting once the engine is done with its request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any

from holdfast.engine.interface import Engine
from holdfast.engine.replay import ReplayManager
from holdfast.errors import ConflictError, HoldfastError, NotReadyError
from holdfast.labels import SLEEP_TAGS, SleepTag
from holdfast.lifecycle.commands import (
    Command,
    ProbeCommand,
    ProbeResult,
    ProvenSuite,
    RestartCommand,
    SleepCommand,
    SleepResult,
    WakeCommand,
)
from holdfast.lifecycle.death_task import DeathTask
from holdfast.lifecycle.host import Prober
from holdfast.lifecycle.proof import MAX_PASSES, Proof, failure_text
from holdfast.lifecycle.states import State, StateMachine
from holdfast.records import Death, ProbeReport
from holdfast.settings import ProbeSettings, SupervisionSettings

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
COMMAND_MARGIN_SECONDS = 900.0
"""The time for an engine to sleep and wake, in addition to the drain and the proof."""


class OperationRunner:
    """Carries out the commands to one generation, from its proof to its end."""

    def __init__(  # noqa: PLR0913 - the supervisor lends what it has
        self,
        engine: Engine,
        requests: ReplayManager,
        death_task: DeathTask,
        *,
        state_machine: StateMachine,
        proof: Proof,
        prober: Callable[[], Prober],
        become_ready: Callable[[], None],
        finishing: Callable[[], AbstractContextManager[None]],
        requested_end: asyncio.Future[Death],
        drain_timeout_seconds: float,
    ) -> None:
        """Take `finishing`, which is entered while the engine finishes its work for a restart."""
        self._engine = engine
        self._requests = requests
        self._death_task = death_task
        self._state_machine = state_machine
        self._proof = proof
        self._prober = prober
        self._become_ready = become_ready
        self._finishing = finishing
        self._requested_end = requested_end
        self._drain_timeout_seconds = drain_timeout_seconds
        self._proofs: dict[ProvenSuite, tuple[float, ProbeReport]] = {}
        self._asleep = frozenset[SleepTag]()
        self._running: tuple[Command, asyncio.Task[Any], asyncio.Future[Any]] | None = None

    def submit(self, command: Command) -> asyncio.Future[Any]:
        """Begin to carry out a command, and return its result; equal commands share one.

        Raises:
            ConflictError: another command is being carried out, or the state forbids it.
        """
        if self._running is not None:
            running, _, answer = self._running
            if running == command:
                return answer
            raise ConflictError(
                f"{running} is already in progress.", remedy="try again when it has finished."
            )
        operation = self._operation(command)
        answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_retrieve_error)
        task = asyncio.create_task(operation, name=f"command: {command}")
        self._running = (command, task, answer)
        task.add_done_callback(lambda _: self._answer(task, answer))
        return answer

    def drain(self) -> None:
        """Cancel a running probe or restart, since the server is shutting down."""
        if self._running is not None and isinstance(
            self._running[0], ProbeCommand | RestartCommand
        ):
            self._running[1].cancel()

    async def end(self) -> None:
        """Cancel the running command."""
        if self._running is not None:
            _, task, _ = self._running
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})

    def _operation(self, command: Command) -> Coroutine[Any, Any, Any]:
        if self._has_died:
            raise ConflictError(
                "the engine is shutting down.", remedy="try again when the next one is READY."
            )
        is_asleep = self._state_machine.state is State.SLEEPING
        match command:
            case WakeCommand():
                if not is_asleep:
                    raise ConflictError(
                        "the server is not asleep.", remedy="see its state in /statusz."
                    )
                return self._wake(command)
            case RestartCommand():
                if command.is_planned:
                    self._require_steps()
                return self._restart(command, is_asleep=is_asleep)
            case _ if is_asleep:
                raise ConflictError("the server is asleep.", remedy="wake it first.")
            case SleepCommand():
                self._require_sleep_mode()
                self._require_steps()
                return self._sleep(command)
            case ProbeCommand():
                self._require_steps()
                return self._probe(command)

    def _answer(self, task: asyncio.Task[Any], answer: asyncio.Future[Any]) -> None:
        self._running = None
        if answer.done():
            return
        if not task.cancelled():
            error = task.exception()
            answer.set_exception(error) if error else answer.set_result(task.result())
            return
        is_dead = self._death_task.done() and not self._death_task.cancelled()
        cause = (
            f"the engine died: {self._death_task.result()}"
            if is_dead
            else "the server is shutting down"
        )
        answer.set_exception(NotReadyError(cause))

    # Commands

    async def _probe(self, command: ProbeCommand) -> ProbeResult:
        if (recent := self._recent_proof(command)) is not None:
            return recent
        # What the last engine left behind waits for the end of the proof, and loses nothing.
        async with self._idle_engine(str(command), has_left_behind=False):
            self._state_machine.enter(State.PROBING, f"running {command}, as requested")
            report = await self._prove(command.suite)
        return ProbeResult(report, 0.0)

    async def _sleep(self, command: SleepCommand) -> SleepResult:
        async with self._idle_engine(str(command), is_abrupt=command.is_abrupt):
            self._state_machine.enter(State.SLEEPING, f"level {command.level}, as requested")
            self._requests.aborts.expect_all()
            self._asleep = SLEEP_TAGS
            await self._change_engine(self._engine.sleep(command.level))
        self._requests.fail(NotReadyError("The server is asleep."), "drained")
        return SleepResult(self._asleep)

    async def _wake(self, command: WakeCommand) -> SleepResult:
        self._asleep = await self._change_engine(self._engine.wake(command.tags))
        if self._asleep:
            self._state_machine.enter(
                State.SLEEPING, f"still asleep: {', '.join(sorted(self._asleep))}"
            )
            return SleepResult(self._asleep)
        self._state_machine.enter(State.PROBING, "awake again, running the quick suite")
        report = await self._prove("quick")
        self._reopen()
        return SleepResult(self._asleep, report)

    async def _restart(self, command: RestartCommand, *, is_asleep: bool) -> None:
        self._requests.hold()
        why = "as planned" if command.is_planned else "as requested"
        try:
            with self._finishing():
                self._state_machine.enter(State.RECOVERING, f"restarting, {why}", command.reason)
                if not is_asleep:
                    await self._until(lambda: not self._requests.lost_with_engine)
                    if cut_off := self._requests.lost_with_engine:
                        logger.warning("the restart cuts off %d answers", cut_off)
        except asyncio.CancelledError:
            self._reopen()
            raise
        self._request_end(Death("requested", command.reason))

    # What the commands share

    @asynccontextmanager
    async def _idle_engine(
        self, what: str, *, is_abrupt: bool = False, has_left_behind: bool = True
    ) -> AsyncIterator[None]:
        """While entered, the engine works on no request of a client, and new ones wait.

        Raises:
            ConflictError: requests ran for longer than the drain timeout, or the server began to
                shut down or the engine was paused meanwhile; they continue.
        """
        self._requests.hold()
        presence = self._requests.presence
        unfinished = partial(presence.unfinished, has_left_behind=has_left_behind)
        try:
            if not is_abrupt:
                await self._until(lambda: not (self._state_machine.is_ready and unfinished()))
            if not self._state_machine.is_ready:
                raise ConflictError(f"the server is {self._state_machine.state}")
            if not is_abrupt and (left := len(unfinished())):
                raise ConflictError(
                    f"{left} requests were still running after "
                    f"{self._drain_timeout_seconds:.0f} s, so there was no time for {what}.",
                    remedy="try again when fewer requests are running, or raise --drain-timeout.",
                )
            self._require_steps()
            yield
        finally:
            self._reopen()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, at most for the drain timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout_seconds):
                while not condition():  # noqa: ASYNC110 - an event would cost every request
                    await asyncio.sleep(POLL_SECONDS)

    def _reopen(self) -> None:
        """Serve again, unless the engine is asleep or ending."""
        if not self._asleep and not self._has_died:
            self._become_ready()

    async def _prove(self, suite: ProvenSuite) -> ProbeReport:
        """Run a suite, and end an engine that fails it, since its green light would be false.

        So it would be if the suite itself fails, for example because no file can be opened.
        """
        try:
            report = await self._proof.prove_again(
                self._engine, self._prober(), self._death_task, suite
            )
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._request_end(Death("unknown", f"the probe could not run: {error}"))
            raise
        if report.passed:
            self._proofs[suite] = (time.monotonic(), report)
        else:
            self._request_end(Death("unknown", f"it failed the probe in {failure_text(report)}"))
        return report

    def _recent_proof(self, command: ProbeCommand) -> ProbeResult | None:
        now = time.monotonic()
        recent = [
            ProbeResult(report, now - at)
            for suite, (at, report) in self._proofs.items()
            if suite in {command.suite, "worst-case"} and now - at <= command.youngest_seconds
        ]
        return min(recent, key=lambda result: result.age_seconds, default=None)

    async def _change_engine(self, change: Coroutine[Any, Any, Any]) -> Any:
        """Change the engine, and end it if that fails, since its condition is then unknown."""
        try:
            return await change
        except HoldfastError as error:
            self._request_end(Death("unknown", error.cause))
            raise

    def _request_end(self, death: Death) -> None:
        if not self._requested_end.done():
            self._requested_end.set_result(death)

    @property
    def _has_died(self) -> bool:
        return self._death_task.done() or self._requested_end.done()

    def _require_steps(self) -> None:
        """Refuse what would cut off a save, or take a pause for a hang."""
        if self._engine.is_paused or self._requests.aborts.is_paused:
            raise ConflictError(
                "the engine is not running steps: it saves its state or a profile, or is paused.",
                remedy="try again when it has finished, or resume it.",
            )

    def _require_sleep_mode(self) -> None:
        if not self._engine.facts.has_sleep_mode:
            raise ConflictError(
                "sleep mode is off.",
                remedy="start with --enable-sleep-mode; vLLM supports it on GPUs, not on the CPU.",
            )


def command_deadline_seconds(probe: ProbeSettings, supervision: SupervisionSettings) -> float:
    """Return the time in which any command of an operator has ended."""
    passes_seconds = MAX_PASSES * probe.timeout_seconds
    return supervision.drain_timeout_seconds + passes_seconds + COMMAND_MARGIN_SECONDS


def _retrieve_error(answer: asyncio.Future[Any]) -> None:
    """Retrieve an error that may have no reader, such as that of a restart."""
    if not answer.cancelled():
        answer.exception()
