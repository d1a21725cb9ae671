"""HTTP requests by route, method and class of status, in the families that `vllm serve` has.

vLLM counts within its own application: what a layer of the front end answers would be missing. So
the front end counts, under the names, labels and buckets of `prometheus-fastapi-instrumentator`
8.1, which vLLM 0.32 uses as they come. Sizes are of the bytes that passed, where it believes the
header of a request.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

FINE_BOUNDS_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5),
    *(5.0, 7.5, 10.0, 30.0, 60.0),
)
COARSE_BOUNDS_SECONDS = (0.1, 0.5, 1.0)


class HttpRequests(Collector):
    """Counts what was asked and answered. One event loop counts, any thread may read.

    There are as many series as combinations of labels, which the caller has to bound.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], int] = {}
        self._received: dict[str, _Summary] = {}
        self._sent: dict[str, _Summary] = {}
        self._fine = _Histogram(FINE_BOUNDS_SECONDS)
        self._coarse: dict[tuple[str, str], _Histogram] = {}

    @property
    def total(self) -> int:
        """How many requests were counted."""
        return sum(self._counts.copy().values())

    def count(  # noqa: PLR0913 - what there is to say of a request
        self,
        method: str,
        handler: str,
        status: int,
        *,
        duration_seconds: float,
        received_bytes: int,
        sent_bytes: int,
    ) -> None:
        """Count one request that is over; `handler` is the template of its route."""
        labels = (method, f"{status // 100}xx", handler)
        self._counts[labels] = self._counts.get(labels, 0) + 1
        if (coarse := self._coarse.get((method, handler))) is None:
            coarse = self._coarse[method, handler] = _Histogram(COARSE_BOUNDS_SECONDS)
        if (received := self._received.get(handler)) is None:
            received = self._received[handler] = _Summary()
            self._sent[handler] = _Summary()
        coarse.observe(duration_seconds)
        self._fine.observe(duration_seconds)
        received.observe(received_bytes)
        self._sent[handler].observe(sent_bytes)

    def collect(self) -> Iterator[Metric]:
        """Yield the five families; only one of them has a series before the first request."""
        total = CounterMetricFamily(
            "http_requests_total",
            "HTTP requests by method, status class and route.",
            labels=("method", "status", "handler"),
        )
        for labels, count in self._counts.copy().items():
            total.add_metric(labels, count)
        yield total
        yield _summary(
            "http_request_size_bytes", "Bytes of request bodies by route.", self._received
        )
        yield _summary("http_response_size_bytes", "Bytes of response bodies by route.", self._sent)
        fine = HistogramMetricFamily(
            "http_request_duration_highr_seconds",
            "Time from a request to the end of its response, in fine buckets.",
        )
        self._fine.add_to(fine, ())
        yield fine
        coarse = HistogramMetricFamily(
            "http_request_duration_seconds",
            "Time from a request to the end of its response by method and route, in coarse "
            "buckets.",
            labels=("method", "handler"),
        )
        for key, histogram in self._coarse.copy().items():
            histogram.add_to(coarse, key)
        yield coarse


class _Summary:
    """How many, and how much."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0

    def observe(self, size: int) -> None:
        self.count += 1
        self.total += size


class _Histogram:
    """Times by their length."""

    __slots__ = ("_bounds", "_counts", "_sum_seconds")

    def __init__(self, bounds_seconds: tuple[float, ...]) -> None:
        self._bounds = bounds_seconds
        self._counts = [0] * (len(bounds_seconds) + 1)
        self._sum_seconds = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum_seconds += seconds

    def add_to(self, family: HistogramMetricFamily, labels: tuple[str, ...]) -> None:
        bounds = map(floatToGoString, (*self._bounds, math.inf))
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(labels, buckets=buckets, sum_value=self._sum_seconds)


def _summary(name: str, help_text: str, by_handler: dict[str, _Summary]) -> SummaryMetricFamily:
    family = SummaryMetricFamily(name, help_text, labels=("handler",))
    for handler, summary in by_handler.copy().items():
        family.add_metric([handler], count_value=summary.count, sum_value=summary.total)
    return family
