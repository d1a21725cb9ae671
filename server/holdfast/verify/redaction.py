"""Takes the keys that the tool was given out of what it writes: a server may repeat them.

Where a text was cut, the beginning of a key may be all that is left of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from holdfast.verify.answers import ELLIPSIS

HIDDEN = "[hidden]"
_LEAST_BEGINNING = 4
"""Characters of a secret: fewer stand at the end of many a text that was cut."""
Record = TypeVar("Record")


def redacted(record: Record, secrets: Sequence[str]) -> Record:
    """The dataclass or text with each secret in each of its texts replaced, however deep."""
    # The longest first: a shorter one may be a part of it.
    known = sorted(filter(None, secrets), key=len, reverse=True)
    cleaned: Record = _cleaned(record, known) if known else record
    return cleaned


def _cleaned(value: Any, secrets: Sequence[str]) -> Any:
    if type(value) is str:  # a status is a str too, and one of ours
        return _without(value, secrets)
    if isinstance(value, Mapping):
        return {_cleaned(name, secrets): _cleaned(item, secrets) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cleaned(item, secrets) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.name != "schema"]
        return replace(value, **{name: _cleaned(getattr(value, name), secrets) for name in names})
    return value


def _without(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    *cut, last = text.split(ELLIPSIS)
    return ELLIPSIS.join([*(_without_beginning(one, secrets) for one in cut), last])


def _without_beginning(text: str, secrets: Sequence[str]) -> str:
    """The text without the longest beginning of a secret that it ends with."""
    for secret in secrets:
        for length in range(len(secret) - 1, _LEAST_BEGINNING - 1, -1):
            if text.endswith(secret[:length]):
                return f"{text[:-length]}{HIDDEN}"
    return text
