"""What becomes of one HTTP request: known to the gate and to the calls that it makes of the engine.

vLLM's OpenAI layer stands between the two and passes nothing on, so that the record travels with
the context of the task.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Tracked:
    """One request. The gate makes it; whoever learns something about the request writes it down."""

    is_probe: bool = False
    """The probe's own: it goes to an engine that is not ready, and is never sent again."""
    may_be_retried: bool | None = None
    """Whether the client may send it again; None where the status code says enough."""
    is_broken: bool = False
    """Whether its answer ends in the middle."""


REQUEST: ContextVar[Tracked | None] = ContextVar("holdfast_request", default=None)
"""The request that the running task serves; None outside of any."""
