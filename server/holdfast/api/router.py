"""Which application answers a path, ours or vLLM's, and what does the request occupy?

The router listens before there is an engine, and goes on when there is none. A request occupies the
engine, the one thread that renders prompts, or neither; a WebSocket is a session that occupies the
engine at times. Paths are read in one place, so that routing and guarding agree.
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
"""So many that are answered without the engine are at work at a time. vLLM renders in one thread,
which each long chat needs too; the others are read or answered meanwhile."""

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
OPERATOR_PATHS = frozenset(
    {
        # What an operator tells the engine: some of it is what a full engine waits for.
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
        # What an operator asks of it.
        "/fault_tolerance/status",
        "/get_world_size",
        "/is_paused",
        "/is_sleeping",
        "/server_info",
        "/weight_info",
    }
)
"""vLLM's routes that act on the server, or on what other clients asked of it: not a client's."""
_ADAPTER = re.compile(r"/adapters/[^/]+")
"""As SageMaker names one of them."""
_CANCELLATION = re.compile(r"/v1/responses/[^/]+/cancel")


def work_of(scope: Scope, root_path: str = "") -> Work:
    """What a request may occupy. What is not known asks the engine."""
    if scope["type"] == "websocket":
        return "session"
    if scope["method"] in _READING_METHODS:
        return "none"
    path = below_root(scope["path"], root_path)
    if path in _RENDERING_PATHS:
        return "rendering"
    return "none" if is_for_operators(path) or _CANCELLATION.fullmatch(path) else "engine"


def is_for_operators(path: str) -> bool:
    """Whether vLLM would take a path, as `route_path` has it, for a route for operators."""
    # Starlette's routes end before a line feed, too.
    path = path.removesuffix("\n")
    return path in OPERATOR_PATHS or bool(_ADAPTER.fullmatch(path))


def route_path(path: str, root_path: str) -> str:
    """The path as our routes are written: decoded, no root path, no slash at its end."""
    return below_root(path, root_path).rstrip("/") or "/"


def below_root(path: str, root_path: str) -> str:
    """The path without `root_path`, which a proxy may leave in the request or take away."""
    return path.removeprefix(root_path) if path.startswith(f"{root_path}/") else path


class LateApp:
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
        context = current_request()
        context.entered_seconds = time.monotonic()
        context.engine_scope = scope
        return self._inner(scope, receive, send)


class OwnRoutes:
    """Our routes first, whatever the state; everything else goes on to `behind`.

    So our `/health`, `/ping` and `/metrics` hide vLLM's of the same path. What vLLM's app sees is
    what the client sent: unknown paths, redirects and `root_path` are its own.
    """

    def __init__(
        self, routes: Iterable[BaseRoute], behind: ASGIApp, *, root_path: str = ""
    ) -> None:
        self._routes = tuple(routes)
        self._first_segments = frozenset(map(_first_segment, map(attrgetter("path"), self._routes)))
        self._root_path = root_path
        self._behind = behind

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer from our own routes, or by what is behind them."""
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
        """Our route for a request, how it matches, and the scope for it."""
        if scope["type"] == "http":
            path = route_path(scope["path"], self._root_path)
            # Nearly every request is for what is behind.
            if _first_segment(path) in self._first_segments:
                own_scope = {**scope, "path": path, "root_path": ""}
                for route in self._routes:
                    match, found = route.matches(own_scope)
                    if match is not Match.NONE:
                        return route, match, {**own_scope, **found}
        return None, Match.NONE, scope


def _first_segment(path: str) -> str:
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
