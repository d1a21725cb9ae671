"""Where on this machine is the tokenizer of the served model? Other people's programs need one."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from holdfast.verify.records import Server
from holdfast.verify.survey import given_flags

_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def tokenizer_directory(server: Server) -> Path | None:
    """The directory with its files, which may be one of the Hub's cache; None if there is none.

    Holdfast says which model or `--tokenizer` it has loaded; another server only names its model.
    A directory whose files have another size than those that Holdfast lists is another model's.
    """
    told = server.configuration
    if told is None:
        return _directory(server.model, "")
    flags = given_flags(told.flags)
    if own := flags.get("--tokenizer"):
        return _directory(own, flags.get("--tokenizer-revision", ""))
    found = _directory(told.model, told.revision)
    sizes = {one.name: one.size_bytes for one in told.files if one.name in _FILES}
    is_it = found is not None and all(_size(found / name) == sizes[name] for name in sizes)
    return found if is_it else None


def _directory(name: str, revision: str) -> Path | None:
    """The directory of a path or of a name of the Hub."""
    path = Path(name)
    if not path.is_absolute():
        path = _hub_cache() / f"models--{name.replace('/', '--')}"
        if not _COMMIT.fullmatch(revision):
            with suppress(OSError, UnicodeDecodeError):
                revision = (path / "refs" / "main").read_text().strip()
        path = path / "snapshots" / revision if _COMMIT.fullmatch(revision) else path / "none"
    return path if os.path.isdir(path) else None  # noqa: PTH112 - Path raises for a long name


def _hub_cache() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
