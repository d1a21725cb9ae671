"""Which keys are right at this moment? Those that were given, and those in a file that may change.

Only digests are kept. A key is spoken of by its name, which tells two of them apart in a log.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.settings import values

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""So often, at most, it is looked whether the file has changed."""
FEWEST_CHARACTERS = 16
"""Of a key that cannot be guessed."""
MOST_FILE_BYTES = 1024 * 1024

Version = tuple[int, int, int]
"""What changes with the content of a file: time of its last change in ns, size, and inode."""


class Keyring:
    """Keys of one kind, of one event loop; whether its file is broken any thread may ask."""

    def __init__(
        self,
        given: Iterable[str] = (),
        path: Path | None = None,
        *,
        source: str = "--api-key-file",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the file at `path`, which `source` has named.

        A file that changes is taken over when it has been the same for `LOOK_SECONDS`: one that is
        written in place is seen half, and a part of a key would be a key.

        Raises:
            UsageError: it cannot be read, or is no list of keys.
        """
        given = tuple(given)
        self._given = _named(given)
        self._named = self._given
        self._short = _short(given)
        self._path = path
        self._source = source
        self._clock = clock
        self._wall_clock = wall_clock
        self._refresh_lock = threading.Lock()
        self._version: Version | None = None
        self._seen: Version | None = None
        self._is_broken = False
        self._next_look_seconds = clock() + LOOK_SECONDS
        if path is not None:
            try:
                self._read(path, _version(path))
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"{source}: {path}: {_reason(error)}.",
                    remedy="name a readable file with one key per line.",
                ) from None

    @property
    def is_empty(self) -> bool:
        """Whether there is no key at all; a ring with a file has always one."""
        return not self._named

    @property
    def count(self) -> int:
        """How many keys there are."""
        return len(self._named)

    @property
    def is_broken(self) -> bool:
        """Whether the file cannot be taken over, so that the keys read last stay right."""
        self._refresh()
        return self._is_broken

    @property
    def short_names(self) -> tuple[str, ...]:
        """The names of the keys that are so short that they can be guessed."""
        return self._short

    def name_of(self, given: bytes) -> str | None:
        """The name of the key that was given; None if it is not right now.

        What it takes tells nothing of the keys: all are compared, each in constant time.
        """
        self._refresh()
        found = hashlib.sha256(given).digest()
        name = None
        for digest, known_name in self._named.items():
            if hmac.compare_digest(found, digest):
                name = known_name
        return name

    def shares_a_key_with(self, other: Keyring) -> bool:
        """Whether a key is on both."""
        return not self._named.keys().isdisjoint(other._named.keys())

    def _refresh(self) -> None:
        """Take over what has changed in the file; what is broken leaves the keys as they are."""
        if self._path is None or self._clock() < self._next_look_seconds:
            return
        if self._refresh_lock.acquire(blocking=False):  # else another thread looks at this moment
            try:
                self._next_look_seconds = self._clock() + LOOK_SECONDS
                self._refresh_from(self._path)
            finally:
                self._refresh_lock.release()

    def _refresh_from(self, path: Path) -> None:
        try:
            # Before it is read: what is written meanwhile is then seen at the next look.
            version = _version(path)
            is_settled = version == self._seen or self._has_rested(version)
            self._seen = version
            if version != self._version and is_settled:
                self._read(path, version)
                names = ", ".join(self._named.values())
                logger.info("%s: read the file again, the keys are now %s", self._source, names)
            self._is_broken = self._is_broken and version != self._version
        except (OSError, ValueError) as error:
            self._version = None
            if not self._is_broken:
                logger.error(  # noqa: TRY400 - the reason says it, and a traceback nothing more
                    "%s: %s: %s; the keys that were read last stay in force",
                    self._source,
                    self._path,
                    _reason(error),
                )
            self._is_broken = True

    def _has_rested(self, version: Version) -> bool:
        """Whether the file was not written to for so long that nobody is at it."""
        return self._wall_clock() - version[0] / 1e9 >= LOOK_SECONDS

    def _read(self, path: Path, version: Version) -> None:
        keys = _keys(path)
        self._named = self._given | _named(keys)
        self._version = version
        self._short = (*self._short, *(name for name in _short(keys) if name not in self._short))


def _version(path: Path) -> Version:
    # Of what a link points to: Kubernetes swaps links when a Secret changes.
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a regular file")
    if found.st_size > MOST_FILE_BYTES:
        raise ValueError("it is too large for a key file")
    return found.st_mtime_ns, found.st_size, found.st_ino


def _keys(path: Path) -> list[str]:
    """The keys in a file, one a line; blank lines and those that begin with `#` are none."""
    keys = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        text = line.strip().decode("latin-1")
        if not text or text.startswith("#"):
            continue
        try:
            keys.append(values.key(text))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    if not keys:
        raise ValueError("it contains no key")
    return keys


def _named(keys: Iterable[str]) -> dict[bytes, str]:
    digests = (hashlib.sha256(key.encode()).digest() for key in keys)
    return {digest: f"key-{digest.hex()[:8]}" for digest in digests}


def _short(keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(_named(key for key in keys if len(key) < FEWEST_CHARACTERS).values())


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
