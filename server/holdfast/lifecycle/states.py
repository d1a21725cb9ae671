"""What state is the server in, why and since when? The states, and the only moves between them.

Everything that depends on the state (gate, health routes, metric, dashboard) derives from this
table. Only the supervisor and its helpers in `holdfast.lifecycle` change the state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from holdfast.records import Death


class State(StrEnum):
    """The states of the server."""

    STARTING = "STARTING"
    """The engine loads."""
    PROBING = "PROBING"
    """The engine answers only the probe."""
    READY = "READY"
    """The engine served the worst case, and requests are admitted."""
    RECOVERING = "RECOVERING"
    """The engine was lost and the next generation starts."""
    SLEEPING = "SLEEPING"
    """The engine gave its memory back on request."""
    DRAINING = "DRAINING"
    """The server admits no new requests, and running ones may finish."""
    FAILED = "FAILED"
    """The process is about to end with an error."""
    STOPPED = "STOPPED"
    """The engine is gone and the listener closes."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One engine of the server, and the death that it makes up for."""

    number: int = 1
    replaces: Death | None = None
    """The death of the engine that it replaces; None if none has died since the last proof."""

    @property
    def starts_in(self) -> State:
        """The state of the server until the proof begins."""
        return State.STARTING if self.replaces is None else State.RECOVERING

    def after(self, outcome: GenerationOutcome) -> Generation:
        """Return the next one; after a learned restart it makes up for the same death."""
        return Generation(self.number + 1, outcome.death or self.replaces)


@dataclass(frozen=True, slots=True)
class GenerationOutcome:
    """How a generation ended."""

    death: Death | None = None
    """None if the engine is to start again with a different reservation."""


TRANSITIONS: MappingProxyType[State, frozenset[State]] = MappingProxyType(
    {
        # STARTING after PROBING is the learned restart; RECOVERING follows the loss of a node, or
        # that of an engine before its proof.
        State.STARTING: frozenset({State.PROBING, State.RECOVERING, State.DRAINING, State.FAILED}),
        State.PROBING: frozenset(
            {State.READY, State.STARTING, State.RECOVERING, State.DRAINING, State.FAILED}
        ),
        State.READY: frozenset(
            {State.PROBING, State.RECOVERING, State.SLEEPING, State.DRAINING, State.FAILED}
        ),
        State.RECOVERING: frozenset({State.PROBING, State.DRAINING, State.FAILED}),
        State.SLEEPING: frozenset({State.PROBING, State.RECOVERING, State.DRAINING, State.FAILED}),
        State.DRAINING: frozenset({State.STOPPED, State.FAILED}),
        State.FAILED: frozenset({State.STOPPED}),
        State.STOPPED: frozenset(),
    }
)

SERVING = frozenset({State.READY})
"""States in which the gate is open and `/readyz` is 200."""

HEALTHY = frozenset({State.READY, State.SLEEPING})
"""States in which `/health` and `/ping` are 200."""

HOPELESS = frozenset({State.FAILED})
"""States in which `/livez` is 503, since the process cannot become useful again."""


def is_allowed(source: State, target: State) -> bool:
    """Whether the table has the move from `source` to `target`."""
    return target in TRANSITIONS[source]


class StateMachine:
    """Holds the state, allows only `TRANSITIONS`, and wakes those that wait for a change.

    `on_change` is called with each new state and its reason.
    """

    def __init__(self, on_change: Callable[[State, str], None]) -> None:
        self._on_change = on_change
        self._moved = asyncio.Event()
        self.state = State.STARTING
        self.reason = "loading vLLM and the model"
        """The reason for the state, in our words, which anyone may read."""
        self.detail = ""
        """What the engine or an operator said about it: for operators, since it may name paths."""
        self.since_unix_seconds = time.time()
        self.generation = Generation()
        """The generation of the engine that the state is about."""
        self.has_been_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether the server serves."""
        return self.state is State.READY

    @property
    def is_recovering(self) -> bool:
        """Whether an engine that was lost, or served, is being replaced or proven again."""
        is_back_soon = self.has_been_ready or self.generation.replaces is not None
        return self.state is State.RECOVERING or (self.state is State.PROBING and is_back_soon)

    async def until_moved(self) -> None:
        """Return when the state has changed."""
        await self._moved.wait()

    def enter(self, target: State, reason: str, detail: str = "") -> None:
        """Follow the engine into a state, or set a new reason for the present one.

        While the server drains, the engine may end and start, and the state stays DRAINING.
        """
        if target is self.state:
            self._set(target, reason, detail)
        elif self.state is not State.DRAINING:
            self.move(target, reason, detail)

    def move(self, target: State, reason: str, detail: str = "") -> None:
        """Change the state.

        Raises:
            RuntimeError: the table has no such move.
        """
        if not is_allowed(self.state, target):
            raise RuntimeError(f"no transition from {self.state} to {target}")
        self._set(target, reason, detail)

    def _set(self, state: State, reason: str, detail: str) -> None:
        if state is not self.state:
            self.state, self.since_unix_seconds = state, time.time()
        self.reason, self.detail = reason, detail
        self.has_been_ready = self.has_been_ready or state is State.READY
        self._on_change(state, f"{reason}: {detail}" if detail else reason)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
