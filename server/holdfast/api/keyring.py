"""Which keys are valid now? Those that were given, and those in a file that may change.

Only digests are kept. Logs and metrics refer to a key by its name: that of the file, or one made of
its digest. Keys with one name are one client, whose key is being changed for example.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from holdfast.api.key_lines import NO_LIMITS, KeyLimits, KeyLine, key_file_error, key_lines
from holdfast.errors import reason_of

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

    def __init__(  # noqa: PLR0913 - where keys come from, and two clocks
        self,
        given: Iterable[str] = (),
        path: Path | None = None,
        *,
        source: str = "--api-key-file",
        may_limit: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the file at `path`, which the flag `source` names.

        A changed file is read again once it has been stable for `LOOK_SECONDS`: a file that is
        being written in place is incomplete, and a part of a key would be a key. `may_limit` says
        whether the file may have limits.

        Raises:
            UsageError: it cannot be read, or is not a list of keys.
        """
        given = tuple(given)
        self._given = {_digest(key): _digest_name(key) for key in given}
        self._named = self._given
        self._names = _each_once(self._named.values())
        self._limits: Mapping[str, KeyLimits] = {}
        self._short = tuple(_digest_name(key) for key in given if _is_short(key))
        self._path = path
        self._source = source
        self._may_limit = may_limit
        self._clock = clock
        self._wall_clock = wall_clock
        self._refresh_lock = threading.Lock()
        self._version: Version | None = None
        self._seen: Version | None = None
        self._is_broken = False
        self._told = ""
        self._next_look_seconds = clock() + LOOK_SECONDS
        if path is not None:
            try:
                self._read(path, _version(path))
            except (OSError, ValueError) as error:
                raise key_file_error(source, path, error) from None

    @property
    def is_empty(self) -> bool:
        """Whether there is no key at all; a keyring with a file always has one."""
        return not self._named

    @property
    def count(self) -> int:
        """The number of clients: keys with the same name count once."""
        return len(self._names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the keys, each once, in the order of the file. Any thread may ask."""
        return self._names

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

    def limits_of(self, name: str) -> KeyLimits:
        """Return how much the key with this name may use."""
        return self._limits.get(name, NO_LIMITS)

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
                names = ", ".join(self._names)
                logger.info("%s: read the file again, the keys are now %s", self._source, names)
            self._is_broken = self._is_broken and version != self._version
            self._told = self._told if self._is_broken else ""
        except (OSError, ValueError) as error:
            self._version = None
            reason = reason_of(error)
            if reason != self._told:
                logger.error(  # noqa: TRY400 - the reason says it, and a traceback nothing more
                    "%s: %s: %s; the keys that were read last stay in force",
                    self._source,
                    self._path,
                    reason,
                )
            self._is_broken, self._told = True, reason

    def _has_rested(self, version: Version) -> bool:
        """Return whether the last write is old enough that nobody is still writing."""
        return self._wall_clock() - version[0] / 1e9 >= LOOK_SECONDS

    def _read(self, path: Path, version: Version) -> None:
        lines = key_lines(path.read_bytes())
        if not self._may_limit:
            _check_unlimited(lines)
        for number in (line.number for line in lines if line.looks_named):
            logger.warning(
                "%s: %s: line %d is a key with a colon in it; if it begins with a name, put a "
                "space after the colon",
                self._source,
                path,
                number,
            )
        self._named = self._given | {_digest(line.key): _name(line) for line in lines}
        self._names = _each_once(self._named.values())
        self._limits = {_name(line): line.limits for line in lines}
        self._version = version
        short = [_name(line) for line in lines if _is_short(line.key)]
        self._short = _each_once([*self._short, *short])


def _version(path: Path) -> Version:
    # stat() follows links: Kubernetes swaps links when a Secret changes.
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a regular file")
    if found.st_size > MAX_FILE_BYTES:
        raise ValueError("it is too large for a key file")
    return found.st_mtime_ns, found.st_size, found.st_ino


def _check_unlimited(lines: Iterable[KeyLine]) -> None:
    for line in lines:
        if line.limits != NO_LIMITS:
            raise ValueError(f"line {line.number}: remove its limits: an admin key has none")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _digest_name(key: str) -> str:
    return f"key-{_digest(key).hex()[:8]}"


def _name(line: KeyLine) -> str:
    return line.name or _digest_name(line.key)


def _each_once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _is_short(key: str) -> bool:
    return len(key) < MIN_KEY_CHARACTERS
