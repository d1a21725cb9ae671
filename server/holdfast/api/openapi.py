"""Which requests and responses are there? vLLM's OpenAPI document, with our own routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast.api.auth import (
    METRICS_PATH,
    METRICS_PATHS,
    OPEN_PATHS,
    ROUTING_PATH,
    needs_admin_key,
)
from holdfast.api.router import PAGE_PATH, STREAM_PATH
from holdfast.patches import fits

OpenAPIDocument = dict[str, Any]

_JSON = "application/json"
_KEY: list[OpenAPIDocument] = [{"api_key": []}]
_ROUTES = (
    ("/livez", ("get",), "Whether the process can still become ready or serve."),
    ("/readyz", ("get",), "Whether requests are admitted."),
    ("/startupz", ("get",), "Whether the server has ever been ready."),
    ("/health", ("get",), "Whether the server is ready or asleep."),
    ("/ping", ("get", "post"), "As `/health`."),
    ("/statusz", ("get",), "The full status."),
    (STREAM_PATH, ("get",), "The changes of the status, as server-sent events."),
    (PAGE_PATH, ("get",), "The status page; as text, unless HTML is accepted."),
    (METRICS_PATH, ("get",), "Every metric, ours and vLLM's, as Prometheus text."),
    (ROUTING_PATH, ("get",), "The few metrics that routers read, as Prometheus text."),
)
"""The routes of `api.health`, `api.metrics`, `api.load` and `status_page`."""
_PAGE_PATHS = frozenset({STREAM_PATH, PAGE_PATH})
_MEDIA_TYPES = {
    METRICS_PATH: "text/plain",
    ROUTING_PATH: "text/plain",
    STREAM_PATH: "text/event-stream",
    PAGE_PATH: "text/html",
}
"""Every other route answers JSON."""


def publish(app: Any, build: Callable[[OpenAPIDocument], OpenAPIDocument]) -> None:
    """Have vLLM's application serve `build` of its own document, if it serves one at all.

    The document is built once, in a thread, at the first request for it: that takes a second, for
    which vLLM's own route would stop every stream.
    """
    if not getattr(app, "openapi_url", None) or not fits("api.openapi.publish"):
        return
    pages: list[bytes] = []
    lock = asyncio.Lock()

    def made() -> bytes:
        return json.dumps(build(app.openapi()), separators=(",", ":")).encode()

    async def answer(_request: Request) -> Response:
        async with lock:
            if not pages:
                pages.append(await to_thread.run_sync(made))
        return Response(pages[0], media_type=_JSON)

    app.router.routes.insert(0, Route(app.openapi_url, answer, methods=["GET", "HEAD"]))


def complete(  # noqa: PLR0913 - what the document says of one server
    document: OpenAPIDocument,
    *,
    version: str,
    has_keys: bool,
    guards_metrics: bool = False,
    has_page: bool = True,
    others: Iterable[OpenAPIDocument] = (),
    root_path: str = "",
) -> OpenAPIDocument:
    """Add our routes, `others`, the key, and one error for every operation to vLLM's document.

    A path of ours replaces vLLM's of the same name, as in the router.

    Raises:
        ValueError: two components of the same name differ.
    """
    about = (
        "An OpenAI-compatible server around vLLM that reports READY only after it has served its "
        "worst case."
    )
    document["info"] = {"title": "Holdfast", "version": version, "description": about}
    if root_path:
        document["servers"] = [{"url": root_path}]
    document["security"] = _KEY if has_keys else [{}, *_KEY]
    paths: OpenAPIDocument = document.setdefault("paths", {})
    open_paths = OPEN_PATHS if guards_metrics else OPEN_PATHS | METRICS_PATHS
    for other in (_own_document(open_paths, has_page=has_page), *others):
        paths.update(other["paths"])
        for kind, members in other.get("components", {}).items():
            known = document.setdefault("components", {}).setdefault(kind, {})
            for name, member in members.items():
                if known.setdefault(name, member) != member:
                    raise ValueError(f"two OpenAPI {kind} are called {name}")
    for path, operations in paths.items():
        for operation in operations.values():
            if needs_admin_key(path):
                operation.setdefault("security", _KEY)
            responses = operation.setdefault("responses", {})
            # FastAPI documents a 422 of its own form, which we never answer.
            responses.pop("422", None)
            responses["default"] = {"$ref": "#/components/responses/OpenAIError"}
    return document


def _own_document(open_paths: frozenset[str], *, has_page: bool) -> OpenAPIDocument:
    """Return our routes, the key, and the error that any route may answer."""
    text, text_or_null = {"type": "string"}, {"type": ["string", "null"]}
    code = {"type": ["integer", "string", "null"]}
    error = _object(error=_object(message=text, type=text, param=text_or_null, code=code))
    health = _object(
        state=text,
        reason=text,
        since={"type": "string", "format": "date-time"},
        eta_s={"type": ["number", "null"], "description": "Seconds until READY, if known."},
        progress={"type": "object"},
        probe={"type": "object"},
    )
    refusal = {
        "description": "Why it failed. `Retry-After` says when to try again, if that may help.",
        "content": {_JSON: {"schema": {"$ref": "#/components/schemas/OpenAIError"}}},
        "headers": {"Retry-After": {"schema": {"type": "integer"}}},
    }
    return {
        "paths": {
            path: {
                method: _operation(path, method, meaning, is_open=path in open_paths)
                for method in methods
            }
            for path, methods, meaning in _ROUTES
            if has_page or path not in _PAGE_PATHS
        },
        "components": {
            "schemas": {"OpenAIError": error, "Health": health},
            "responses": {"OpenAIError": refusal},
            "securitySchemes": {"api_key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, method: str, meaning: str, *, is_open: bool) -> OpenAPIDocument:
    schema = {"$ref": "#/components/schemas/Health"}
    media_type = _MEDIA_TYPES.get(path)
    content = {media_type: {}} if media_type else {_JSON: {"schema": schema}}
    statuses = {"200": "Yes.", "503": "No."} if path in OPEN_PATHS else {"200": "All of it."}
    return {
        "operationId": f"{path[1:].replace('/', '_')}_{method}",
        "summary": meaning,
        "responses": {
            status: {"description": answer, "content": content}
            for status, answer in statuses.items()
        },
        **({"security": []} if is_open else {}),
    }


def _object(**properties: OpenAPIDocument) -> OpenAPIDocument:
    return {"type": "object", "required": [*properties], "properties": properties}
