"""What becomes of one HTTP request: known to the front door and to the calls it makes.

vLLM's OpenAI layer stands between the two and passes nothing on, so that the record travels with
the context of the task.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Tracked:
    """One request. The front door makes it; whoever learns something of it writes it down."""

    request_id: str = ""
    """As the client named it, or as we did; the answer carries it."""
    key: str = ""
    """The name of the key that the request came with, never the key; empty where none is needed."""
    is_probe: bool = False
    """The probe's own: it goes to an engine that is not ready, and is never sent again."""
    may_be_retried: bool | None = None
    """Whether the client may send it again; None where the status code says enough."""
    is_broken: bool = False
    """Whether its answer ends in the middle."""


REQUEST: ContextVar[Tracked | None] = ContextVar("holdfast_request", default=None)
"""The request that the running task serves; None outside of any."""


def tracked_request() -> Tracked:
    """The record of the request that the running task serves, made now if there is none."""
    if (tracked := REQUEST.get()) is None:
        tracked = Tracked()
        REQUEST.set(tracked)
    return tracked
