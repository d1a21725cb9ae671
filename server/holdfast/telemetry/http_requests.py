"""HTTP requests by route, method and class of status, in the families that `vllm serve` has.

vLLM counts within its own application: what a layer of the front end answers would be missing. So
the front end counts, under the names, labels and buckets of `prometheus-fastapi-instrumentator`
8.1, which vLLM 0.32 uses as they come. Sizes are of the bytes that passed, where it believes the
header of a request.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Counter, Histogram, Metric, Summary
from prometheus_client.registry import Collector

FINE_BOUNDS_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5),
    *(5.0, 7.5, 10.0, 30.0, 60.0),
)
COARSE_BOUNDS_SECONDS = (0.1, 0.5, 1.0)


class HttpRequests(Collector):
    """Counts what was asked and answered. Any thread may count and read.

    There are as many series as combinations of labels, which the caller has to bound.
    """

    def __init__(self) -> None:
        self._total = Counter(
            "http_requests_total",
            "HTTP requests by method, status class and route.",
            ("method", "status", "handler"),
            registry=None,
        )
        self._received = Summary(
            "http_request_size_bytes",
            "Bytes of request bodies by route.",
            ("handler",),
            registry=None,
        )
        self._sent = Summary(
            "http_response_size_bytes",
            "Bytes of response bodies by route.",
            ("handler",),
            registry=None,
        )
        self._fine = Histogram(
            "http_request_duration_highr_seconds",
            "Time from a request to the end of its response, in fine buckets.",
            buckets=FINE_BOUNDS_SECONDS,
            registry=None,
        )
        self._coarse = Histogram(
            "http_request_duration_seconds",
            "Time from a request to the end of its response by method and route, in coarse "
            "buckets.",
            ("method", "handler"),
            buckets=COARSE_BOUNDS_SECONDS,
            registry=None,
        )

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
        self._total.labels(method, f"{status // 100}xx", handler).inc()
        self._received.labels(handler).observe(received_bytes)
        self._sent.labels(handler).observe(sent_bytes)
        self._fine.observe(duration_seconds)
        self._coarse.labels(method, handler).observe(duration_seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield the five families; only one of them has a series before the first request."""
        for metric in (self._total, self._received, self._sent, self._fine, self._coarse):
            yield from metric.collect()
