"""A body that is read ahead of the application takes no more than its size."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from starlette.types import Message

from holdfast.api.gate import DisconnectWatcher

LEFT: Message = {"type": "http.disconnect"}


def parts(*bodies: bytes) -> list[Message]:
    """A body in parts, as a server has them."""
    last = len(bodies) - 1
    return [
        {"type": "http.request", "body": body, "more_body": at < last}
        for at, body in enumerate(bodies)
    ]


def read_ahead(messages: Iterable[Message]) -> tuple[bool, list[Message]]:
    """Whether the body came whole, and what the application gets then."""

    async def read() -> tuple[bool, list[Message]]:
        coming = iter(messages)

        async def receive() -> Message:
            return next(coming, LEFT)

        watcher = DisconnectWatcher(receive)
        is_whole = await watcher.has_whole_body()
        got = [await watcher()]
        while got[-1] != LEFT:
            got.append(await watcher())
        return is_whole, got

    return asyncio.run(read())


@pytest.mark.parametrize(
    "bodies", [[b"abc"], [b"a", b"bc"], [b"", b"abc", b""], [b"a", b"b", b"c"]]
)
def test_a_body_is_one_part_for_the_application(bodies: list[bytes]) -> None:
    """In however many it came: each would take hundreds of bytes, and a client may send one."""
    whole = {"type": "http.request", "body": b"abc", "more_body": False}
    assert read_ahead(parts(*bodies)) == (True, [whole, LEFT])


def test_a_client_that_leaves_in_the_middle_is_told() -> None:
    """The application gets no half of a body for a whole one."""
    assert read_ahead(parts(b"a", b"b", b"c")[:2]) == (False, [LEFT])
