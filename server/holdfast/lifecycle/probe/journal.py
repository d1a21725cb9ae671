"""Which sizes took the machine down? A file that outlives it, and says which attempt never ended.

The file is replaced as a whole, and both it and its directory are on disk before an attempt begins.
An attempt that failed while this process lived has an end like any other; only one that ended with
the process, or with the machine, has none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.files import write_whole

logger = logging.getLogger(__name__)

LAYOUT = 1


class ProbeJournal:
    """The attempts of one fingerprint. Without a directory nothing is kept and all is allowed."""

    def __init__(self, directory: Path | None, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self.path = directory / f"probe-{_digest(fingerprint)}.json" if directory else None
        self._unfinished = _read(self.path, fingerprint) if self.path else []

    @property
    def forbidden_tokens(self) -> int | None:
        """The smallest context whose attempt never ended: it and all above are not tried again."""
        return min(self._unfinished, default=None)

    @contextmanager
    def attempt(self, tokens: int) -> Iterator[None]:
        """While entered, the file on disk says that a context of `tokens` is being tried."""
        self._unfinished.append(tokens)
        self._write()
        try:
            yield
        finally:
            self._unfinished.remove(tokens)
            self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        record = {
            "layout": LAYOUT,
            "fingerprint": self._fingerprint,
            "unfinished_context_tokens": self._unfinished,
        }
        try:
            write_whole(self.path, json.dumps(record))
        except OSError as error:
            logger.warning("The probe journal %s cannot be written: %s", self.path, error)


def _digest(fingerprint: str) -> str:
    return hashlib.sha256(fingerprint.encode()).hexdigest()[:32]


def _read(path: Path, fingerprint: str) -> list[int]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        sizes = record["unfinished_context_tokens"]
        is_ours = record["layout"] == LAYOUT and record["fingerprint"] == fingerprint
        if is_ours and all(type(size) is int for size in sizes):
            return list(sizes)
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("The probe journal %s cannot be read: %s", path, error)
        return []
    except (ValueError, TypeError, KeyError):
        pass
    _set_aside(path)
    return []


def _set_aside(path: Path) -> None:
    aside = path.with_suffix(f".broken-{time.time_ns()}")
    logger.warning("The probe journal %s is broken; it is kept as %s", path, aside.name)
    try:
        path.replace(aside)
    except OSError as error:
        logger.warning("The probe journal %s cannot be moved: %s", path, error)
