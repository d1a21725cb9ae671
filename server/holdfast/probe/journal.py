"""Which sizes took the machine down? Files that outlive it say which attempts never ended.

An attempt has a file of its own, which is on disk before it begins, is locked while its process
lives, and goes when it is over. An attempt that failed while the process lived is over like any
other; only one that ended with the process, or with the machine, leaves its file. Servers that
share a directory, as the replicas of a Deployment do, therefore forbid each other nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from holdfast.atomic_files import is_writer_alive, read_record, written_while_alive

logger = logging.getLogger(__name__)

LAYOUT = 2


class ProbeJournal:
    """The attempts of one fingerprint. Without a directory nothing is kept and all is allowed."""

    def __init__(self, directory: Path | None, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        name = f"probe-{_digest(fingerprint)}"
        self.path = directory / f"{name}-{secrets.token_hex(4)}.json" if directory else None
        """Where the attempts of this process are written."""
        self._left = _left_in(directory, name, fingerprint) if directory else {}

    @property
    def forbidden_tokens(self) -> int | None:
        """The smallest context whose attempt never ended: it and all above are not tried again."""
        return min(self._left.values(), default=None)

    @property
    def evidence(self) -> Path | None:
        """The file that forbids the smallest context."""
        return min(self._left, key=self._left.__getitem__, default=None)

    @contextmanager
    def attempt(self, tokens: int) -> Iterator[None]:
        """While entered, a file on disk says that a context of `tokens` is being tried."""
        with ExitStack() as kept:
            if self.path is not None:
                record = {
                    "layout": LAYOUT,
                    "fingerprint": self._fingerprint,
                    "context_tokens": tokens,
                }
                try:
                    kept.enter_context(written_while_alive(self.path, json.dumps(record)))
                except OSError as error:
                    logger.warning("cannot write the probe journal %s: %s", self.path, error)
            yield


def _left_in(directory: Path, name: str, fingerprint: str) -> dict[Path, int]:
    """The files of attempts whose process is gone, and their sizes."""
    read = ((path, _read(path, fingerprint)) for path in sorted(directory.glob(f"{name}-*.json")))
    return {path: tokens for path, tokens in read if tokens is not None}


def _digest(fingerprint: str) -> str:
    return hashlib.sha256(fingerprint.encode()).hexdigest()[:32]


def _read(path: Path, fingerprint: str) -> int | None:
    try:
        if is_writer_alive(path):
            return None
        record = read_record(path)
        tokens = record["context_tokens"]
        is_ours = record["layout"] == LAYOUT and record["fingerprint"] == fingerprint
        if is_ours and type(tokens) is int and tokens > 0:
            return tokens
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("cannot read the probe journal %s: %s", path, error)
        return None
    except (ValueError, TypeError, KeyError):
        pass
    _set_aside(path)
    return None


def _set_aside(path: Path) -> None:
    aside = path.with_suffix(f".broken-{time.time_ns()}")
    logger.warning("the probe journal %s is damaged; kept it as %s", path, aside.name)
    try:
        path.replace(aside)
    except OSError as error:
        logger.warning("cannot move the probe journal %s: %s", path, error)
