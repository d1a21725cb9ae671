"""Exchanges what ended engines with the servers that share the state directory, over NFS too.

Each server writes one file of its own, with everything that it knows, and reads those of the
others. So nothing has to be locked, and no server can overwrite what another one learned. A file is
opened to see whether it has changed: NFS then asks its server, while what it says of a file that is
not open may be a minute old (https://man7.org/linux/man-pages/man5/nfs.5.html, "Close-to-open cache
consistency"). It reports no events.

A file holds digests and names of keys, never a prompt and never a key.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.atomic_files import (
    FileVersion,
    files_with_suffix,
    read_changed_record,
    write_atomically,
)

REMEMBERED_SECONDS = 24 * 3600.0
MAX_FILES = 256
"""How many files of other servers are read, the newest ones."""
MAX_SUSPICIONS = 256
"""The most in a file; one with more is not ours."""
MAX_CHARGES = 128
CLEAN_SECONDS = 3600.0
"""How often old files are looked for: a server that ends leaves its file."""

_SCHEMA = 1
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[\x21-\x7e]{0,64}")
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
"""The file was replaced or removed while it was opened; ESTALE is what NFS says then."""
logger = logging.getLogger("holdfast.engine")


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A request that alone may have ended an engine."""

    digest: str
    key: str
    """The name of the key that sent the request; empty if the server needs no key."""
    at_unix_seconds: float
    is_quarantined: bool


@dataclass(frozen=True, slots=True)
class Charge:
    """A death of an engine that a key was found to have caused."""

    key: str
    at_unix_seconds: float


@dataclass(frozen=True, slots=True)
class Findings:
    """What servers know of requests that ended engines."""

    suspicions: tuple[Suspicion, ...] = ()
    charges: tuple[Charge, ...] = ()


def suspicion_files(directory: Path | None, fingerprint: str) -> SuspicionFiles | None:
    """Return the records of what ended such engines; another model or version has its own."""
    return SuspicionFiles(directory, fingerprint) if directory is not None else None


class SuspicionFiles:
    """The files of the servers with one state directory and one kind of engine.

    One thread may read while another one writes.
    """

    def __init__(
        self, directory: Path, fingerprint: str, clock: Callable[[], float] = time.time
    ) -> None:
        """Choose the name of this server's own file; `fingerprint` is that of its engine."""
        self._directory = directory
        self._stem = f"suspicions-{fingerprint}"
        self._clock = clock
        self.path = directory / f"suspicions-{fingerprint}-{secrets.token_hex(8)}.json"
        """The file that this server writes."""
        self._seen: dict[Path, FileVersion] = {}
        self._refused: dict[Path, str] = {}
        self._cleaned_unix_seconds = 0.0

    def read_changed(self) -> Findings:
        """Read what others have written since the last call.

        A file that cannot be read, or is not one of theirs, is ignored with a warning. One that
        nothing recent can be in is removed.
        """
        if abs(self._clock() - self._cleaned_unix_seconds) >= CLEAN_SECONDS:
            self._remove_old()
        paths = self._others()
        if len(paths) > MAX_FILES:
            paths = sorted(paths, key=_modified_seconds, reverse=True)[:MAX_FILES]
        self._seen = {path: self._seen[path] for path in paths if path in self._seen}
        self._refused = {path: self._refused[path] for path in paths if path in self._refused}
        found = [self._read(path) for path in paths]
        return Findings(
            tuple(one for findings in found for one in findings.suspicions),
            # What one server has learned from another is in the files of both, and is one death.
            merged_charges(*(findings.charges for findings in found)),
        )

    def write(self, findings: Findings) -> None:
        """Replace this server's file.

        Raises:
            OSError: it could not be written; the old content is unchanged.
        """
        record = {
            "schema": _SCHEMA,
            "suspicions": [asdict(one) for one in findings.suspicions],
            "charges": [asdict(one) for one in findings.charges],
        }
        write_atomically(self.path, json.dumps(record, separators=(",", ":")) + "\n")

    def _remove_old(self) -> None:
        self._cleaned_unix_seconds = self._clock()
        for path in self._others():
            with suppress(OSError):  # another server removes it, too
                if path.stat().st_mtime < self._clock() - REMEMBERED_SECONDS:
                    path.unlink()

    def _others(self) -> list[Path]:
        """List the files of the other servers, and of an earlier version, which shared one."""
        return sorted(
            path
            for path in files_with_suffix(".json", self._directory)
            if (path.stem == self._stem or path.stem.startswith(f"{self._stem}-"))
            and path != self.path
        )

    def _read(self, path: Path) -> Findings:
        try:
            version, document = read_changed_record(path, self._seen.get(path))
            if version != self._seen.get(path):
                self._seen[path] = version
                return _parsed(document)
        except OSError as error:
            if error.errno not in _GONE:
                self._refuse(path, error)
        except ValueError as error:
            self._refuse(path, error)
        return Findings()

    def _refuse(self, path: Path, error: OSError | ValueError) -> None:
        if self._refused.get(path) != str(error):
            self._refused[path] = str(error)
            logger.warning("%s is ignored: %s", path, error)


def _parsed(record: Any) -> Findings:
    """Parse a document; a ValueError says what is wrong with it."""
    try:
        if record["schema"] != _SCHEMA:
            raise ValueError(f"its schema version is not {_SCHEMA}")
        if len(record["suspicions"]) > MAX_SUSPICIONS or len(record["charges"]) > MAX_CHARGES:
            raise ValueError("it has more entries than a server writes")
        suspicions = tuple(
            Suspicion(
                _text(one["digest"], _DIGEST),
                _text(one["key"], _KEY),
                float(one["at_unix_seconds"]),
                bool(one["is_quarantined"]),
            )
            for one in record["suspicions"]
        )
        charges = tuple(
            Charge(_text(one["key"], _KEY), float(one["at_unix_seconds"]))
            for one in record["charges"]
        )
    except (TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"it does not have the expected form: {error}") from error
    return Findings(suspicions, charges)


def _text(value: Any, form: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not form.fullmatch(value):
        raise ValueError("it contains an invalid value")
    return value


def _modified_seconds(path: Path) -> float:
    """Return when a file was written; 0 if it cannot be known."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def merged_charges(*sides: Iterable[Charge]) -> tuple[Charge, ...]:
    """Merge charges, oldest first, each as often as the side that has the most of it."""
    counts: dict[Charge, int] = {}
    for side in sides:
        for one, count in Counter(side).items():
            counts[one] = max(counts.get(one, 0), count)
    merged = [one for one, count in counts.items() for _ in range(count)]
    return tuple(sorted(merged, key=lambda one: one.at_unix_seconds))
