"""Which sizes took the machine down? Files that outlive it name the attempts that never ended.

Each attempt has a file, which is on disk before the attempt begins, is locked while its process
lives, and is deleted when the attempt is over. An attempt that fails while the process lives is
over like any other: only one that ended with the process, or the machine, leaves its file. Servers
that share a directory, as the replicas of a Deployment do, therefore forbid each other nothing.
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
    """Keeps the attempts of one fingerprint. Without a directory it allows every size."""

    def __init__(self, directory: Path | None, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        name = f"probe-{_digest(fingerprint)}"
        self.path = directory / f"{name}-{secrets.token_hex(4)}.json" if directory else None
        """The file of the current attempt of this process."""
        self._left = _left_in(directory, name, fingerprint) if directory else {}

    @property
    def forbidden_tokens(self) -> int | None:
        """The smallest context with an attempt that never ended; no larger one is tried either."""
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
    """Return the files of attempts that lost their process, and the sizes."""
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
