"""`/metrics`: answered from the first second and through every death of the engine."""

from __future__ import annotations

from collections.abc import Callable

import anyio
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Render = Callable[[str], tuple[bytes, str]]
"""From the Accept header to the page and its content type."""


def metrics_route(render: Render) -> Route:
    """The page, rendered in a thread so that streams do not wait for it."""
    # Its own limiter: scrapes go on when the shared threads are all taken, by one start or many.
    limiter = anyio.CapacityLimiter(1)

    async def endpoint(request: Request) -> Response:
        accept = request.headers.get("accept", "")
        page, content_type = await to_thread.run_sync(render, accept, limiter=limiter)
        return Response(page, headers={"content-type": content_type})

    return Route("/metrics", endpoint, methods=("GET", "HEAD"))
