"""Takes the keys that the tool was given out of what it writes: a server may repeat them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

HIDDEN = "[hidden]"
Record = TypeVar("Record")


def redacted(record: Record, secrets: Sequence[str]) -> Record:
    """The dataclass with each secret in each of its texts replaced, however deep they stand."""
    known = [secret for secret in secrets if secret]
    cleaned: Record = _cleaned(record, known) if known else record
    return cleaned


def _cleaned(value: Any, secrets: Sequence[str]) -> Any:
    if type(value) is str:  # a status is a str too, and one of ours
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return value
    if isinstance(value, Mapping):
        return {_cleaned(name, secrets): _cleaned(item, secrets) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cleaned(item, secrets) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.name != "schema"]
        return replace(value, **{name: _cleaned(getattr(value, name), secrets) for name in names})
    return value
