"""Changes every text of a record, however deep, as `redaction` and the bounds of a report do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

RecordOfTexts = TypeVar("RecordOfTexts")
_NUMBERS = {int, float}


def with_texts(record: RecordOfTexts, change: Callable[[str], str]) -> RecordOfTexts:
    """The dataclass or text with each of its texts changed, also within mappings and lists."""
    changed: RecordOfTexts = _changed(record, change)
    return changed


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if type(value) is str:  # a status is a str too, and one of ours
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(name, change): _changed(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        if {*map(type, value)} <= _NUMBERS:  # a prompt of token ids may have half a million
            return value
        return type(value)(_changed(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.name != "schema"]
        return replace(value, **{name: _changed(getattr(value, name), change) for name in names})
    return value
