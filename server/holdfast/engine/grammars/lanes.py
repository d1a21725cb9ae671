"""Whose grammar is tried next: keys take turns, and none has more than its share at a time."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque

_Waiting = OrderedDict[str, deque[asyncio.Future[None]]]


class Lane:
    """Gives a number of places to keys in turn. Belongs to one event loop."""

    def __init__(self, places: int, *, places_per_key: int) -> None:
        self._places = places
        self._places_per_key = places_per_key
        self._taken: Counter[str] = Counter()
        self._waiting: _Waiting = OrderedDict()

    async def take(self, key: str) -> None:
        """Return when the key gets a place; it keeps it until `give`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(key)
            else:
                self._forget(key, turn)
            raise

    def give(self, key: str) -> None:
        """Give a place back."""
        self._taken[key] -= 1
        if not self._taken[key]:
            del self._taken[key]
        self._hand_out()

    def _hand_out(self) -> None:
        while self._taken.total() < self._places and (key := self._next()) is not None:
            turn = self._waiting[key].popleft()
            if self._waiting[key]:
                self._waiting.move_to_end(key)
            else:
                del self._waiting[key]
            self._taken[key] += 1
            turn.set_result(None)

    def _next(self) -> str | None:
        return next((k for k in self._waiting if self._taken[k] < self._places_per_key), None)

    def _forget(self, key: str, turn: asyncio.Future[None]) -> None:
        self._waiting[key].remove(turn)
        if not self._waiting[key]:
            del self._waiting[key]
