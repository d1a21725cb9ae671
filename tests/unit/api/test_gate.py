"""A body that is read ahead of the application takes no more than its size."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from starlette.types import Message

from holdfast.api.gate import PIECE_BYTES, DisconnectWatcher

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


@pytest.mark.parametrize("size_bytes", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_a_body_that_is_not_json_comes_in_pieces(size_bytes: int) -> None:
    """A form is parsed as it is read, on the event loop, so others have a turn before each."""

    async def scene() -> None:
        body = bytes(at % 251 for at in range(size_bytes))
        coming = iter(parts(body[:5], body[5:]))
        turns = 0

        async def receive() -> Message:
            return next(coming)

        async def take_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        watcher = DisconnectWatcher(receive, is_json=False)
        assert await watcher.has_whole_body()
        others = asyncio.create_task(take_turns())
        got, turns_at = [await watcher()], [turns]
        while got[-1]["more_body"]:
            got.append(await watcher())
            turns_at.append(turns)
        others.cancel()
        assert b"".join(message["body"] for message in got) == body
        assert len(got) == max(1, -(-size_bytes // PIECE_BYTES))
        assert turns_at == sorted(set(turns_at))

    asyncio.run(scene())
