"""What the pages of a server say, in the words of the panels: the other way to the same numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from ops_tests.life import Moment, Page

Values = list[float]
Expected = Callable[["Seen"], Values]
Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Seen:
    """One page, and the page of the beginning of the window."""

    page: Page
    since: Page
    window_seconds: int

    def of(self, name: str, **wanted: str) -> dict[Labels, float]:
        """The series with these labels, where `a|b` is one or the other and `!a` anything else."""
        return {
            labels: value
            for (found, labels), value in self.page.items()
            if found == name and _matches(dict(labels), wanted)
        }

    def values(self, name: str, **wanted: str) -> Values:
        """The values of those series."""
        return list(self.of(name, **wanted).values())

    def rises(self, name: str, **wanted: str) -> dict[Labels, float]:
        """How far each of those series rose in the window."""
        return {
            labels: value - self.since[name, labels]
            for labels, value in self.of(name, **wanted).items()
            if (name, labels) in self.since
        }

    def rates(self, name: str, **wanted: str) -> Values:
        """The same, a second."""
        return [rise / self.window_seconds for rise in self.rises(name, **wanted).values()]

    def total(self, name: str, **wanted: str) -> Values:
        """The sum of those series, if there is one."""
        return summed(self.values(name, **wanted))

    def rate(self, name: str, **wanted: str) -> Values:
        """How fast their sum rises."""
        return summed(self.rates(name, **wanted))

    def quantile(self, share: float, histogram: str) -> Values:
        """The quantile of what was observed in the window, between the bounds of its bucket."""
        buckets: dict[float, float] = defaultdict(float)
        for labels, rise in self.rises(f"{histogram}_bucket").items():
            buckets[float(dict(labels)["le"])] += rise
        if not buckets:
            return []
        return [_interpolated(share, sorted(buckets.items()))]

    def share_within(self, histogram: str, bound: str) -> Values:
        """The share of what was observed in the window that is within the bound of a bucket."""
        good = self.rate(f"{histogram}_bucket", le=bound)
        return ratio(good, self.rate(f"{histogram}_count"))

    def mean(self, histogram: str) -> Values:
        """The mean of what was observed in the window."""
        return ratio(self.rate(f"{histogram}_sum"), self.rate(f"{histogram}_count"))


def looks(moment: Moment) -> tuple[Seen, Seen]:
    """Before and after the queries."""
    return (
        Seen(moment.before, moment.since, moment.window_seconds),
        Seen(moment.after, moment.since, moment.window_seconds),
    )


def summed(values: Values) -> Values:
    """The sum, if there is anything to add."""
    return [math.fsum(values)] if values else []


def ratio(part: Values, whole: Values) -> Values:
    """One over the other, if the whole is something."""
    return [a / b for a, b in zip(part, whole, strict=False) if b > 0]


def _matches(labels: dict[str, str], wanted: dict[str, str]) -> bool:
    return all(
        labels.get(key) not in text[1:].split("|")
        if text.startswith("!")
        else labels.get(key) in text.split("|")
        for key, text in wanted.items()
    )


def _interpolated(share: float, buckets: list[tuple[float, float]]) -> float:
    rank = share * buckets[-1][1]
    if not buckets[-1][1]:
        return math.nan
    for (lower, below), (upper, count) in pairwise([(0.0, 0.0), *buckets]):
        if count >= rank:
            if math.isinf(upper):
                return lower
            return lower + (upper - lower) * (rank - below) / (count - below)
    raise AssertionError("the last bucket has everything")
