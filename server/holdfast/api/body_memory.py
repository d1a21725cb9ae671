"""How much memory do all request bodies take, and may they take more?"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

FREE_BYTES = 64 * 1024
"""The first bytes of each body are not counted: connections are limited, and a short request is
never refused because of the long ones of others."""
GARBAGE_BYTES = 64 << 20
"""After answering bodies of this total size, the garbage that they left is collected."""


@dataclass(slots=True)
class Buffer:
    """The memory that the body of one request takes, from its first byte until the answer."""

    buffers: Buffers
    owner: str
    size_bytes: int = 0
    counted_bytes: int = 0

    def try_reserve(self, size_bytes: int) -> bool:
        """Reserve memory for more of the body; False, without an effect, if there is too little."""
        counted_bytes = max(0, self.size_bytes + size_bytes - FREE_BYTES) - self.counted_bytes
        if not self.buffers.try_take(self.owner, counted_bytes):
            return False
        self.size_bytes += size_bytes
        self.counted_bytes += counted_bytes
        return True


class Buffers:
    """The memory of all request bodies. An owner may take at most as much as it leaves free.

    A single owner gets half of the total, two get a third each, and so on. It belongs to one event
    loop.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.taken_bytes = 0
        """The counted bytes of all owners."""
        self._taken_by: Counter[str] = Counter()
        self._answered_bytes = 0

    @contextmanager
    def buffer_of(self, owner: str) -> Iterator[Buffer]:
        """Yield the buffer of a request of `owner`, whose memory is returned at the end."""
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
        """Free the bodies that parser errors keep alive: they are part of reference cycles.

        FastAPI 0.136 keeps the exception in a variable of a frame that its traceback refers to. A
        body is only a few objects, so Python would collect many bodies late. vLLM freezes the
        objects of the start, so a collection takes milliseconds.
        """
        self._answered_bytes += answered_bytes
        if self._answered_bytes >= GARBAGE_BYTES:
            self._answered_bytes = 0
            gc.collect()

    def try_take(self, owner: str, size_bytes: int) -> bool:
        """Take memory for an owner; False, without any effect, if it would have too much."""
        free_bytes = self._most_bytes - self.taken_bytes - size_bytes
        if size_bytes and self._taken_by[owner] + size_bytes > free_bytes:
            return False
        self.taken_bytes += size_bytes
        self._taken_by[owner] += size_bytes
        return True
