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
    """Where the server stands."""

    STARTING = "STARTING"
    """The engine loads; nothing is known of it yet."""
    PROBING = "PROBING"
    """The engine answers the probe, and nobody else."""
    READY = "READY"
    """The worst case was served: requests are let in."""
    RECOVERING = "RECOVERING"
    """The engine was lost and the next generation starts."""
    SLEEPING = "SLEEPING"
    """The engine gave its memory back on request."""
    DRAINING = "DRAINING"
    """No new requests; those that run may finish."""
    FAILED = "FAILED"
    """Nothing more will come of this process: it is about to end with an error."""
    STOPPED = "STOPPED"
    """The engine is gone and the listener closes."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One engine of the server, and why it follows the one before."""

    number: int = 1
    replaces: Death | None = None
    """The death that it makes up for; None if no engine has died since the last proof."""

    @property
    def starts_in(self) -> State:
        """Where the server stands until the proof begins."""
        return State.STARTING if self.replaces is None else State.RECOVERING

    def after(self, outcome: LifeOutcome) -> Generation:
        """The one that follows; a learned restart makes up for the same death again."""
        return Generation(self.number + 1, outcome.death or self.replaces)


@dataclass(frozen=True, slots=True)
class LifeOutcome:
    """How a generation ended."""

    death: Death | None = None
    """None if it is to start again with what it needed."""


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
"""States in which `/livez` is 503: the process can no longer become useful."""


def is_allowed(source: State, target: State) -> bool:
    """Whether the table has the move from `source` to `target`."""
    return target in TRANSITIONS[source]
