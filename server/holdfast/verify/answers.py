"""Reads values out of answers that may have any shape, and says where one is not as it must be."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any, TypeVar

from holdfast.verify.records import Request

DugValue = TypeVar("DugValue")
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
"""Ends a text that was cut, so that `redaction` knows where a secret may have been cut, too."""
_ABSENT, _ELSEWHERE = (404, 405, 501), range(300, 400)
_EXCERPT_CHARACTERS = 300
_READ_FOR_ONE = 16
"""Characters of a text that are read for each one of an excerpt."""
_QUOTED_CHARACTERS = 2000
_MOST_LEVELS = 100
"""A report repeats parts of answers, and what writes it takes some frames for each level."""
LEAST_TOO_GREAT = 2**53
"""No count is as great. One of hundreds of digits has no float, as which a report shows it."""


class MalformedError(Exception):
    """An answer has not the shape that the API prescribes; the text says where."""

    request: Request | None = None
    """What it answers, where that is known."""


def read_json(text: str) -> Any:
    """The value that a text stands for.

    Raises:
        MalformedError: it is not JSON, or nested more deeply than any answer of the API.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise MalformedError(f"not JSON: {excerpt(text)}") from None
    if _is_deeper_than(_MOST_LEVELS, document):
        raise MalformedError(f"nested more than {_MOST_LEVELS} levels deep: {excerpt(text)}")
    return document


def constant_in(text: str) -> str:
    """A constant that Python reads and JSON does not have, such as NaN; empty if there is none."""
    found: list[str] = []
    with suppress(ValueError, RecursionError):
        json.loads(text, parse_constant=found.append)
    return found[0] if found else ""


def _is_deeper_than(levels: int, document: Any) -> bool:
    inside = [document] if isinstance(document, dict | list) else []
    for _ in range(levels):
        inside = [
            part
            for one in inside
            for part in (one.values() if isinstance(one, dict) else one)
            if isinstance(part, dict | list)
        ]
        if not inside:
            return False
    return True


def dig(document: Any, *path: str | int, kind: type[DugValue]) -> DugValue:
    """The value at `path`.

    Raises:
        MalformedError: there is none, or it is of another kind. A bool is not taken for an int, nor
            is an integer of hundreds of digits.
    """
    found = document
    for index, step in enumerate(path):
        try:
            found = found[step]
        except (KeyError, IndexError, TypeError):
            raise MalformedError(f"{shown(path[: index + 1])} is missing") from None
    is_bool = isinstance(found, bool) and kind is not bool
    if not isinstance(found, kind) or is_bool:
        name = "null" if found is None else type(found).__name__
        raise MalformedError(f"{shown(path)} is {name} and not {kind.__name__}")
    if isinstance(found, int) and abs(found) >= LEAST_TOO_GREAT:
        raise MalformedError(f"{shown(path)} is an integer beyond 53 bits")
    return found


def dig_or(document: Any, *path: str | int, default: DugValue) -> DugValue:
    """The value at `path`, or `default` if there is none of its kind."""
    try:
        return dig(document, *path, kind=type(default))
    except MalformedError:
        return default


def shown(path: tuple[str | int, ...]) -> str:
    """The path as JavaScript has it: `choices[0].message`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".") or "the answer"


def has_words(text: str, words: str) -> bool:
    """Whether the words are in the text as whole ones, in any case and spacing."""
    pattern = r"\s+".join(map(re.escape, words.split()))
    return re.search(rf"(?<!\w){pattern}(?!\w)", text, re.IGNORECASE) is not None


def is_absent(status: int) -> bool:
    """Whether a status says that there is no such route: a redirect leads to another page."""
    return status in _ABSENT or status in _ELSEWHERE


def excerpt(text: str, characters: int = _EXCERPT_CHARACTERS) -> str:
    """The beginning of a text on one line, without what a terminal or XML would stumble over.

    It takes no longer for a text of many megabytes, which may be spaces at first.
    """
    read = text[: _READ_FOR_ONE * characters]
    line = " ".join(read.split())
    is_cut = len(line) > characters or len(read) < len(text)
    return printable(f"{line[:characters]}{ELLIPSIS}" if is_cut else line)


def quoted(text: str) -> str:
    """The text as a report repeats it: a server may say megabytes where a word is due."""
    return printable(shortened(text))


def shortened(text: str, characters: int = _QUOTED_CHARACTERS) -> str:
    """The text, or the beginning of a longer one and how much of it is left out."""
    left = len(text) - characters
    return text if left <= 0 else f"{text[:characters]}{ELLIPSIS} ({left:,} characters left out)"


def beginning(text: str, characters: int) -> str:
    """The text, or as many of its characters with an ellipsis if it has more."""
    return text if len(text) <= characters else f"{text[:characters]}{ELLIPSIS}"


def one_line(text: str) -> str:
    """The text on one line, without what a terminal would obey or no encoding has."""
    return printable(" ".join(text.split()))


def printable(text: str) -> str:
    """The text with a replacement character for each one that is not printable."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
