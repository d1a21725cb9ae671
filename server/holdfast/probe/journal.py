"""Which sizes took the machine down? Files that outlive it name the attempts that never ended.

Each attempt has a file, which is on disk before the attempt begins, is locked while its process
lives, and is deleted when the attempt is over. An attempt that fails while the process lives is
over like any other: only one that ended with the process, or the machine, leaves its file. Servers
that share a directory, as the replicas of a Deployment do, therefore forbid each other nothing. A
size with which the host ran out of memory leaves such a file, too, which counts on that host alone:
others may have more memory, or no neighbour that takes it. Images are kept apart from contexts: one
that is small may take the machine down as well, and says nothing about long prompts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from holdfast.atomic_files import (
    files_with_suffix,
    is_writer_alive,
    read_record,
    write_atomically,
    written_while_alive,
)
from holdfast.errors import ProbeTooSlowError

logger = logging.getLogger(__name__)

LAYOUT = 2
_CONTEXT, _IMAGE = "context_tokens", "image_pixels"
"""What a file names, in which unit."""


class ProbeJournal:
    """Keeps the attempts of one fingerprint. Without a directory it allows every size."""

    def __init__(
        self,
        directory: Path | None,
        fingerprint: str,
        *,
        known_forbidden_tokens: int | None = None,
        known_forbidden_pixels: int | None = None,
    ) -> None:
        """Take the smallest sizes that this process has forbidden already, if there are any."""
        self._fingerprint = fingerprint
        self._known_forbidden_tokens = known_forbidden_tokens
        self._known_forbidden_pixels = known_forbidden_pixels
        self.unproven_pixels: int | None = None
        """The image whose attempt runs or has failed; None if it was served or took too long."""
        name = f"probe-{_digest(fingerprint)}"
        self.path = directory / f"{name}-{secrets.token_hex(4)}.json" if directory else None
        """The file of the current attempt of this process."""
        left = _left_in(directory, name, fingerprint) if directory else {}
        self._left = {path: size for path, (kind, size) in left.items() if kind == _CONTEXT}
        self._left_images = {path: size for path, (kind, size) in left.items() if kind == _IMAGE}

    @property
    def forbidden_tokens(self) -> int | None:
        """The smallest context with an attempt that never ended; no larger one is tried either."""
        known = self._known_forbidden_tokens
        return min([*self._left.values(), *([known] if known is not None else [])], default=None)

    @property
    def evidence(self) -> Path | None:
        """The file that forbids the smallest context; None if no file does."""
        return min(self._left, key=self._left.__getitem__, default=None)

    @property
    def forbidden_image(self) -> tuple[int, Path | None] | None:
        """The fewest pixels of an image with an attempt that never ended, and the file of it."""
        left = {size: path for path, size in self._left_images.items()}
        known = self._known_forbidden_pixels
        smallest = min([*left, *([known] if known is not None else [])], default=None)
        return None if smallest is None else (smallest, left.get(smallest))

    def forbid(self, tokens: int) -> None:
        """Leave what an attempt leaves that never ended, since this size took the host's memory."""
        self._forbid(_CONTEXT, tokens)

    def forbid_image(self, pixels: int) -> None:
        """Leave the same of an attempt at an image."""
        self._forbid(_IMAGE, pixels)

    def _forbid(self, kind: str, size: int) -> None:
        if self.path is not None:
            try:
                write_atomically(self.path, self._record(kind, size, host=socket.gethostname()))
            except OSError as error:
                logger.warning("cannot write the probe journal %s: %s", self.path, error)

    def attempt(self, tokens: int) -> AbstractContextManager[None]:
        """While entered, a file on disk says that a context of `tokens` is being tried."""
        return self._attempt(_CONTEXT, tokens, f"contexts of {tokens} tokens and more")

    @contextmanager
    def image_attempt(self, pixels: int) -> Iterator[None]:
        """While entered, a file on disk says that an image of `pixels` is being tried."""
        self.unproven_pixels = pixels
        try:
            with self._attempt(_IMAGE, pixels, f"images of {pixels} pixels and more"):
                yield
        except ProbeTooSlowError:  # the engine goes on, so it has not taken the memory
            self.unproven_pixels = None
            raise
        self.unproven_pixels = None

    @contextmanager
    def _attempt(self, kind: str, size: int, forbidden: str) -> Iterator[None]:
        def on_left(error: OSError) -> None:
            logger.warning(
                "cannot delete the probe journal %s: %s; delete it, or later starts leave out %s",
                self.path,
                error,
                forbidden,
            )

        with ExitStack() as kept:
            if self.path is not None:
                try:
                    file = written_while_alive(self.path, self._record(kind, size), on_left)
                    kept.enter_context(file)
                except OSError as error:
                    logger.warning("cannot write the probe journal %s: %s", self.path, error)
            yield

    def _record(self, kind: str, size: int, **further: str) -> str:
        return json.dumps(
            {"layout": LAYOUT, "fingerprint": self._fingerprint, kind: size, **further}
        )


