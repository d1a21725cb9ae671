"""`/metrics`: answered from the first second and through every death of the engine."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import anyio
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Render = Callable[[str], tuple[bytes, str]]
"""From the Accept header to the page and its content type."""

MOST_INTERVALS = 2
"""Of the interpreter's switch interval, for the computing of a page on the loop."""
LONGEST_WAIT_SECONDS = 0.05
"""A page that takes longer, though it computes little, waits for something: no loop should."""


def metrics_route(render: Render) -> Route:
    """The page; streams wait for it no longer than Python has them wait for any thread."""
    pages = _Pages(render)

    async def endpoint(request: Request) -> Response:
        page, content_type = await pages.page(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    return Route("/metrics", endpoint, methods=("GET", "HEAD"))


class _Pages:
    """Renders one page at a time: in a thread, and on the loop when the last one was short.

    A thread that computes stops the loop for a switch interval of the interpreter at a time, and
    waits as long for each turn: short pages come later from it and spare the loop little. Under
    load a page takes thrice the 2 ms that it takes at rest, for the caches are another's then.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        # Its own limiter: scrapes go on when the shared threads are all taken.
        self._limiter = anyio.CapacityLimiter(1)
        self._processor_seconds = math.inf
        self._seconds = math.inf

    async def page(self, accept: str) -> tuple[bytes, str]:
        if self._is_short() and not self._limiter.borrowed_tokens:
            return self._timed(accept)
        return await to_thread.run_sync(self._timed, accept, limiter=self._limiter)

    def _is_short(self) -> bool:
        return (
            self._processor_seconds < MOST_INTERVALS * sys.getswitchinterval()
            and self._seconds < LONGEST_WAIT_SECONDS
        )

    def _timed(self, accept: str) -> tuple[bytes, str]:
        began, computed = time.monotonic(), time.thread_time()
        try:
            return self._render(accept)
        finally:
            self._processor_seconds = time.thread_time() - computed
            self._seconds = time.monotonic() - began
