"""Writes dataclasses as JSON, and reads them from JSON that another machine sent."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from holdfast.atomic_files import refuse_constant

RecordKind = TypeVar("RecordKind")
_MAX_INTEGER = 1 << 63


def written(record: Any) -> bytes:
    """Return a dataclass as compact JSON.

    Raises:
        ValueError: a number in it is not finite.
    """
    return json.dumps(asdict(record), allow_nan=False, separators=(",", ":")).encode()


def parsed(text: bytes) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: it is not JSON in UTF-8, repeats a name, contains NaN or an infinity, or is
            nested too deeply.
    """
    try:
        return json.loads(
            text.decode("utf-8"), parse_constant=refuse_constant, object_pairs_hook=_without_repeats
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def as_record(kind: type[RecordKind], value: Any) -> RecordKind:
    """Return the dataclass of that kind which `value`, a part of a JSON document, describes.

    A field with a default must be there too, and nothing is converted, except a whole number to a
    float.

    Raises:
        ValueError: a field is missing, unknown, of the wrong type or out of range.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{kind.__name__} is not an object")  # noqa: TRY004 - one error for all
    types_by_name: Mapping[str, Any] = _field_types(kind)  # type: ignore[arg-type]  # a class is hashable
    if value.keys() != types_by_name.keys():
        raise ValueError(f"{kind.__name__} has missing or unexpected fields")
    return kind(**{name: _as(types_by_name[name], value[name], name) for name in types_by_name})


@cache
def _field_types(kind: Any) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _as(kind: Any, value: Any, name: str) -> Any:
    """Return `value` as the type `kind` of the field `name`."""
    origin = get_origin(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return as_record(kind, value)
    if origin in {Union, types.UnionType}:
        (other,) = (one for one in get_args(kind) if one is not types.NoneType)
        return None if value is None else _as(other, value, name)
    if origin is tuple and isinstance(value, list):
        return _as_tuple(get_args(kind), value, name)
    if origin is Mapping and isinstance(value, dict):
        keys, values = get_args(kind)
        return {_as(keys, key, name): _as(values, one, name) for key, one in value.items()}
    if not _is_a(kind, value):
        raise ValueError(f"{name} has the wrong type")
    return float(value) if kind is float else value


def _as_tuple(kinds: tuple[Any, ...], value: list[Any], name: str) -> tuple[Any, ...]:
    if kinds[-1] is Ellipsis:
        return tuple(_as(kinds[0], one, name) for one in value)
    if len(kinds) != len(value):
        raise ValueError(f"{name} has the wrong length")
    return tuple(_as(kind, one, name) for kind, one in zip(kinds, value, strict=True))


def _is_a(kind: Any, value: Any) -> bool:
    if get_origin(kind) is Literal:
        # Compared with the type, since True equals 1 and 1.0 does too.
        return any(type(value) is type(one) and value == one for one in get_args(kind))
    if kind is str:
        return isinstance(value, str) and _is_text(value)
    if kind is bool:
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return kind in {int, float} and -_MAX_INTEGER <= value < _MAX_INTEGER
    return kind is float and isinstance(value, float) and math.isfinite(value)


def _is_text(value: str) -> bool:
    """Return whether it can be encoded: JSON may escape half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it repeats a name")
    return found
