"""The states of the server and the only moves between them.

Everything that depends on the state (gate, health routes, metric, dashboard) derives from this
table. One owner, `holdfast.lifecycle.supervisor`, moves it.
"""

from __future__ import annotations

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

    def after(self, outcome: LifeOutcome) -> Generation:
        """Return the next one; after a learned restart it makes up for the same death."""
        return Generation(self.number + 1, outcome.death or self.replaces)


@dataclass(frozen=True, slots=True)
class LifeOutcome:
    """How a generation ended."""

    death: Death | None = None
    """None if the engine is to start again with a different reservation."""


TRANSITIONS: MappingProxyType[State, frozenset[State]] = MappingProxyType(
    {
        # STARTING again after PROBING is the learned restart.
        State.STARTING: frozenset({State.PROBING, State.DRAINING, State.FAILED}),
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
