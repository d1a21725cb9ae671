"""A server that limits its requests is waited for, and no work outlives what asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.verify.waiting import LimitedError, is_limited, is_too_many, together, until_admitted


def refusing(times: int, retry_after: str = "0", status: int = 429) -> Any:
    """A server that refuses as often."""
    left = times

    async def ask(**_: float) -> Any:
        nonlocal left
        left -= 1
        return SimpleNamespace(status=status if left >= 0 else 200, retry_after=retry_after)

    return ask


def test_a_request_is_made_again_until_it_is_let_in() -> None:
    """Each wait is noted."""
    waits: list[int] = []
    answer = asyncio.run(until_admitted(refusing(2), 60.0, waits.append))
    assert (answer.status, waits) == (200, [429, 429])


@pytest.mark.parametrize(
    ("retry_after", "is_refused", "status"),
    [("0", is_limited, 200), ("", is_limited, 503), ("0", is_too_many, 503)],
)
def test_503_is_a_refusal_for_now_only_where_it_says_until_when(
    retry_after: str, is_refused: Callable[[Any], bool], status: int
) -> None:
    """As gateways say it under load; without that, the server may be broken."""
    ask = refusing(1, retry_after, 503)
    assert asyncio.run(until_admitted(ask, 60.0, is_refused=is_refused)).status == status


@pytest.mark.parametrize(
    ("status", "advice"),
    [(429, "429.*give --api-key-file a key without limits"), (503, "503.*see whether it still")],
)
def test_a_wait_beyond_the_deadline_is_not_begun(status: int, advice: str) -> None:
    """A server may ask for a day; what helps depends on how it says so."""
    with pytest.raises(LimitedError, match=advice):
        asyncio.run(until_admitted(refusing(1, "86400", status), 60.0))


def test_all_have_ended_when_one_fails() -> None:
    """What is left of a check would share the engine with the next one."""
    ended: list[str] = []

    async def fail() -> None:
        raise RuntimeError("this one fails")

    async def last() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("last")

    async def scene() -> None:
        with pytest.raises(RuntimeError, match="this one fails"):
            await together(last(), fail())
        assert ended == ["last"]

    asyncio.run(scene())


def test_what_all_return_is_in_order() -> None:
    """Whichever ends first."""

    async def later(value: int) -> int:
        for _ in range(3 - value):
            await asyncio.sleep(0)
        return value

    async def scene() -> list[int]:
        return await together(*map(later, range(3)))

    assert asyncio.run(scene()) == [0, 1, 2]
