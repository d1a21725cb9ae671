"""What do scrapes read? `/metrics`, and the counts of HTTP requests by route, method and status.

`/metrics` is answered from the first second and through every death of the engine.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from urllib.parse import unquote

import anyio
from anyio import to_thread
from prometheus_client import Counter, Histogram, Metric, Summary
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from holdfast.api.admission import Admission
from holdfast.api.auth import METRICS_PATH, ROUTING_PATH
from holdfast.api.router import PAGE_PATH, STREAM_PATH, route_path
from holdfast.engine.replay import ReplayManager
from holdfast.request_context import FREQUENT_PATHS
from holdfast.telemetry.collector import RequestCounts
from holdfast.telemetry.exposition import Names, PageFormat, Registries, format_for, render
from holdfast.telemetry.load import Load

MAX_CHOSEN_PAGES = 8
"""The pages of chosen series that may wait to be rendered. Clients choose names without end, and
each set of names is a page of its own; beyond these, a request gets the whole page."""
PAUSE_FACTOR = 4
"""After a page, rendering pauses for this many times the processor time that the page took."""
RESPONSE_INTERVAL_SECONDS = 0.002
"""The pause between the responses that share a page. Sending all at once, and receiving the next
requests at once, would delay the event loop."""

FINE_BOUNDS_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5),
    *(5.0, 7.5, 10.0, 30.0, 60.0),
)
COARSE_BOUNDS_SECONDS = (0.1, 0.5, 1.0)

UNKNOWN_HANDLER = "none"
"""vLLM's label for a path without a route."""
OTHER_METHOD = "other"
UNCOUNTED_PATHS = frozenset(
    {METRICS_PATH, "/health", "/load", "/ping", "/version", "/server_info"}
    | {"/livez", "/readyz", "/startupz", "/statusz", ROUTING_PATH, STREAM_PATH, PAGE_PATH}
)
"""The paths of monitoring: vLLM leaves out the first six, and ours serve the same purpose."""

_METHODS = frozenset(
    {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"}
)


def metrics_route(registries: Callable[[], Registries]) -> Route:
    """Return the route of a page with these registries, which are looked up for each page.

    As in the Prometheus client, each `name[]` of the query names a series, and the page then has no
    others, unless `MAX_CHOSEN_PAGES` wait already.
    """
    whole, chosen = _PageRenderer(registries), _PageRenderer(registries)

    async def endpoint(request: Request) -> Response:
        page_format = format_for(request.headers.get("accept", ""))
        names = frozenset(filter(None, request.query_params.getlist("name[]")))
        if names and chosen.has_room_for(page_format, names):
            # With its own thread, so that no choice of names delays the whole page.
            page = await chosen.page(page_format, names)
        else:
            page = await whole.page(page_format, frozenset())
        return Response(page, headers={"content-type": page_format.content_type})

    return Route(METRICS_PATH, endpoint, methods=("GET", "HEAD"))


class _PageRenderer:
    """Renders one page at a time, in a thread, and leaves most of the processor time to streams.

    While a thread computes, each turn of the event loop waits for up to one switch interval.
    Requests that arrive while a page is rendered share the next page of their format and names, so
    a page is never older than the request for it.
    """

    def __init__(self, registries: Callable[[], Registries]) -> None:
        self._registries = registries
        # With its own limiter, scrapes work even when all shared threads are busy.
        self._limiter = anyio.CapacityLimiter(1)
        self._next: dict[tuple[str, Names], asyncio.Task[bytes]] = {}
        self._paused_until_seconds = 0.0
        self._response_lock = asyncio.Lock()

    def has_room_for(self, page_format: PageFormat, names: Names) -> bool:
        """Return whether such a page waits already, or one more may wait."""
        return (page_format.content_type, names) in self._next or (
            len(self._next) < MAX_CHOSEN_PAGES
        )

    async def page(self, page_format: PageFormat, names: Names) -> bytes:
        """Return a page that was begun after this call: of these series, or of all if none."""
        key = page_format.content_type, names
        task = self._next.get(key)
        if task is None or task.done():  # done: it failed before it began
            rendering = to_thread.run_sync(self._render, page_format, names, limiter=self._limiter)
            task = asyncio.create_task(rendering, name="page of metrics")
            self._next[key] = task
            task.add_done_callback(partial(self._forget, key))
        page = await asyncio.shield(task)
        await self._response_lock.acquire()
        asyncio.get_running_loop().call_later(
            RESPONSE_INTERVAL_SECONDS, self._response_lock.release
        )
        return page

    def _forget(self, key: tuple[str, Names], task: asyncio.Task[bytes]) -> None:
        """Make room if the page failed before it began."""
        if self._next.get(key) is task:
            del self._next[key]

    def _render(self, page_format: PageFormat, names: Names) -> bytes:
        time.sleep(max(0.0, self._paused_until_seconds - time.monotonic()))
        del self._next[page_format.content_type, names]
        began_seconds = time.thread_time()
        try:
            return render(self._registries(), page_format, names)
        finally:
            taken_seconds = time.thread_time() - began_seconds
            self._paused_until_seconds = time.monotonic() + PAUSE_FACTOR * taken_seconds


def request_counts(
    admission: Admission, requests: ReplayManager | None, load: Load
) -> RequestCounts:
    """Return the counts of the gate and, once vLLM is loaded, of the engine behind it."""
    if requests is None:
        return RequestCounts(admission.in_flight, load.held, load.waiting)
    return RequestCounts(
        in_flight=admission.in_flight,
        held=load.held,
        waiting=load.waiting,
        replayed=requests.replayed,
        continued=requests.continued,
        lost=requests.lost,
    )


class HttpCounts(Collector):
    """Counts each request under the template of its route, whichever layer answers it.

    vLLM counts in its own application, and so misses what a layer of the front end answers.
    Therefore the front end counts, with the names, labels and buckets of
    `prometheus-fastapi-instrumentator` 8.1, which vLLM 0.32 uses unchanged. Each label has few
    values, whatever clients request. Sizes are those of the transferred bytes, where the
    instrumentator trusts the header of a request. Any thread may read.
    """

    def __init__(self, *, root_path: str = "") -> None:
        self._root_path = root_path
        # vLLM's routes are known once it is loaded; these are requested, and refused, before that.
        self._plain = set(FREQUENT_PATHS)
        self._open: list[tuple[re.Pattern[str], str]] = []
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
            method = scope["method"] if scope["method"] in _METHODS else OTHER_METHOD
            self._total.labels(method, f"{status // 100}xx", handler).inc()
            self._received.labels(handler).observe(received_bytes)
            self._sent.labels(handler).observe(sent_bytes)
            self._fine.observe(duration_seconds)
            self._coarse.labels(method, handler).observe(duration_seconds)

    def count_refused(self, method: str, url: bytes, status: int) -> None:
        """Count a request that its connection refused after its headers were complete."""
        path = unquote(url.partition(b"?")[0].decode("ascii", "replace"))
        self.count({"method": method, "path": path}, status)

    def collect(self) -> Iterator[Metric]:
        """Yield the five families; only one has a series before the first request."""
        for metric in (self._total, self._received, self._sent, self._fine, self._coarse):
            yield from metric.collect()

    def _handler(self, path: str) -> str:
        if path in self._plain or path in UNCOUNTED_PATHS:
            return path
        if path.startswith(f"{PAGE_PATH}/"):
            return PAGE_PATH
        for pattern, template in self._open:
            if pattern.match(path):
                return template
        return UNKNOWN_HANDLER
