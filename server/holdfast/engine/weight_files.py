"""Checks that the weights on this machine are complete: their headers say how large they must be.

Only files that vLLM will read are checked (`DefaultModelLoader._prepare_weights`, 0.32): others of
the same model may lie beside them and never have been fetched.
"""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.errors import UsageError

_FORMATS = {"auto", "hf", "mistral", "safetensors", "fastsafetensors", "instanttensor"}
_CONSOLIDATED = "consolidated*.safetensors"
"""If there are any, vLLM loads a model from them by default."""
_POINTER = b"version https://git-lfs"
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, in this many bytes."""
_LARGEST_HEADER_BYTES = 100_000_000
"""The library rejects a larger header."""


def check(directory: Path, load_format: str) -> None:
    """Check the weights in a directory; skip what is missing or in another format.

    Raises:
        UsageError: one is a pointer of git-lfs, is cut off, or is missing.
    """
    if load_format not in _FORMATS:
        return
    is_consolidated = load_format == "mistral" or (
        load_format == "auto" and any(directory.glob(_CONSOLIDATED))
    )
    kind = "consolidated" if is_consolidated else "model"
    found = sorted(directory.glob(_CONSOLIDATED if is_consolidated else "*.safetensors"))
    for path in _named(directory / f"{kind}.safetensors.index.json", found):
        _check_whole(path)
    if not found:
        for path in sorted(directory.glob("*.bin")):
            _refuse_pointer(path)


def is_pointer(path: Path) -> bool:
    """Whether git-lfs has left its own file in place of the one to be fetched."""
    try:
        with path.open("rb") as file:
            return file.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


def _named(index: Path, found: list[Path]) -> list[Path]:
    """Return the files that the index names, which must all exist; without an index, all."""
    try:
        named = list(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return found
    if not found:
        return []
    names = {name for name in named if isinstance(name, str)}
    if not all(isinstance(name, str) for name in named):
        raise UsageError(
            f"{index} does not name files as the places of the weights.",
            remedy="download this file, or the whole model, again.",
        )
    missing = sorted(names - {path.name for path in found})
    if missing:
        raise UsageError(
            f"{index.parent / missing[0]} is missing, but {index.name} names it.",
            remedy="download the missing file, or the whole model again.",
        )
    return [path for path in found if path.name in names]


def _refuse_pointer(path: Path) -> None:
    if is_pointer(path):
        raise UsageError(
            f"{path} is a git-lfs pointer, not weights.",
            remedy="run `git lfs pull` in its directory.",
        )


def _check_whole(path: Path) -> None:
    """Compare the size of a safetensors file with what its header says.

    https://github.com/huggingface/safetensors#format
    """
    _refuse_pointer(path)
    try:
        wanted_bytes = _wanted_bytes(path)
        found_bytes = path.stat().st_size
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.", remedy="give this user read access to it."
        ) from error
    if wanted_bytes is None:
        raise UsageError(f"{path} is not a safetensors file.", remedy="download it again.")
    if found_bytes != wanted_bytes:
        raise UsageError(
            f"{path} has {found_bytes} bytes, but its header describes {wanted_bytes}.",
            remedy="download it again.",
        )


def _wanted_bytes(path: Path) -> int | None:
    """Return the size that a safetensors header implies; None without a header."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < header_bytes <= _LARGEST_HEADER_BYTES:
            return None
        header = file.read(header_bytes)
    if len(header) < header_bytes:
        return _LENGTH_BYTES + header_bytes
    try:
        tensors = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
        data_bytes = max((int(t["data_offsets"][1]) for t in tensors.values()), default=0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return _LENGTH_BYTES + header_bytes + data_bytes
