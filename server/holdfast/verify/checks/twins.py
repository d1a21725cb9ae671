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

_ROUNDS = 4


async def compare(
    trial: Trial,
    path: str,
    body: Mapping[str, Any],
    at_once: Callable[[Answer], Compared],
    in_parts: Callable[[StreamedAnswer], Compared],
) -> Compared:
    """Blame a difference that the server does not show to itself; what it said at once.

    A stream that differed is warned of, if a later one does not.

    Raises:
        InconclusiveError: the server does not give the same greedy answer twice.
        MalformedError: an answer cannot be read.
    """
    different: list[tuple[str, StreamedAnswer]] = []
    for _ in range(_ROUNDS):
        stream = await trial.stream(path, body)
        whole = at_once(await trial.post(path, body))
        names = _differences(whole, in_parts(stream))
        if not names:
            break
        if at_once(await trial.post(path, body)) != whole:
            raise InconclusiveError("the server does not give the same greedy answer twice")
        different.append((names, stream))
    if len(different) == _ROUNDS:
        names, stream = different[-1]
        trial.blame(f"{path}: as a stream, {names} differ", stream)
    elif different:
        names, stream = different[0]
        tries = f"in {len(different)} of {len(different) + 1} tries"
        trial.warn(f"{path}: as a stream, {names} differed {tries}", stream)
    return whole


def _differences(one: Any, other: Any) -> str:
    """The fields that are not the same; empty if all are."""
    names = [field.name for field in fields(one)]
    return " and ".join(name for name in names if getattr(one, name) != getattr(other, name))
