"""Waits are counted where they belong."""

from __future__ import annotations

import math

import pytest

from holdfast.telemetry.waits import Waits


@pytest.mark.parametrize(
    ("seconds", "bound"),
    [(0.0, 0.01), (0.01, 0.01), (0.011, 0.04), (640.0, 640.0), (641, math.inf)],
)
def test_a_wait_is_within_its_bound_and_not_below(seconds: float, bound: float) -> None:
    """A bound is the longest wait that it counts."""
    waits = Waits()
    waits.count(seconds)
    assert min(at for at, count in waits.buckets if count) == bound


def test_every_larger_bound_counts_it_too() -> None:
    """The buckets are cumulative, and the sum is that of all."""
    waits = Waits()
    for seconds in (0.0, 0.0, 3.0, 1000.0):
        waits.count(seconds)
    counts = [count for _, count in waits.buckets]
    assert counts == sorted(counts)
    assert (counts[0], dict(waits.buckets)[5.0], counts[-1]) == (2, 3, 4)
    assert waits.sum_seconds == 1003.0
