"""Under which labels is an HTTP request counted? Of each there are few, whatever clients ask."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import unquote

from starlette.routing import BaseRoute
from starlette.types import Scope

from holdfast.api.paths import route_path
from holdfast.engine.frequent import FREQUENT_PATHS
from holdfast.telemetry.http_requests import HttpRequests

UNKNOWN_HANDLER = "none"
"""vLLM's word for the path of no route."""
OTHER_METHOD = "other"
UNCOUNTED_PATHS = frozenset(
    {"/metrics", "/health", "/load", "/ping", "/version", "/server_info"}
    | {"/livez", "/readyz", "/startupz", "/statusz"}
)
"""What watches a server: vLLM leaves out the first six, and ours are of their kind."""

_METHODS = frozenset(
    {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"}
)


class HttpCounts:
    """Counts each request under the template of its route, whichever layer answers it.

    So what a closed gate or a missing key refuses stands beside what vLLM answers on that route.
    """

    def __init__(self, *, root_path: str = "") -> None:
        self.requests = HttpRequests()
        """What was counted."""
        self._root_path = root_path
        # Of vLLM's routes, which come when it is loaded, these are asked for and refused before.
        self._plain = set(FREQUENT_PATHS)
        self._open: list[tuple[re.Pattern[str], str]] = []

    def know(self, routes: Iterable[BaseRoute]) -> None:
        """Take in the routes of an application, after those that are known."""
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
        """Count one request that is over."""
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

    def refused(self, method: str, url: bytes, status: int) -> None:
        """Count one that was answered by its connection, as soon as it had a head."""
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
