"""HTTP requests by route, method and class of status, in the families that `vllm serve` has.

vLLM counts in its own application, and so misses what a layer of the front end answers. Therefore
the front end counts, with the names, labels and buckets of `prometheus-fastapi-instrumentator` 8.1,
which vLLM 0.32 uses unchanged. Each label has few values, whatever clients request. Sizes are those
of the transferred bytes, where the instrumentator trusts the header of a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import unquote

from prometheus_client import Counter, Histogram, Metric, Summary
from prometheus_client.registry import Collector
from starlette.routing import BaseRoute
from starlette.types import Scope

from holdfast.api.router import route_path
from holdfast.request_context import FREQUENT_PATHS

FINE_BOUNDS_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5),
    *(5.0, 7.5, 10.0, 30.0, 60.0),
)
COARSE_BOUNDS_SECONDS = (0.1, 0.5, 1.0)


class HttpRequests(Collector):
    """Counts requests and responses. Any thread may count and read.

    There is a series for each combination of labels, whose number the caller must bound.
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

    def count(  # noqa: PLR0913 - the facts of one request
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
        """Yield the five families; only one has a series before the first request."""
        for metric in (self._total, self._received, self._sent, self._fine, self._coarse):
            yield from metric.collect()


UNKNOWN_HANDLER = "none"
"""vLLM's label for a path without a route."""
OTHER_METHOD = "other"
UNCOUNTED_PATHS = frozenset(
    {"/metrics", "/health", "/load", "/ping", "/version", "/server_info"}
    | {"/livez", "/readyz", "/startupz", "/statusz"}
)
"""The paths of monitoring: vLLM leaves out the first six, and ours serve the same purpose."""

_METHODS = frozenset(
    {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"}
)


class HttpCounts:
    """Counts each request under the template of its route, whichever layer answers it.

    So requests that the gate or the key check refuses are counted with those that vLLM answers.
    """

    def __init__(self, *, root_path: str = "") -> None:
        self.requests = HttpRequests()
        """The counts."""
        self._root_path = root_path
        # vLLM's routes are known once it is loaded; these are requested, and refused, before that.
        self._plain = set(FREQUENT_PATHS)
        self._open: list[tuple[re.Pattern[str], str]] = []

    def add_routes(self, routes: Iterable[BaseRoute]) -> None:
        """Add the routes of an application; routes added earlier have priority."""
        for route in routes:
            template: str = getattr(route, "path", "")
            pattern = getattr(route, "path_regex", None)
            if template and pattern is not None and pattern.groups:
                self._open.append((pattern, template))
            elif template:
                self._plain.add(template.rstrip("/") or "/")

    def count(
        self,
        scope: Scope,
        status: int,
        *,
        duration_seconds: float = 0.0,
        received_bytes: int = 0,
        sent_bytes: int = 0,
    ) -> None:
        """Count one finished request."""
        handler = self._handler(route_path(scope["path"], self._root_path))
        if handler not in UNCOUNTED_PATHS:
            self.requests.count(
                _method(scope["method"]),
                handler,
                status,
                duration_seconds=duration_seconds,
                received_bytes=received_bytes,
                sent_bytes=sent_bytes,
            )

    def count_refused(self, method: str, url: bytes, status: int) -> None:
        """Count a request that its connection refused after its headers were complete."""
        path = unquote(url.partition(b"?")[0].decode("ascii", "replace"))
        self.count({"method": method, "path": path}, status)

    def _handler(self, path: str) -> str:
        if path in self._plain or path in UNCOUNTED_PATHS:
            return path
        for pattern, template in self._open:
            if pattern.match(path):
                return template
        return UNKNOWN_HANDLER


def _method(method: str) -> str:
    return method if method in _METHODS else OTHER_METHOD
