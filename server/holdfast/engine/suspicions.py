"""Remembers for a day what ended engines: digests of requests, and the keys that sent them.

The file is in the state directory, so a restarted container knows them too. It holds digests and
names of keys, never a prompt and never a key. An unreadable file counts as a missing one.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.atomic_files import directory_lock, read_record, write_atomically

REMEMBERED = 128
"""How many suspects are kept, and as many quarantined requests; the newest stay."""
REMEMBERED_SECONDS = 24 * 3600.0
CHARGES = 3
"""After this many deaths of an engine within `CHARGED_SECONDS`, a key has to wait."""
CHARGED_SECONDS = 3600.0
REMEMBERED_CHARGES = 256

_SCHEMA = 1
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[\x21-\x7e]{0,64}")
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


class Suspicions:
    """A record of bounded size and age; several servers can safely share its directory."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """Read the file at `path`; without a path, keep the record in memory only."""
        self._path = path
        self._clock = clock
        self.has_quarantined = False
        """Whether anything is quarantined, or was a while ago."""
        self._known: dict[str, Suspicion] = {}
        self._charges: tuple[Charge, ...] = ()
        if path is not None:
            self._take(*_read(path))

    def is_quarantined(self, digest: str) -> bool:
        """Whether a request like this one may not reach an engine."""
        one = self._known.get(digest)
        return one is not None and one.is_quarantined and self._is_fresh(one.at_unix_seconds)

    def is_suspected(self, digest: str, key: str) -> bool:
        """Whether a request like this one, of the same key, alone may have ended an engine."""
        one = self._known.get(digest)
        return one is not None and one.key == key and self._is_fresh(one.at_unix_seconds)

    def suspect(self, digest: str, key: str) -> None:
        """Record that a request, and no other, may have ended an engine."""
        self._add(Suspicion(digest, key, self._clock(), is_quarantined=False))

    def quarantine(self, digest: str, key: str) -> None:
        """Record that a request ended engines."""
        self._add(Suspicion(digest, key, self._clock(), is_quarantined=True))

    def charge(self, key: str, deaths: int) -> None:
        """Record that a key has ended this many engines."""
        self._charges = self._recent([*self._charges, *[Charge(key, self._clock())] * deaths])

    def charged(self, key: str) -> int:
        """Count the engines that the key has ended within the last hour."""
        return len(self._charged(key))

    def suspended_seconds(self, key: str) -> float:
        """Return how long the key must wait before it may send a request; 0 if it need not."""
        if not key or len(self._charges) < CHARGES:
            return 0.0
        charged = self._charged(key)
        if len(charged) < CHARGES:
            return 0.0
        return max(0.0, charged[-CHARGES] + CHARGED_SECONDS - self._clock())

    def save(self) -> None:
        """Save the record merged with what others have saved meanwhile. May wait for the disk."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with directory_lock(self._path.parent):
                self._take(*_read(self._path))
                write_atomically(self._path, self._document())
        except OSError as error:
            logger.warning("Cannot keep in %s what ended the engine: %s", self._path, error)

    def _add(self, one: Suspicion) -> None:
        self._keep(self._merged([one]))

    def _take(self, suspicions: Iterable[Suspicion], charges: Iterable[Charge]) -> None:
        """Merge in what is on disk."""
        self._keep(self._merged(suspicions))
        self._charges = self._recent(_merged_charges(self._charges, charges))

    def _keep(self, known: dict[str, Suspicion]) -> None:
        self._known = known
        self.has_quarantined = any(one.is_quarantined for one in known.values())

    def _merged(self, others: Iterable[Suspicion]) -> dict[str, Suspicion]:
        """Merge what is recent; of two with one digest the worse, then the newer, stays."""
        known = dict(self._known)
        for one in others:
            if one.digest not in known or _weight(one) > _weight(known[one.digest]):
                known[one.digest] = one
        fresh = [one for one in known.values() if self._is_fresh(one.at_unix_seconds)]
        fresh.sort(key=lambda one: one.at_unix_seconds)
        kept = (
            *[one for one in fresh if one.is_quarantined][-REMEMBERED:],
            *[one for one in fresh if not one.is_quarantined][-REMEMBERED:],
        )
        return {one.digest: one for one in kept}

    def _recent(self, charges: Iterable[Charge]) -> tuple[Charge, ...]:
        now = self._clock()
        within = [one for one in charges if abs(now - one.at_unix_seconds) < CHARGED_SECONDS]
        return tuple(within[-REMEMBERED_CHARGES:])

    def _charged(self, key: str) -> list[float]:
        horizon = self._clock() - CHARGED_SECONDS
        return [
            one.at_unix_seconds
            for one in self._charges
            if one.key == key and one.at_unix_seconds > horizon
        ]

    def _is_fresh(self, at_unix_seconds: float) -> bool:
        # Compared both ways, so that a clock that was set back keeps nothing for ever.
        return abs(self._clock() - at_unix_seconds) < REMEMBERED_SECONDS

    def _document(self) -> str:
        record = {
            "schema": _SCHEMA,
            "suspicions": [asdict(one) for one in self._known.values()],
            "charges": [asdict(one) for one in self._charges],
        }
        return json.dumps(record) + "\n"


def _weight(one: Suspicion) -> tuple[bool, float]:
    return one.is_quarantined, one.at_unix_seconds


def _merged_charges(ours: Iterable[Charge], others: Iterable[Charge]) -> list[Charge]:
    """Merge charges, oldest first, each as often as the side that has more of it."""
    ours, others = tuple(ours), tuple(others)
    counts = {one: max(ours.count(one), others.count(one)) for one in {*ours, *others}}
    merged = [one for one, count in counts.items() for _ in range(count)]
    return sorted(merged, key=lambda one: one.at_unix_seconds)


def _read(path: Path) -> tuple[list[Suspicion], list[Charge]]:
    try:
        return _parsed(read_record(path))
    except (FileNotFoundError, NotADirectoryError):
        return [], []
    except (OSError, ValueError) as error:
        logger.warning("%s is ignored: %s", path, error)
        return [], []


def _parsed(record: Any) -> tuple[list[Suspicion], list[Charge]]:
    """Parse a document; a ValueError says what is wrong with it."""
    try:
        if record["schema"] != _SCHEMA:
            raise ValueError(f"its schema version is not {_SCHEMA}")
        suspicions = [
            Suspicion(
                _text(one["digest"], _DIGEST),
                _text(one["key"], _KEY),
                float(one["at_unix_seconds"]),
                bool(one["is_quarantined"]),
            )
            for one in record["suspicions"]
        ]
        charges = [
            Charge(_text(one["key"], _KEY), float(one["at_unix_seconds"]))
            for one in record["charges"]
        ]
    except (TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"it does not have the expected form: {error}") from error
    return suspicions, charges


def _text(value: Any, form: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not form.fullmatch(value):
        raise ValueError("it contains an invalid value")
    return value
