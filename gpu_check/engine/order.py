"""In which order did the workers reserve, size, seal, retire and lock?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpu_check.engine.subjects import Engine
from gpu_check.engine.witness import Event
from gpu_check.records import CheckFailedError, Measured


def locked(engine: Engine) -> Sequence[Measured]:
    """Reserved before the KV cache is sized, locked after that."""
    return _in_order(engine, "reserve", "sized", "lock")


def sealed(engine: Engine) -> Sequence[Measured]:
    """Sealed before the first capture, retired in it, locked after it."""
    return _in_order(engine, "seal", "retire", "lock")


def _in_order(engine: Engine, *names: str) -> Sequence[Measured]:
    lives = _by_process(engine.events())
    if not lives:
        raise CheckFailedError("no worker has written what happened to its workspaces")
    for pid, events in lives.items():
        firsts = [next((e.at_seconds for e in events if e.name == name), None) for name in names]
        known = [at_seconds for at_seconds in firsts if at_seconds is not None]
        if len(known) < len(names) or known != sorted(known):
            told = ", ".join(event.name for event in events)
            raise CheckFailedError(f"process {pid} did: {told}; not {', '.join(names)} in order")
    return [
        Measured(f"events of rank {events[0].rank}", ", ".join(event.name for event in events))
        for events in lives.values()
    ]


def _by_process(events: Sequence[Event]) -> Mapping[int, list[Event]]:
    lives: dict[int, list[Event]] = {}
    for event in events:
        lives.setdefault(event.pid, []).append(event)
    return lives
