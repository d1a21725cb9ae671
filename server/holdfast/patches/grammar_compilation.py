"""Bounds how long the grammar of a request may compile in an EngineCore, and wait for its turn.

Native code cannot be interrupted, so the thread of a grammar that was given up compiles to the end.
Meanwhile its request ends.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

COMPILES_TOO_LONG = "holdfast: the grammar compiled for too long"
NOT_COMPILED = "holdfast: the grammar waited too long to be compiled"
MAX_QUEUE_SECONDS = 600.0
"""How long a grammar waits for one of vLLM's threads. They are few, and after a death all grammars
come at once: the time that others take does not count as its own."""


class GivenUpGrammar:
    """Replaces a grammar that was not compiled in time, and accepts no token."""

    def __init__(self, stop_reason: str) -> None:
        self.stop_reason = stop_reason

    def filling(self, _drafts: list[int]) -> None:
        """Return no job."""

    def end_drafts(self) -> None:
        """Do nothing."""

    def accept_tokens(self, _request_id: str, _tokens: list[int]) -> bool:
        """Accept no token, which ends the request."""
        return False

    def validate_tokens(self, _tokens: list[int]) -> list[int]:
        """Accept no draft."""
        return []

    def is_terminated(self) -> bool:
        """Whether anything may follow."""
        return True


class Compilation(Future[Any]):
    """vLLM's future of a grammar, which is done by its deadline.

    It may compile for `seconds`, from when vLLM first sees that a thread has begun.
    """

    def __init__(self, compiling: Future[Any], seconds: float) -> None:
        super().__init__()
        self._compiling = compiling
        self._seconds = seconds
        self._has_begun = False
        self._deadline_seconds = time.monotonic() + MAX_QUEUE_SECONDS

    def done(self) -> bool:
        now_seconds = time.monotonic()
        if not self._has_begun and self._compiling.running():
            self._has_begun, self._deadline_seconds = True, now_seconds + self._seconds
        return self._compiling.done() or now_seconds >= self._deadline_seconds

    def result(self, timeout: float | None = None) -> Any:
        if not self._compiling.done():
            self._compiling.cancel()
            return GivenUpGrammar(COMPILES_TOO_LONG if self._has_begun else NOT_COMPILED)
        return self._compiling.result(timeout)
