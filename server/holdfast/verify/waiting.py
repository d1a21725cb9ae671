"""Waits for a server that limits its requests, and for several answers at once."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from holdfast.verify.streams import StreamedAnswer
from holdfast.verify.target import PATIENT_SECONDS, Answer

TOO_MANY = 429
UNAVAILABLE = 503
AT_ONCE = 8
"""How many requests a check sends together."""
QUEUED_SECONDS = AT_ONCE * PATIENT_SECONDS
"""For the answers of such a check: a server may have one slot, where a request waits for others."""
LIMITED_REMEDY = "give --api-key-file a key without limits, or wait until others ask for less"
_LIMITED = f"the server limits its requests (429); {LIMITED_REMEDY}"
_AWAY = (
    "the server refuses requests for now (503 with Retry-After); "
    "see whether it still runs, or wait until others ask for less"
)
_WAIT_SECONDS = 1.0
"""After a refusal that does not say how long."""
_LEAST_WAIT_SECONDS = 0.1

Found = TypeVar("Found")
AnyAnswer = TypeVar("AnyAnswer", Answer, StreamedAnswer)


class LimitedError(Exception):
    """The server does not let a request in before the deadline; the text says why."""

    def __init__(self, status: int) -> None:
        super().__init__(why_refused(status))
        self.status = status


def why_refused(status: int) -> str:
    """Why a server refuses requests for now that says so with this status, and what to do."""
    return _LIMITED if status == TOO_MANY else _AWAY


def is_limited(answer: Answer | StreamedAnswer) -> bool:
    """Whether the server takes the request, only not now."""
    return is_too_many(answer) or is_away(answer)


def is_away(answer: Answer | StreamedAnswer) -> bool:
    """Whether the server is away for now; 503 without `Retry-After` says that it is broken."""
    return answer.status == UNAVAILABLE and bool(answer.retry_after)


def is_too_many(answer: Answer | StreamedAnswer) -> bool:
    """Whether the server limits requests, and says so as all do."""
    return answer.status == TOO_MANY


async def until_admitted(
    ask: Callable[..., Awaitable[AnyAnswer]],
    deadline_seconds: float,
    on_wait: Callable[[int], None] = lambda _: None,
    is_refused: Callable[[AnyAnswer], bool] = is_limited,
) -> AnyAnswer:
    """The answer that `ask` gets, unless it is refused only for now: then ask again.

    The deadline is that of each answer, and that of the wait for a request to be let in. Before
    each wait `on_wait` gets the status of the refusal.

    Raises:
        NoAnswerError: none came in time.
        LimitedError: the server does not let it in before the deadline.
    """
    ends_seconds = time.monotonic() + deadline_seconds
    while True:
        answer = await ask(deadline_seconds=deadline_seconds)
        if not is_refused(answer):
            return answer
        on_wait(answer.status)
        seconds = wait_seconds(answer)
        if time.monotonic() + seconds > ends_seconds:
            raise LimitedError(answer.status)
        await asyncio.sleep(seconds)


async def together(*works: Coroutine[Any, Any, Found]) -> list[Found]:
    """What all of them return, in their order. If one raises, the others end first.

    What a check has left running would disturb the next one.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def wait_seconds(refusal: Answer | StreamedAnswer) -> float:
    """How long to wait before the next try; a server may also give a date, or nothing."""
    try:
        asked = float(refusal.retry_after)
    except ValueError:
        asked = _WAIT_SECONDS
    return max(asked, _LEAST_WAIT_SECONDS) if math.isfinite(asked) else _WAIT_SECONDS
