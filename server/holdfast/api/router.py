"""Which application answers a path, ours or vLLM's, and what does the request occupy?

The router works before there is an engine, and while there is none. A request occupies the engine,
the single thread that renders prompts, or neither; a WebSocket is a session that occupies the
engine at times. Paths are interpreted only here, so that routing and key checks agree.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Iterable
from operator import attrgetter
from typing import Literal

from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.api.errors import openai_error
from holdfast.request_context import current_request

Work = Literal["engine", "rendering", "session", "none"]

RENDERINGS = 4
"""The number of concurrent requests that are rendered but do not need the engine. vLLM renders in
one thread, which every long chat needs too; the others are read or answered meanwhile."""

_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_RENDERING_PATHS = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        "/v1/chat/completions/render",
        "/v1/chat/completions/derender",
        "/v1/completions/render",
        "/v1/completions/derender",
        "/v1/messages/render",
        "/v1/responses/render",
        "/cohere/v2/chat/render",
    }
)
PAGE_PATH = "/ui"
STREAM_PATH = "/statusz/stream"
"""The routes of `status_page`; metrics and the OpenAPI document name them too."""
OPERATOR_PATHS = frozenset(
    {
        # Commands of an operator to the engine; a full engine may be waiting for one of them.
        "/abort_requests",
        "/inference/v1/abort_requests",
        "/pause",
        "/resume",
        "/sleep",
        "/wake_up",
        "/release_kv_cache_memory",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/collective_rpc",
        "/start_profile",
        "/stop_profile",
        "/scale_elastic_ep",
        "/is_scaling_elastic_ep",
        "/fault_tolerance/apply",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/adapters",
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/weight_checker",
        # Queries of an operator.
        "/fault_tolerance/status",
        "/get_world_size",
        "/is_paused",
        "/is_sleeping",
        "/server_info",
        "/weight_info",
    }
)
"""vLLM's routes that act on the server or on the requests of other clients: not for clients."""
_ADAPTER = re.compile(r"/adapters/[^/]+")
"""SageMaker's route for one adapter."""
_CANCELLATION = re.compile(r"/v1/responses/[^/]+/cancel")


def work_of(scope: Scope, root_path: str = "") -> Work:
    """Return what a request may occupy. An unknown route is assumed to need the engine."""
    if scope["type"] == "websocket":
        return "session"
    if scope["method"] in _READING_METHODS:
        return "none"
    path = below_root(scope["path"], root_path)
    if path in _RENDERING_PATHS:
        return "rendering"
    return "none" if is_for_operators(path) or _CANCELLATION.fullmatch(path) else "engine"


def is_for_operators(path: str) -> bool:
    """Return whether vLLM would route a path, given as by `route_path`, to operators' routes."""
    # Starlette's routes also match a path with a line feed at its end.
    path = path.removesuffix("\n")
    return path in OPERATOR_PATHS or bool(_ADAPTER.fullmatch(path))


def route_path(path: str, root_path: str) -> str:
    """Return the path as our routes are written: decoded, without root path and final slash."""
    return below_root(path, root_path).rstrip("/") or "/"


def below_root(path: str, root_path: str) -> str:
    """Return the path without `root_path`, which a proxy may keep in the request or strip."""
    return path.removeprefix(root_path) if path.startswith(f"{root_path}/") else path


class LateApp:
    """vLLM's application, which is built after the server has begun to listen."""

    def __init__(self) -> None:
        self._inner: ASGIApp | None = None

    @property
    def is_attached(self) -> bool:
        """Whether an application has been attached."""
        return self._inner is not None

    def attach(self, app: ASGIApp) -> None:
        """Pass admitted requests to `app` from now on; running requests are not affected."""
        self._inner = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass the request on; the gate is closed until an application is attached."""
        if self._inner is None:
            raise RuntimeError("The gate was opened before an application was attached.")
        context = current_request()
        context.entered_seconds = time.monotonic()
        context.engine_scope = scope
        return self._inner(scope, receive, send)


class OwnRoutes:
    """Answers our own routes, whatever the state, and passes everything else on to `behind`.

    So our `/health`, `/ping` and `/metrics` hide vLLM's of the same path. vLLM's application gets
    the request as the client sent it: it handles unknown paths, redirects and `root_path` itself.
    """

    def __init__(
        self, routes: Iterable[BaseRoute], behind: ASGIApp, *, root_path: str = ""
    ) -> None:
        self._routes = tuple(routes)
        self._first_segments = frozenset(map(_first_segment, map(attrgetter("path"), self._routes)))
        self._root_path = root_path
        self._behind = behind

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one of our own routes, or pass the request on."""
        if scope["type"] == "lifespan":
            return _live(receive, send)
        route, match, own_scope = self._own(scope)
        if route is None:
            return self._behind(scope, receive, send)
        if match is Match.PARTIAL and isinstance(route, Route):
            return _not_allowed(route)(scope, receive, send)
        current_request().route = getattr(route, "path", "")
        return route.handle(own_scope, receive, send)

    def _own(self, scope: Scope) -> tuple[BaseRoute | None, Match, Scope]:
        """Return our route for a request, how it matches, and the scope for it."""
        if scope["type"] == "http":
            path = route_path(scope["path"], self._root_path)
            # Nearly no request is for one of our routes.
            if _first_segment(path) in self._first_segments:
                own_scope = {**scope, "path": path, "root_path": ""}
                for route in self._routes:
                    match, found = route.matches(own_scope)
                    if match is not Match.NONE:
                        return route, match, {**own_scope, **found}
        return None, Match.NONE, scope


def _first_segment(path: str) -> str:
    """Return the first segment of a path, in which none of our routes has a parameter."""
    return path[1:].partition("/")[0]


def _not_allowed(route: Route) -> Response:
    return openai_error(
        f"{route.path} does not support this method.",
        kind="invalid_request_error",
        status=405,
        headers={"allow": ", ".join(sorted(route.methods or ()))},
    )


async def _live(receive: Receive, send: Send) -> None:
    """Answer the server's lifespan events; the owners of resources manage them elsewhere."""
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})