class ProbeJournals:
    """Opens the journal of each probe, and keeps what this process forbids from all of them."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._fingerprint = ""
        self._last: ProbeJournal | None = None
        self._forbidden_tokens: int | None = None
        self._forbidden_pixels: int | None = None

    def opened(self, fingerprint: str) -> ProbeJournal:
        """Return a journal with what was left until now, and with what was forbidden."""
        self._fingerprint = fingerprint
        self._last = ProbeJournal(
            self._directory,
            fingerprint,
            known_forbidden_tokens=self._forbidden_tokens,
            known_forbidden_pixels=self._forbidden_pixels,
        )
        return self._last

    def forbid(self, tokens: int) -> None:
        """Keep this context and longer ones from every later probe. May wait for the disk.

        With a directory, later processes leave them out too, if a journal has been opened here.
        """
        self._forbidden_tokens = min(tokens, self._forbidden_tokens or tokens)
        if self._fingerprint:
            ProbeJournal(self._directory, self._fingerprint).forbid(tokens)

    def forbid_unproven_image(self) -> int:
        """Keep the image that the last probe was trying, and larger ones, from every later probe.

        Return its pixels, or 0 if it was trying none. May wait for the disk.
        """
        if self._last is None or (pixels := self._last.unproven_pixels) is None:
            return 0
        self._last.unproven_pixels = None
        self._forbidden_pixels = min(pixels, self._forbidden_pixels or pixels)
        ProbeJournal(self._directory, self._fingerprint).forbid_image(pixels)
        return pixels


def _left_in(directory: Path, name: str, fingerprint: str) -> dict[Path, tuple[str, int]]:
    """Return the files of attempts that lost their process, with what they name and its size."""
    files = sorted(files_with_suffix(".json", directory))
    read = ((path, _read(path, fingerprint)) for path in files if path.name.startswith(f"{name}-"))
    return {path: left for path, left in read if left is not None}


def _digest(fingerprint: str) -> str:
    return hashlib.sha256(fingerprint.encode()).hexdigest()[:32]


def _read(path: Path, fingerprint: str) -> tuple[str, int] | None:
    try:
        if is_writer_alive(path):
            return None
        record = read_record(path)
        kind, size = _kind_and_size(record)
        is_ours = record["layout"] == LAYOUT and record["fingerprint"] == fingerprint
        if is_ours and type(size) is int and size > 0:
            is_of_here = record.get("host", here := socket.gethostname()) == here
            return (kind, size) if is_of_here else None
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("cannot read the probe journal %s: %s", path, error)
        return None
    except (ValueError, TypeError, KeyError):
        pass
    _set_aside(path)
    return None


def _kind_and_size(record: Any) -> tuple[str, Any]:
    return (_IMAGE, record[_IMAGE]) if _IMAGE in record else (_CONTEXT, record[_CONTEXT])


def _set_aside(path: Path) -> None:
    aside = path.with_suffix(f".broken-{time.time_ns()}")
    logger.warning("the probe journal %s is damaged; kept it as %s", path, aside.name)
    try:
        path.replace(aside)
    except OSError as error:
        logger.warning("cannot move the probe journal %s: %s", path, error)
