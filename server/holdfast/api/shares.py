"""How many requests may one key have in progress? As many as it leaves connections to the others.

A connection makes room for a new one unless it has a request in progress, see
`listener.connection_table`: a body that drips, an answer that is read slowly, a WebSocket.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ConnectionShares:
    """Counts requests in progress by key. It belongs to one event loop.

    Of several keys, one gets half of the connections, two get a third each, and so on. A single
    key, or all clients without keys, may use every connection: there is nobody to leave one to.
    """

    def __init__(
        self, max_connections: float = math.inf, count_keys: Callable[[], int] = lambda: 0
    ) -> None:
        self._max_connections = max_connections
        self._count_keys = count_keys
        self._all = 0
        self._of: Counter[str] = Counter()
        """By key; no count is 0."""

    def count(self, key: str) -> int:
        """Return how many requests of the key are in progress."""
        return self._of[key]

    def has_room(self, key: str) -> bool:
        """Return whether the key may begin another request."""
        if self._count_keys() < 2:
            return True
        return self._of[key] + 1 <= self._max_connections - self._all - 1

    @contextmanager
    def in_progress(self, key: str) -> Iterator[None]:
        """Count a request of the key while entered."""
        self._all += 1
        self._of[key] += 1
        try:
            yield
        finally:
            self._all -= 1
            self._of[key] -= 1
            if not self._of[key]:
                del self._of[key]
