"""`/metrics`, which is answered from the first second and through every death of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import anyio
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast.api.admission import Admission
from holdfast.engine.replay import Calls
from holdfast.telemetry.collector import RequestCounts
from holdfast.telemetry.exposition import PageFormat, Registries, format_for, render

REST_FACTOR = 4
"""After a page, rendering pauses for this many times the processor time that the page took."""
BETWEEN_SECONDS = 0.002
"""The pause between the responses that share a page. Sending all at once, and receiving the next
requests at once, would delay the event loop."""


def metrics_route(registries: Callable[[], Registries]) -> Route:
    """Return the route of a page with these registries, which are looked up for each page."""
    renderer = _PageRenderer(registries)

    async def endpoint(request: Request) -> Response:
        page_format = format_for(request.headers.get("accept", ""))
        page = await renderer.page(page_format)
        return Response(page, headers={"content-type": page_format.content_type})

    return Route("/metrics", endpoint, methods=("GET", "HEAD"))


class _PageRenderer:
    """Renders one page at a time, in a thread, and leaves most of the processor time to streams.

    While a thread computes, each turn of the event loop waits for up to one switch interval.
    Requests that arrive while a page is rendered share the next page of their format, so a page is
    never older than the request for it.
    """

    def __init__(self, registries: Callable[[], Registries]) -> None:
        self._registries = registries
        # With its own limiter, scrapes work even when all shared threads are busy.
        self._limiter = anyio.CapacityLimiter(1)
        self._next: dict[str, asyncio.Task[bytes]] = {}
        self._rests_until_seconds = 0.0
        self._answer = asyncio.Lock()

    async def page(self, page_format: PageFormat) -> bytes:
        """Return a page that was begun after this call."""
        task = self._next.get(page_format.content_type)
        if task is None or task.done():  # done: it failed before it began
            rendering = to_thread.run_sync(self._rendered, page_format, limiter=self._limiter)
            task = asyncio.create_task(rendering, name="page of metrics")
            self._next[page_format.content_type] = task
        page = await asyncio.shield(task)
        await self._answer.acquire()
        asyncio.get_running_loop().call_later(BETWEEN_SECONDS, self._answer.release)
        return page

    def _rendered(self, page_format: PageFormat) -> bytes:
        time.sleep(max(0.0, self._rests_until_seconds - time.monotonic()))
        del self._next[page_format.content_type]
        began_seconds = time.thread_time()
        try:
            return render(self._registries(), page_format)
        finally:
            taken_seconds = time.thread_time() - began_seconds
            self._rests_until_seconds = time.monotonic() + REST_FACTOR * taken_seconds


def request_counts(admission: Admission, calls: Calls | None) -> RequestCounts:
    """Return the counts of the gate and, once vLLM is loaded, of the engine behind it."""
    if calls is None:
        return RequestCounts(admission.in_flight, admission.held)
    return RequestCounts(
        in_flight=admission.in_flight,
        held=admission.held + calls.held,
        replayed=calls.replayed,
        lost=calls.lost,
    )
