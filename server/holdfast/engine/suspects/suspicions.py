"""Remembers for a day what ended engines: digests of requests, and the keys that sent them.

The files are in the state directory, so a restarted container knows them too, and so do all servers
that share the directory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from holdfast.engine.suspects.suspicion_files import (
    MAX_CHARGES,
    MAX_SUSPICIONS,
    REMEMBERED_SECONDS,
    Charge,
    Findings,
    Suspicion,
    SuspicionFiles,
    merged_charges,
)

REMEMBERED = MAX_SUSPICIONS // 2
"""How many suspects are kept, and as many quarantined requests; the newest stay."""
CHARGES = 3
"""After this many deaths of an engine within `CHARGED_SECONDS`, a key has to wait."""
CHARGED_SECONDS = 3600.0
POLL_SECONDS = 0.4
"""How often the files of other servers are read: what one has written, all know within a second."""
END_SECONDS = 5.0
"""How long the end of the server waits until what it knows is on disk."""

logger = logging.getLogger("holdfast.engine")


class Suspicions:
    """A record of bounded size and age, which servers with one state directory share.

    It belongs to one event loop.
    """

    def __init__(
        self, files: SuspicionFiles | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Read what servers have written to `files`; without files, keep it in memory only."""
        self._files = files
        self._clock = clock
        self.has_quarantined = False
        """Whether anything is quarantined, or was a while ago."""
        self._known: dict[str, Suspicion] = {}
        self._charges: tuple[Charge, ...] = ()
        self._asked = 0
        """How many times `save_soon` was called."""
        self._saved = 0
        """How many of these calls are done."""
        self._woken = threading.Event()
        self._is_failing = False
        if files is not None:
            self._take(files.read_changed())

    @contextmanager
    def learning(self) -> Iterator[None]:
        """While entered on the event loop, learn what other servers find, within a second.

        What is known here is written for them by the same thread, see `save_soon`.
        """
        if self._files is None:
            yield
            return
        ended = threading.Event()
        # No wait for it: a network file system may hang for minutes.
        thread = threading.Thread(
            target=self._poll,
            args=(self._files, asyncio.get_running_loop(), ended),
            name="suspicions",
            daemon=True,
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            self._woken.set()
            if self._saved != self._asked:
                thread.join(END_SECONDS)

    def is_quarantined(self, digest: str) -> bool:
        """Whether a request like this one may not reach an engine."""
        one = self._known.get(digest)
        return one is not None and one.is_quarantined and self._is_fresh(one.at_unix_seconds)

    def is_suspected(self, digest: str, key: str) -> bool:
        """Whether a request like this one, of the same key, alone may have ended an engine."""
        one = self._known.get(digest)
        return one is not None and one.key == key and self._is_fresh(one.at_unix_seconds)

    def has_suspected(self, key: str) -> bool:
        """Whether any request of this key may have ended an engine."""
        known = self._known.values()
        return any(one.key == key and self._is_fresh(one.at_unix_seconds) for one in known)

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

    def save_soon(self) -> None:
        """Have the thread of `learning` write what is known, and try until it is on disk."""
        self._asked += 1
        self._woken.set()

    def save(self) -> bool:
        """Write what is known for the other servers and the next start; False if that fails.

        It may wait for the disk.
        """
        if self._files is None:
            return True
        try:
            self._files.write(Findings(tuple(self._known.values()), self._charges))
        except OSError as error:
            if not self._is_failing:
                path = self._files.path
                logger.warning("Cannot record in %s what ended the engine: %s", path, error)
            self._is_failing = True
            return False
        self._is_failing = False
        return True

    def _poll(
        self, files: SuspicionFiles, loop: asyncio.AbstractEventLoop, ended: threading.Event
    ) -> None:
        while True:
            self._woken.wait(POLL_SECONDS)
            self._woken.clear()
            has_ended = ended.is_set()
            asked = self._asked
            if asked != self._saved and self.save():
                self._saved = asked
            if has_ended:
                return
            found = files.read_changed()
            if found != Findings():
                with suppress(RuntimeError):  # the loop is closed: the server has ended
                    loop.call_soon_threadsafe(self._learn, found)

    def _learn(self, found: Findings) -> None:
        before = self._quarantined()
        self._take(found)
        if new := self._quarantined() - before:
            logger.warning(
                "another server has quarantined %d requests, which are refused here too", len(new)
            )

    def _quarantined(self) -> frozenset[str]:
        return frozenset(one.digest for one in self._known.values() if one.is_quarantined)

    def _add(self, one: Suspicion) -> None:
        self._keep(self._merged([one]))

    def _take(self, found: Findings) -> None:
        """Merge in what servers have written."""
        self._keep(self._merged(found.suspicions))
        self._charges = self._recent(merged_charges(self._charges, found.charges))

    def _keep(self, known: dict[str, Suspicion]) -> None:
        self._known = known
        self.has_quarantined = any(one.is_quarantined for one in known.values())

    def _merged(self, others: Iterable[Suspicion]) -> dict[str, Suspicion]:
        """Merge what is recent, in any order and however often."""
        known: dict[str, Suspicion] = {}
        for one in (*self._known.values(), *others):
            if self._is_fresh(one.at_unix_seconds):
                earlier = known.get(one.digest, one)
                known[one.digest] = _joined(earlier, one)
        fresh = sorted(known.values(), key=lambda one: one.at_unix_seconds)
        kept = (
            *[one for one in fresh if one.is_quarantined][-REMEMBERED:],
            *[one for one in fresh if not one.is_quarantined][-REMEMBERED:],
        )
        return {one.digest: one for one in kept}

    def _recent(self, charges: Iterable[Charge]) -> tuple[Charge, ...]:
        now = self._clock()
        within = [one for one in charges if abs(now - one.at_unix_seconds) < CHARGED_SECONDS]
        return tuple(within[-MAX_CHARGES:])

    def _charged(self, key: str) -> list[float]:
        horizon = self._clock() - CHARGED_SECONDS
        return [
            one.at_unix_seconds
            for one in self._charges
            if one.key == key and one.at_unix_seconds > horizon
        ]

    def _is_fresh(self, at_unix_seconds: float) -> bool:
        # Compared both ways, so that a clock that was set back keeps nothing forever.
        return abs(self._clock() - at_unix_seconds) < REMEMBERED_SECONDS


def _joined(one: Suspicion, other: Suspicion) -> Suspicion:
    """Return what two suspicions of one request come to: the worse of them, then the newer.

    Two of one key from different deaths are a second death: the servers did not know of each other.
    """
    older, newer = sorted((one, other), key=_weight)
    is_second = older.key == newer.key and older.at_unix_seconds != newer.at_unix_seconds
    return replace(newer, is_quarantined=True) if is_second else newer


def _weight(one: Suspicion) -> tuple[bool, float, str]:
    return one.is_quarantined, one.at_unix_seconds, one.key
