"""What may be asked, and what may be answered? The OpenAPI document, with what vLLM leaves out.

vLLM's own document knows neither our routes nor the key, nor what the front end answers in place of
an application that it does not let a request through to.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast.api.work import OPERATOR_PATHS

Document = dict[str, Any]

METHODS = frozenset({"get", "put", "post", "delete", "options", "head", "patch", "trace"})
KEY_SCHEME = "api_key"
_ERROR_SCHEMA = "OpenAIError"
_JSON = "application/json"

_ANYWHERE: Mapping[HTTPStatus, str] = {
    HTTPStatus.REQUEST_TIMEOUT: "The request came in too slowly.",
    HTTPStatus.REQUEST_URI_TOO_LONG: "The URL is too long.",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "The headers are too many or too large.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "The server failed, or lost its engine over this request.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The server is not ready; `Retry-After` says when to ask.",
}
"""What any route may answer."""
_BEHIND_A_KEY: Mapping[HTTPStatus, str] = {
    HTTPStatus.UNAUTHORIZED: "A key is needed, or the one that came is not known.",
}
_BEHIND_THE_ADMIN_KEY: Mapping[HTTPStatus, str] = {
    HTTPStatus.FORBIDDEN: "An API key came, and this route needs the admin key.",
    HTTPStatus.NOT_FOUND: "There is no such thing, or no admin key was set.",
}
_BEHIND_THE_GATE: Mapping[HTTPStatus, str] = {
    HTTPStatus.BAD_REQUEST: "The request is wrong; the message says what about it.",
    HTTPStatus.NOT_FOUND: "There is no such model, response or route.",
    HTTPStatus.UNPROCESSABLE_ENTITY: "The request is well formed, and cannot be done.",
    HTTPStatus.TOO_MANY_REQUESTS: "Too many requests wait. `Retry-After` says when to ask again.",
    HTTPStatus.GATEWAY_TIMEOUT: "The request took longer than requests may.",
}
"""What the routes of the application may answer beside that."""
_WITH_A_BODY: Mapping[HTTPStatus, str] = {
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is larger than bodies may be.",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "The body is not of a type that the route reads.",
}
"""What a route that reads a body may answer beside those."""
_WITH_RETRY = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})

_HEALTH_SCHEMA: Document = {
    "type": "object",
    "required": ["state", "reason", "since", "eta_s", "progress", "probe"],
    "properties": {
        "state": {"type": "string"},
        "reason": {"type": "string"},
        "since": {"type": "string", "format": "date-time"},
        "eta_s": {"type": ["number", "null"], "description": "Seconds until READY, if known."},
        "progress": {"type": "object"},
        "probe": {"type": "object"},
    },
}


def publish(app: Any, build: Callable[[Document], Document]) -> None:
    """Have vLLM's application serve `build` of its own document; nothing if it serves none.

    The document is made in a thread when it is first asked for, and once: vLLM's takes a second of
    work, in which its own route would let every stream wait.
    """
    if not getattr(app, "openapi_url", None):
        return
    page = _Page(lambda: build(copy.deepcopy(app.openapi())))
    app.router.routes.insert(0, Route(app.openapi_url, page.answer, methods=["GET", "HEAD"]))


def complete(
    document: Document,
    *,
    version: str,
    has_keys: bool,
    others: Iterable[Document] = (),
    root_path: str = "",
) -> Document:
    """vLLM's document with our routes, `others`, the key and every status of the front end.

    A path of ours hides vLLM's of the same name, as the front door does.
    """
    document["info"] = {
        "title": "Holdfast",
        "version": version,
        "description": "An OpenAI-compatible server around vLLM whose green light is true.",
    }
    if root_path:
        document["servers"] = [{"url": root_path}]
    _say_who_may_ask(document, has_keys=has_keys)
    paths: Document = document.setdefault("paths", {})
    for operation in _operations({path: paths[path] for path in OPERATOR_PATHS & paths.keys()}):
        operation["security"] = [{KEY_SCHEME: []}]
        _say_what_is_refused(operation, _BEHIND_THE_ADMIN_KEY)
    for operation in _operations(paths):
        # FastAPI believes that a wrong request gets a 422 of its own form.
        operation.get("responses", {}).pop("422", None)
        _say_what_is_refused(operation, {**_ANYWHERE, **_BEHIND_A_KEY, **_BEHIND_THE_GATE})
    for other in (_own_document(), *others):
        for operation in _operations(other["paths"]):
            is_open = operation.get("security") == []
            _say_what_is_refused(operation, {**_ANYWHERE, **({} if is_open else _BEHIND_A_KEY)})
        _merge(document, other)
    return document


class _Page:
    """A document that is made once, however many ask for it at the same time."""

    def __init__(self, build: Callable[[], Document]) -> None:
        self._build = build
        self._page: bytes | None = None
        self._lock = asyncio.Lock()

    async def answer(self, _request: Request) -> Response:
        """The document."""
        async with self._lock:
            if self._page is None:
                self._page = await to_thread.run_sync(self._render)
        return Response(self._page, media_type=_JSON)

    def _render(self) -> bytes:
        return json.dumps(self._build(), separators=(",", ":")).encode()


def _operations(paths: Mapping[str, Any]) -> list[Document]:
    return [
        operation
        for path in paths.values()
        for method, operation in path.items()
        if method in METHODS
    ]


def _say_who_may_ask(document: Document, *, has_keys: bool) -> None:
    components = document.setdefault("components", {})
    components.setdefault("schemas", {})[_ERROR_SCHEMA] = _error_schema()
    components.setdefault("securitySchemes", {})[KEY_SCHEME] = {"type": "http", "scheme": "bearer"}
    document["security"] = [{KEY_SCHEME: []}] if has_keys else [{}, {KEY_SCHEME: []}]


def _say_what_is_refused(operation: Document, statuses: Mapping[HTTPStatus, str]) -> None:
    """Document what the operation does not say of itself."""
    if "requestBody" in operation:
        statuses = {**statuses, **_WITH_A_BODY}
    responses: Document = operation.setdefault("responses", {})
    for status, meaning in statuses.items():
        responses.setdefault(str(status.value), _refusal(status, meaning))


def _refusal(status: HTTPStatus, meaning: str) -> Document:
    schema = {"$ref": f"#/components/schemas/{_ERROR_SCHEMA}"}
    refusal: Document = {"description": meaning, "content": {_JSON: {"schema": schema}}}
    if status in _WITH_RETRY:
        refusal["headers"] = {
            "Retry-After": {"schema": {"type": "integer", "minimum": 1, "maximum": 120}}
        }
    return refusal


def _error_schema() -> Document:
    error = {
        "type": "object",
        "required": ["message", "type", "code"],
        "properties": {
            "message": {"type": "string"},
            "type": {"type": "string"},
            "param": {"type": ["string", "null"]},
            "code": {"type": ["integer", "string", "null"]},
        },
    }
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


def _merge(document: Document, other: Document) -> None:
    """Put another document's paths over ours, and its components beside them.

    Raises:
        ValueError: two components of one name differ; one would be taken for the other.
    """
    document["paths"].update(other["paths"])
    for kind, members in other.get("components", {}).items():
        known = document["components"].setdefault(kind, {})
        for name, member in members.items():
            if known.setdefault(name, member) != member:
                raise ValueError(f"two OpenAPI {kind} are called {name}")


def _own_document() -> Document:
    """The routes of `api.health` and `api.metrics`."""
    refused = {"503": "The answer is no; the body is the same."}
    is_open: Document = {"security": []}
    get_only = {
        "/livez": "Whether the process can still become or stay useful.",
        "/readyz": "Whether requests are let in.",
        "/startupz": "Whether the server was ever ready.",
        "/health": "Whether all is well, awake or asleep.",
        "/ping": "As `/health`.",
    }
    paths: Document = {
        path: {"get": is_open | _health(f"{path[1:]}_get", summary, refused)}
        for path, summary in get_only.items()
    }
    paths["/ping"]["post"] = is_open | _health("ping_post", get_only["/ping"], refused)
    paths["/statusz"] = {"get": _health("statusz_get", "Everything that is known.", {})}
    page = {"description": "Prometheus text.", "content": {"text/plain": {}}}
    paths["/metrics"] = {
        "get": is_open
        | {
            "operationId": "metrics_get",
            "summary": "Every metric, ours and vLLM's.",
            "responses": {"200": page},
        }
    }
    return {"paths": paths, "components": {"schemas": {"Health": _HEALTH_SCHEMA}}}


def _health(operation_id: str, summary: str, others: Mapping[str, str]) -> Document:
    content = {_JSON: {"schema": {"$ref": "#/components/schemas/Health"}}}
    statuses = {"200": "Yes." if others else "The report.", **others}
    responses = {
        status: {"description": meaning, "content": content} for status, meaning in statuses.items()
    }
    return {"operationId": operation_id, "summary": summary, "responses": responses}
