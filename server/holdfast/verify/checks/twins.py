"""Is a streamed answer the same as the one that comes at once? For the groups that compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from holdfast.verify.streams import StreamedAnswer
from holdfast.verify.target import Answer
from holdfast.verify.trial import InconclusiveError, Trial

Compared = TypeVar("Compared")
"""A dataclass: what an answer says, however it came."""

_ROUNDS = 3


async def compare(
    trial: Trial,
    path: str,
    body: Mapping[str, Any],
    at_once: Callable[[Answer], Compared],
    in_parts: Callable[[StreamedAnswer], Compared],
) -> Compared:
    """Blame a difference that the server does not show to itself; what it said at once.

    Raises:
        InconclusiveError: the server does not give the same greedy answer twice.
        MalformedError: an answer cannot be read.
    """
    stream = await trial.stream(path, body)
    for _ in range(_ROUNDS):
        whole = at_once(await trial.post(path, body))
        if whole == in_parts(stream):
            return whole
        if at_once(await trial.post(path, body)) != whole:
            raise InconclusiveError("the server does not give the same greedy answer twice")
        stream = await trial.stream(path, body)
    streamed = in_parts(stream)
    if names := _differences(whole, streamed):
        trial.blame(f"{path}: as a stream, {' and '.join(names)} differ", stream)
    return whole


def _differences(one: Any, other: Any) -> list[str]:
    """The fields that are not the same."""
    names = [field.name for field in fields(one)]
    return [name for name in names if getattr(one, name) != getattr(other, name)]
