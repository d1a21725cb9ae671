"""The application that listens before there is an engine, and goes on when there is none."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterable
from operator import attrgetter

from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.api.paths import route_path
from holdfast.api.replies import openai_error
from holdfast.engine.tracked import tracked_request


class EngineApp:
    """vLLM's application, which is built when the server listens already."""

    def __init__(self) -> None:
        self._inner: ASGIApp | None = None

    @property
    def is_attached(self) -> bool:
        """Whether there is an application behind the gate."""
        return self._inner is not None

    def attach(self, app: ASGIApp) -> None:
        """Send what the gate lets in to `app` from now on; what runs in another goes on there."""
        self._inner = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer as it does; the gate is closed until there is one."""
        if self._inner is None:
            raise RuntimeError("The gate was opened before an application was attached.")
        tracked = tracked_request()
        tracked.entered_seconds = time.monotonic()
        tracked.engine_scope = scope
        return self._inner(scope, receive, send)


class FrontDoor:
    """Our routes first, whatever the state; everything else goes on to `behind`.

    So our `/health`, `/ping` and `/metrics` hide vLLM's of the same path. What vLLM's app sees is
    what the client sent: unknown paths, redirects and `root_path` are its own.
    """

    def __init__(
        self, routes: Iterable[BaseRoute], behind: ASGIApp, *, root_path: str = ""
    ) -> None:
        self._routes = tuple(routes)
        self._beginnings = frozenset(map(_beginning, map(attrgetter("path"), self._routes)))
        self._root_path = root_path
        self._behind = behind

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer from our own routes, or by what is behind them."""
        if scope["type"] == "lifespan":
            return _live(receive, send)
        route, match, ours = self._own(scope)
        if route is None:
            return self._behind(scope, receive, send)
        if match is Match.PARTIAL and isinstance(route, Route):
            return _not_allowed(route)(scope, receive, send)
        tracked_request().route = getattr(route, "path", "")
        return route.handle(ours, receive, send)

    def _own(self, scope: Scope) -> tuple[BaseRoute | None, Match, Scope]:
        """Our route for a request, how it matches, and the scope for it."""
        if scope["type"] == "http":
            path = route_path(scope["path"], self._root_path)
            # Nearly every request is for what is behind.
            if _beginning(path) in self._beginnings:
                ours = {**scope, "path": path, "root_path": ""}
                for route in self._routes:
                    match, found = route.matches(ours)
                    if match is not Match.NONE:
                        return route, match, {**ours, **found}
        return None, Match.NONE, scope


def _beginning(path: str) -> str:
    """What stands before the second slash, where no route of ours has a parameter."""
    return path[1:].partition("/")[0]


def _not_allowed(route: Route) -> Response:
    return openai_error(
        f"{route.path} does not support this method.",
        kind="invalid_request_error",
        status=405,
        headers={"allow": ", ".join(sorted(route.methods or ()))},
    )


async def _live(receive: Receive, send: Send) -> None:
    """Follow the server's lifespan; whatever must live with it is entered by its owner."""
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})
