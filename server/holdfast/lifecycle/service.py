"""What a proven engine may be asked for while it serves: commands, and its planned restart."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager

from holdfast.engine.interface import Engine
from holdfast.engine.replay import ReplayManager
from holdfast.errors import RETRY_AFTER_SECONDS, ConflictError, NotReadyError
from holdfast.lifecycle.death_task import DeathTask
from holdfast.lifecycle.host import Prober
from holdfast.lifecycle.operations import OperationRunner
from holdfast.lifecycle.proof import Proof
from holdfast.lifecycle.recycling import Recycler
from holdfast.lifecycle.states import State, StateMachine
from holdfast.records import Death
from holdfast.settings import SupervisionSettings
from holdfast.telemetry.counters import Recycles


class Service:
    """Runs the commands and the planned restart of one generation after the other."""

    def __init__(
        self,
        supervision: SupervisionSettings,
        state_machine: StateMachine,
        proof: Proof,
        recycles: Recycles,
        has_new_weights: Callable[[], bool],
    ) -> None:
        self._supervision = supervision
        self._state_machine = state_machine
        self._proof = proof
        self._recycles = recycles
        self._has_new_weights = has_new_weights
        self.operations: OperationRunner | None = None
        """Carries out commands to the engine that serves; None while none does."""

    def present_operations(self, eta_seconds: float | None) -> OperationRunner:
        """Return what carries out commands; `eta_seconds` is the time until READY, if it is known.

        Raises:
            ConflictError: the server ends. NotReadyError: no engine serves or sleeps.
        """
        state = self._state_machine.state
        cause = f"the server is {state}: {self._state_machine.reason}"
        if state in {State.DRAINING, State.FAILED, State.STOPPED}:
            raise ConflictError(cause)
        if self.operations is None:
            seconds = math.ceil(eta_seconds or RETRY_AFTER_SECONDS)
            remedy = "try again when the server is READY."
            raise NotReadyError(cause, retry_after_seconds=seconds, remedy=remedy)
        return self.operations

    def drain(self) -> None:
        """Cancel what would keep a server that shuts down."""
        if self.operations is not None:
            self.operations.drain()

    @asynccontextmanager
    async def running(  # noqa: PLR0913 - the supervisor lends what it has
        self,
        engine: Engine,
        requests: ReplayManager,
        death_task: DeathTask,
        *,
        prober: Callable[[], Prober],
        become_ready: Callable[[], None],
        finishing: Callable[[], AbstractContextManager[None]],
        requested_end: asyncio.Future[Death],
    ) -> AsyncIterator[None]:
        """While entered, the engine carries out commands, and is restarted when that is planned."""
        self.operations = operations = OperationRunner(
            engine,
            requests,
            death_task,
            state_machine=self._state_machine,
            proof=self._proof,
            prober=prober,
            become_ready=become_ready,
            finishing=finishing,
            requested_end=requested_end,
            drain_timeout_seconds=self._supervision.drain_timeout_seconds,
        )
        recycler = Recycler(
            engine,
            requests,
            operations,
            self._supervision,
            self._state_machine,
            self._recycles,
            has_new_weights=self._has_new_weights,
        )
        try:
            async with recycler.running():
                yield
        finally:
            self.operations = None
            await operations.end()
