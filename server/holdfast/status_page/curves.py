"""What did the last hour look like? One point for each interval, bounded in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from types import MappingProxyType

INTERVAL_SECONDS = 15
MAX_POINTS = 240

Point = Mapping[str, float]


class Curves:
    """The points of the last hour. Belongs to one event loop."""

    def __init__(self) -> None:
        self._points: dict[int, Point] = {}

    def add(self, interval: int, point: Mapping[str, float | None]) -> None:
        """Add the point of an interval, without the values that are unknown or not finite.

        An interval is the Unix time of its beginning divided by its length.
        """
        known = {
            name: value for name, value in point.items() if value is not None and isfinite(value)
        }
        self._points[interval] = MappingProxyType(known)
        oldest = interval - MAX_POINTS
        # A clock that is set back leaves points behind that are not of the last hour by its time.
        self._points = {key: one for key, one in self._points.items() if oldest < key <= interval}

    def points(self) -> Mapping[str, Point]:
        """Return the points by their intervals. One that has not changed is the same object."""
        return {str(interval): point for interval, point in self._points.items()}


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return the smallest value that this share of all values does not exceed; None for none."""
    if not values:
        return None
    rank = ceil(len(values) * percent / 100)
    return sorted(values)[max(rank, 1) - 1]
