"""What request bodies may keep in memory, and what is left of them."""

from __future__ import annotations

import weakref

from holdfast.api.body_memory import GARBAGE_BYTES, Buffers


class Cycle:
    """What refers to itself, as the exception of a parser does that has its body."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_left_of_answered_bodies_is_collected() -> None:
    """They are few objects: Python alone would let many of them come together."""
    buffers = Buffers(4 * GARBAGE_BYTES)
    left: list[weakref.ref[Cycle]] = []
    for size_bytes in (GARBAGE_BYTES - 1, 1):
        with buffers.buffer_of("key") as buffer:
            assert buffer.try_reserve(size_bytes)
            left.append(weakref.ref(Cycle()))
    assert [one() for one in left] == [None, None]
