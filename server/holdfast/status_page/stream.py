"""The route `/statusz/stream`: the feed of the status page as server-sent events.

Keys, `--max-connections` and `--send-timeout` apply to it as to any route. It is not a request to
the engine: neither `--request-timeout` nor a drain concerns it.
"""

from __future__ import annotations

from contextlib import aclosing
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from holdfast.api.errors import openai_error
from holdfast.api.router import STREAM_PATH
from holdfast.request_context import current_request
from holdfast.status_page.feed import MAX_VIEWERS, MAX_VIEWERS_PER_KEY, Feed

VIEWER_RETRY_SECONDS = 30

_HEADERS = MappingProxyType(
    {
        "cache-control": "no-store",
        "x-accel-buffering": "no",  # nginx would keep the events back
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
)
_MEDIA_TYPE = "text/event-stream"


def stream_route(feed: Feed) -> Route:
    """Return the route of the stream."""
    return Route(STREAM_PATH, _Stream(feed), methods=("GET", "HEAD"))


class _Stream:
    """An ASGI application that answers one viewer."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, key = Request(scope, receive), current_request().key
        if request.method == "HEAD":
            await Response(headers=_HEADERS, media_type=_MEDIA_TYPE)(scope, receive, send)
        elif self._feed.is_full(key):
            await _too_many()(scope, receive, send)
        else:
            last_event_id = request.headers.get("last-event-id", "")
            async with (
                self._feed.viewing(key),
                aclosing(self._feed.events(last_event_id)) as events,
            ):
                response = StreamingResponse(events, headers=_HEADERS, media_type=_MEDIA_TYPE)
                await response(scope, receive, send)


def _too_many() -> Response:
    return openai_error(
        f"This server already shows its status to {MAX_VIEWERS} viewers, or to "
        f"{MAX_VIEWERS_PER_KEY} with this key.",
        kind="service_unavailable",
        status=503,
        headers={"retry-after": str(VIEWER_RETRY_SECONDS)},
    )
