"""How many grammars are tried at once, and whose is next? Large bodies are read in the same way.

Keys take turns, so that the grammars of one client never make those of another wait for long.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque

_Waiting = OrderedDict[str, deque[asyncio.Future[None]]]


class Lane:
    """A limit on concurrent work, shared fairly among keys. Belongs to one event loop."""

    def __init__(self, slots: int, *, slots_per_key: int) -> None:
        self._slots = slots
        self._slots_per_key = slots_per_key
        self._taken: Counter[str] = Counter()
        self._waiting: _Waiting = OrderedDict()

    async def take(self, key: str) -> None:
        """Return when the key gets a slot, which it keeps until `give`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(key)
            else:
                self._remove(key, turn)
            raise

    def give(self, key: str) -> None:
        """Give a slot back."""
        self._taken[key] -= 1
        if not self._taken[key]:
            del self._taken[key]
        self._hand_out()

    def _hand_out(self) -> None:
        while self._taken.total() < self._slots and (key := self._next()) is not None:
            turn = self._waiting[key].popleft()
            if self._waiting[key]:
                self._waiting.move_to_end(key)
            else:
                del self._waiting[key]
            if turn.done():  # cancelled, but its request has not run since
                continue
            self._taken[key] += 1
            turn.set_result(None)

    def _next(self) -> str | None:
        return next((k for k in self._waiting if self._taken[k] < self._slots_per_key), None)

    def _remove(self, key: str, turn: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(key, deque())
        if turn in waiting:
            waiting.remove(turn)
            if not waiting:
                del self._waiting[key]
