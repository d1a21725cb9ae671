"""How the numbers of the ranks are read and judged."""

from __future__ import annotations

import pytest

from holdfast.probe.measure import Run, expected_seconds, leaves_margin, quiet_seconds
from sample_status import a_rank

GIB = 1024**3


def test_one_run_tells_no_rate() -> None:
    """The first run pays for compilation, so it tells nothing alone."""
    assert expected_seconds([], 10) is None
    assert expected_seconds([Run(128, 60.0)], 10) is None


def test_rate_is_that_of_the_largest_run() -> None:
    """Small runs are mostly overhead; the first is left out even if it is the largest."""
    runs = [Run(4096, 900.0), Run(100, 10.0), Run(1000, 20.0)]
    assert expected_seconds(runs, 500) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("available", "cost", "growth", "expected"),
    [
        (3 * GIB, GIB, 2.0, True),
        (3 * GIB - 1, GIB, 2.0, False),
        (GIB, 0, 0.0, True),
        (GIB - 1, 0, 0.0, False),
        (GIB, -5, 2.0, True),
    ],
)
def test_margin_of_the_host(available: int, cost: int, growth: float, expected: bool) -> None:
    """A size may be tried if 1 GiB is left after it costs in proportion to the last."""
    found = leaves_margin(available_bytes=available, cost_bytes=cost, growth=growth)
    assert found is expected


def test_engines_are_quiet_when_none_of_them_steps() -> None:
    """An engine that is done with its prompt is idle while another computes its own."""
    ranks = [a_rank(last_step_ended_seconds=end) for end in (None, 700.0, 990.0)]
    assert quiet_seconds(ranks, 1000.0) == pytest.approx(10.0)
