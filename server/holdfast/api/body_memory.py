"""How much of all request bodies is in memory, and may more come in?"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

FREE_BYTES = 64 * 1024
"""So much of each body is not counted: connections are, and a short request is never turned away
for the long ones of others."""
GARBAGE_BYTES = 64 << 20
"""After bodies of this size together have been answered, what is left of them is collected."""


@dataclass(slots=True)
class Buffer:
    """What one request keeps in memory, from its first byte until it is answered."""

    buffers: Buffers
    owner: str
    size_bytes: int = 0
    counted_bytes: int = 0

    def try_reserve(self, size_bytes: int) -> bool:
        """Whether so much more may be kept; then it is."""
        counted_bytes = max(0, self.size_bytes + size_bytes - FREE_BYTES) - self.counted_bytes
        if not self.buffers.try_take(self.owner, counted_bytes):
            return False
        self.size_bytes += size_bytes
        self.counted_bytes += counted_bytes
        return True


class Buffers:
    """One owner may have no more than it leaves free, so that there is something for another.

    Alone it has a half of everything, two have a third each, and so on. Belongs to one event loop.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.taken_bytes = 0
        """What is counted of all."""
        self._taken_by: Counter[str] = Counter()
        self._answered_bytes = 0

    @contextmanager
    def buffer_of(self, owner: str) -> Iterator[Buffer]:
        """What a request of `owner` keeps while entered."""
        buffer = Buffer(self, owner)
        try:
            yield buffer
        finally:
            self.taken_bytes -= buffer.counted_bytes
            self._taken_by[owner] -= buffer.counted_bytes
            if not self._taken_by[owner]:
                del self._taken_by[owner]
            self._collect(buffer.size_bytes)

    def _collect(self, answered_bytes: int) -> None:
        """Free what an error of the parser keeps of its body: it is part of a cycle.

        FastAPI 0.136 has the exception in a variable of a frame that its traceback names. A body is
        few objects, so that Python would collect many of them late. vLLM has frozen what a start
        leaves: this takes milliseconds.
        """
        self._answered_bytes += answered_bytes
        if self._answered_bytes >= GARBAGE_BYTES:
            self._answered_bytes = 0
            gc.collect()

    def try_take(self, owner: str, size_bytes: int) -> bool:
        """Whether an owner may have so much more; then it has."""
        free_bytes = self._most_bytes - self.taken_bytes - size_bytes
        if size_bytes and self._taken_by[owner] + size_bytes > free_bytes:
            return False
        self.taken_bytes += size_bytes
        self._taken_by[owner] += size_bytes
        return True
