"""Digests what a request asks: the same for the same prompt and parameters, in any process."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

_POINTER_BYTES = 8


def digest_of(*values: Any) -> str:
    """Return the SHA-256 of values, as 64 hexadecimal digits. Each tensor element counts."""
    digest = hashlib.sha256()
    for value in values:
        _feed(digest, value)
    return digest.hexdigest()


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
    return sum(map(size_bytes_of, _fields(value) or ()))


def _feed(digest: Any, value: Any) -> None:
    """Digest a value with its kind and its length, so that no two values look alike."""
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        _feed_all(digest, "map", [part for item in items for part in item])
    elif isinstance(value, AbstractSet):
        _feed_all(digest, "set", sorted(value, key=str))
    elif isinstance(value, list | tuple):
        _feed_all(digest, "list", value)
    elif isinstance(value, bytes | bytearray | memoryview):
        _feed_bytes(digest, "bytes", value)
    elif _is_tensor(value):
        _feed_bytes(digest, f"tensor {value.dtype} {tuple(value.shape)}", _content(value))
    elif hasattr(value, "tobytes") and hasattr(value, "dtype"):
        _feed_bytes(digest, f"array {value.dtype} {value.shape}", value.tobytes())
    elif (fields := _fields(value)) is not None:
        _feed_all(digest, type(value).__name__, fields)
    else:
        _feed_bytes(digest, type(value).__name__, str(value).encode("utf-8", "surrogatepass"))


def _feed_all(digest: Any, kind: str, values: Iterable[Any]) -> None:
    values = list(values)
    try:
        content = array("q", values).tobytes()  # a prompt: much faster as a whole
    except (TypeError, OverflowError):
        digest.update(f"{kind} {len(values)}:".encode())
        for value in values:
            _feed(digest, value)
    else:
        _feed_bytes(digest, f"{kind} of integers", content)


def _feed_bytes(digest: Any, kind: str, content: bytes | bytearray | memoryview) -> None:
    content = memoryview(content).cast("B")
    digest.update(f"{kind} {len(content)}:".encode())
    digest.update(content)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage")


def _content(tensor: Any) -> bytes | memoryview:
    """Return all elements as bytes: NumPy knows neither bfloat16 nor the 8-bit floats.

    Contiguous elements on the CPU are not copied, since copying would block all threads.
    """
    import torch  # noqa: PLC0415 - a process without torch has no tensor

    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(plain.view(torch.uint8).numpy()) if plain.numel() else b""


def _fields(value: Any) -> list[Any] | None:
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
