"""Which keys are valid now? Those that were given, and those in a file that may change.

Only digests are kept. Logs refer to a key by its name, which tells two keys apart.
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
from holdfast.settings import flag

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""The minimum time between two checks whether the file has changed."""
MIN_KEY_CHARACTERS = 16
"""The minimum length of a key that cannot be guessed."""
MAX_FILE_BYTES = 1024 * 1024

Version = tuple[int, int, int]
"""What changes with the content of a file: its modification time in ns, size, and inode."""


class Keyring:
    """Keys of one kind. It belongs to one event loop, but any thread may read `is_broken`."""

    def __init__(
        self,
        given: Iterable[str] = (),
        path: Path | None = None,
        *,
        source: str = "--api-key-file",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the file at `path`, which the flag `source` names.

        A changed file is read again once it has been stable for `LOOK_SECONDS`: a file that is
        being written in place is incomplete, and a part of a key would be a key.

        Raises:
            UsageError: it cannot be read, or is not a list of keys.
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
        """Whether there is no key at all; a keyring with a file always has one."""
        return not self._named

    @property
    def count(self) -> int:
        """The number of keys."""
        return len(self._named)

    @property
    def is_broken(self) -> bool:
        """Whether the file cannot be read, so that the keys read last stay valid."""
        self._refresh()
        return self._is_broken

    @property
    def short_names(self) -> tuple[str, ...]:
        """The names of the keys that are short enough to guess."""
        return self._short

    def name_of(self, given: bytes) -> str | None:
        """Return the name of the given key; None if it is not valid now.

        The time it takes reveals nothing: the key is compared with all keys, each in constant time.
        """
        self._refresh()
        found = hashlib.sha256(given).digest()
        name = None
        for digest, known_name in self._named.items():
            if hmac.compare_digest(found, digest):
                name = known_name
        return name

    def shares_a_key_with(self, other: Keyring) -> bool:
        """Return whether a key is in both keyrings."""
        return not self._named.keys().isdisjoint(other._named.keys())

    def _refresh(self) -> None:
        """Read the file again if it has changed; a broken file leaves the keys as they are."""
        if self._path is None or self._clock() < self._next_look_seconds:
            return
        if self._refresh_lock.acquire(blocking=False):  # otherwise another thread is doing it
            try:
                self._next_look_seconds = self._clock() + LOOK_SECONDS
                self._refresh_from(self._path)
            finally:
                self._refresh_lock.release()

    def _refresh_from(self, path: Path) -> None:
        try:
            # Taken before the file is read, so that the next look notices a write in between.
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
        """Return whether the last write is old enough that nobody is still writing."""
        return self._wall_clock() - version[0] / 1e9 >= LOOK_SECONDS

    def _read(self, path: Path, version: Version) -> None:
        keys = _keys(path)
        self._named = self._given | _named(keys)
        self._version = version
        self._short = (*self._short, *(name for name in _short(keys) if name not in self._short))


def _version(path: Path) -> Version:
    # stat() follows links: Kubernetes swaps links when a Secret changes.
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a regular file")
    if found.st_size > MAX_FILE_BYTES:
        raise ValueError("it is too large for a key file")
    return found.st_mtime_ns, found.st_size, found.st_ino


def _keys(path: Path) -> list[str]:
    """Return the keys in a file, one per line; skip blank lines and those that begin with `#`."""
    keys = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        text = line.strip().decode("latin-1")
        if not text or text.startswith("#"):
            continue
        try:
            keys.append(flag.key(text))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    if not keys:
        raise ValueError("it contains no key")
    return keys


def _named(keys: Iterable[str]) -> dict[bytes, str]:
    digests = (hashlib.sha256(key.encode()).digest() for key in keys)
    return {digest: f"key-{digest.hex()[:8]}" for digest in digests}


def _short(keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(_named(key for key in keys if len(key) < MIN_KEY_CHARACTERS).values())


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
