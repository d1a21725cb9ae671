"""How much has each key used? Counted by the key's name: since the start, and for each day.

A day is one of UTC. Requests without a key are not counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

DAY_SECONDS = 86_400
MAX_NAMES = 200
"""How many names have series of their own."""
OTHER = "other"
"""The name under which the metrics count all further keys."""


@dataclass(slots=True)
class Used:
    """What a key has used."""

    requests: int = 0
    """Requests that an engine was given."""
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        """The tokens that count against a limit."""
        return self.prompt_tokens + self.output_tokens


class KeyUsage:
    """Counts by name. It belongs to one event loop, but any thread may read."""

    def __init__(
        self,
        names: Callable[[], tuple[str, ...]] = tuple,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`names` returns the names of the keys that are valid now."""
        self._names = names
        self._clock = clock
        self._lock = threading.Lock()
        self._totals: dict[str, Used] = {}
        self._admitted: tuple[str, ...] | None = None
        """The valid names that were given places last."""
        self._days: dict[int, dict[str, Used]] = {}
        """What this process has counted."""
        self._earlier: dict[int, Mapping[str, Used]] = {}
        """What earlier processes have counted."""
        self._keeps_days = False

    def count(
        self, name: str, *, requests: int = 0, prompt_tokens: int = 0, output_tokens: int = 0
    ) -> None:
        """Add to what a key has used."""
        for used in (self._total(name), self._on(self.day, name)):
            used.requests += requests
            used.prompt_tokens += prompt_tokens
            used.output_tokens += output_tokens

    @property
    def day(self) -> int:
        """The present day, in days since 1970."""
        return int(self._clock() // DAY_SECONDS)

    @property
    def day_seconds_left(self) -> float:
        """The time until the next day."""
        return DAY_SECONDS - self._clock() % DAY_SECONDS

    def tokens_today(self, name: str) -> int:
        """Count the tokens that a key has used today."""
        counted = (days.get(self.day, {}).get(name) for days in (self._days, self._earlier))
        return sum(used.tokens for used in counted if used is not None)

    def keep_days(self) -> None:
        """Keep each day from now on until it is forgotten; before that, only the latest two."""
        self._keeps_days = True

    def restore(self, day: int, used: Mapping[str, Used]) -> None:
        """Add what earlier processes have counted for a day. Any thread may."""
        self._earlier[day] = {name: replace(one) for name, one in used.items()}

    def is_restored(self, day: int) -> bool:
        """Whether it is known what earlier processes have counted for a day."""
        return day in self._earlier

    def forget(self, day: int) -> None:
        """Drop a day that is over, and no longer counted. Any thread may."""
        self._days.pop(day, None)
        self._earlier.pop(day, None)

    def totals(self) -> dict[str, Used]:
        """Return what each key has used since the start, valid keys without any use included.

        At most `MAX_NAMES` keys have their own entry; the others are `OTHER`. A valid key takes the
        place of one that is no longer valid.
        """
        self._admit(self._names())
        return {name: replace(used) for name, used in list(self._totals.items())}

    def days(self) -> dict[int, dict[str, Used]]:
        """Return what each key has used on each day that is kept."""
        return {day: self._on_whole(day) for day in sorted({*self._days, *self._earlier})}

    def _total(self, name: str) -> Used:
        used = self._totals.get(name)
        if used is not None:
            return used
        names = self._names()
        if self._room <= 0 and names is not self._admitted:
            self._admit(names)
        with self._lock:
            return self._place(name)

    def _admit(self, names: tuple[str, ...]) -> None:
        """Give the valid names places, those of the oldest removed keys if there are no others."""
        valid = frozenset(names)
        with self._lock:
            missing = len(valid - self._totals.keys()) - self._room
            removed = [name for name in self._totals if name not in valid and name != OTHER]
            for name in removed[: max(missing, 0)]:
                del self._totals[name]
            # A series must exist before its first increase, which an alert would not see otherwise.
            for name in names:
                self._place(name)
            self._admitted = names

    def _place(self, name: str) -> Used:
        is_full = self._room <= 0 and name not in self._totals
        return self._totals.setdefault(OTHER if is_full else name, Used())

    @property
    def _room(self) -> int:
        return MAX_NAMES - len(self._totals) + (OTHER in self._totals)

    def _on(self, day: int, name: str) -> Used:
        by_name = self._days.get(day)
        if by_name is None:
            by_name = {}
            latest = max(self._days, default=day)
            if not self._keeps_days:
                self._days = {latest: self._days.get(latest, by_name)}
            self._days[day] = by_name
        return by_name.setdefault(name, Used())

    def _on_whole(self, day: int) -> dict[str, Used]:
        """Return what this process and earlier ones have counted for a day."""
        whole = {name: replace(one) for name, one in self._earlier.get(day, {}).items()}
        for name, used in list(self._days.get(day, {}).items()):
            before = whole.get(name, Used())
            whole[name] = Used(
                before.requests + used.requests,
                before.prompt_tokens + used.prompt_tokens,
                before.output_tokens + used.output_tokens,
            )
        return whole
