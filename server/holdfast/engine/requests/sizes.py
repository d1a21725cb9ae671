"""Measures prompts as vLLM's renderer makes them: mappings, structs, tensors and lists."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

_POINTER_BYTES = 8
_TEXT = ("prompt", "prompt_token_ids")


def size_bytes_of(value: Any) -> int:
    """Estimate how much memory a value takes, without visiting each of its numbers."""
    if isinstance(value, Mapping):
        return sum(map(size_bytes_of, value.values()))
    if isinstance(value, str | bytes | bytearray | memoryview):
        return len(value)
    if isinstance(value, list | tuple | AbstractSet):
        is_plain = isinstance(next(iter(value), None), int | float)
        return _POINTER_BYTES * len(value) if is_plain else sum(map(size_bytes_of, value))
    if isinstance(size_bytes := getattr(value, "nbytes", None), int):
        return size_bytes
    return sum(map(size_bytes_of, fields_of(value) or ()))


def media_bytes_of(prompt: Mapping[str, Any]) -> int:
    """Estimate how much memory the media and the embeddings of a prompt take."""
    return size_bytes_of([part for name, part in prompt.items() if name not in _TEXT])


def fields_of(value: Any) -> list[Any] | None:
    """List the names and values of a msgspec struct or a dataclass; None for anything else.

    Private fields are left out: they are vLLM's own notes.
    """
    names = getattr(value, "__struct_fields__", None) or getattr(
        value, "__dataclass_fields__", None
    )
    if names is None:
        return None
    public = [name for name in names if not name.startswith("_")]
    return [part for name in public for part in (name, getattr(value, name, None))]
