"""A time that is written twice is the same, unless the clock was set."""

from __future__ import annotations

import pytest

from holdfast.status_page.wall_clock import WallClock


class Clocks:
    """Two clocks that a test sets."""

    def __init__(self) -> None:
        self.wall_seconds = 1000.0
        self.monotonic_seconds = 10.0

    def wall_clock(self) -> WallClock:
        return WallClock(lambda: self.wall_seconds, lambda: self.monotonic_seconds)


def test_a_monotonic_time_is_written_as_a_time_of_day() -> None:
    """In UTC."""
    assert Clocks().wall_clock().written(20.0) == "1970-01-01T00:16:50.000+00:00"


@pytest.mark.parametrize(("moved_seconds", "was_set"), [(0.9, False), (-0.9, False), (60.0, True)])
def test_a_clock_that_was_set_is_measured_again(moved_seconds: float, *, was_set: bool) -> None:
    """Once, and not for what a clock corrects all the time."""
    clocks = Clocks()
    clock = clocks.wall_clock()
    before = clock.written(20.0)
    clocks.wall_seconds += moved_seconds
    assert [clock.was_set(), clock.was_set()] == [was_set, False]
    assert (clock.written(20.0) != before) is was_set
