"""The numbers of the last hour stay in memory, and no more."""

from __future__ import annotations

import math

import pytest

from holdfast.status_page.curves import MAX_POINTS, Curves, percentile


def test_a_point_has_only_what_is_known() -> None:
    """JSON has neither infinity nor a number for what was not measured."""
    curves = Curves()
    curves.add(7, {"running": 0, "first_token_median_seconds": None, "canary": math.inf})
    assert curves.points() == {"7": {"running": 0}}


def test_an_hour_is_kept() -> None:
    """A suspended machine leaves a gap, and the points before it still age."""
    curves = Curves()
    for interval in range(2 * MAX_POINTS):
        curves.add(interval, {"running": interval})
    points = curves.points()
    assert len(points) == MAX_POINTS
    assert next(iter(points)) == str(MAX_POINTS)
    curves.add(3 * MAX_POINTS - 2, {})
    assert list(curves.points()) == [str(2 * MAX_POINTS - 1), str(3 * MAX_POINTS - 2)]


def test_a_clock_that_is_set_back_leaves_no_points_of_a_time_to_come() -> None:
    """They would stay until that time, and take places without end."""
    curves = Curves()
    for interval in (10, 5_000_000, 5_000_001, 11, 12):
        curves.add(interval, {"running": interval})
    assert list(curves.points()) == ["11", "12"]


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([], 50, None), ([3.0], 99, 3.0), ([4, 1, 3, 2], 50, 2), (range(1, 101), 99, 99)],
)
def test_a_percentile_is_one_of_the_values(
    values: list[float], percent: int, expected: float | None
) -> None:
    """The smallest that this share of them does not exceed."""
    assert percentile(values, percent) == expected
