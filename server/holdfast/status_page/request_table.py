"""Which requests run, and how fast? Rows for the page, with the speed of the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from holdfast.engine.requests.request_progress import RequestRow

WINDOW_SECONDS = 5.0
"""A speed is measured from the last reading that is as old; from the oldest if none is."""
STEP_SECONDS = 0.4
"""Readings are at least this far apart, however many ask for the rows."""
MIN_SPEED_SECONDS = 1.0
"""Over a shorter time a single step of the engine would look like a speed."""


class RequestTable:
    """The rows of the running requests, by their numbers. Belongs to one event loop."""

    def __init__(self, to_time: Callable[[float], str]) -> None:
        """Take what writes a monotonic time for clients."""
        self._to_time = to_time
        self._readings: dict[int, deque[tuple[float, int]]] = {}

    def rows(self, rows: Iterable[RequestRow], now_seconds: float) -> dict[str, dict[str, Any]]:
        """Return the rows as the document has them; unknown values are absent."""
        known, self._readings = self._readings, {}
        found = {}
        for row in rows:
            readings = known.get(row.number) or deque()
            if row.output_tokens:
                _add(readings, now_seconds, row.output_tokens)
                self._readings[row.number] = readings
            found[str(row.number)] = self._shown(row, _speed(readings))
        return found

    def _shown(self, row: RequestRow, tokens_per_second: float | None) -> dict[str, Any]:
        received = row.received_seconds
        values = {
            "stage": row.stage,
            "received": None if received is None else self._to_time(received),
            "key": row.key or None,
            "generation": row.generation,
            "replays": row.replays,
            "prompt_tokens": row.prompt_tokens,
            "prefilled_tokens": row.prefilled_tokens,
            "output_tokens": row.output_tokens,
            "output_tokens_per_second": tokens_per_second,
        }
        return {name: value for name, value in values.items() if value is not None}


def _add(readings: deque[tuple[float, int]], now_seconds: float, tokens: int) -> None:
    while len(readings) > 1 and readings[1][0] <= now_seconds - WINDOW_SECONDS:
        readings.popleft()
    if readings and tokens < readings[-1][1]:
        readings.clear()  # a replay begins again
    if not readings or now_seconds >= readings[-1][0] + STEP_SECONDS:
        readings.append((now_seconds, tokens))


def _speed(readings: deque[tuple[float, int]]) -> float | None:
    """Return the tokens per second between the first and the last reading; None if unknown."""
    if len(readings) < 2:
        return None
    (began_seconds, before), (ended_seconds, after) = readings[0], readings[-1]
    seconds = ended_seconds - began_seconds
    return round((after - before) / seconds, 1) if seconds >= MIN_SPEED_SECONDS else None
