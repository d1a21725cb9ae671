"""The admin application: its OpenAPI document has every route, and nothing else of the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.api.admin.routes import add_engine, add_logs, add_loras, add_state
from holdfast.api.admin.said import ERRORS, Noted, answer_errors
from holdfast.lifecycle.supervisor import Supervisor

if TYPE_CHECKING:  # as in `routes`
    from holdfast.engine.loras import Loras

PREFIX = "/admin"


def admin_app(
    supervision: Supervisor,
    adapters: Callable[[], Loras | None],
    *,
    order_deadline_seconds: float,
) -> FastAPI:
    """The routes below `/admin`, in every state of the server.

    Who may ask is for a layer outside of it. No route waits longer than `order_deadline_seconds`
    for an order, which has deadlines of its own.
    """
    app = FastAPI(title="Holdfast admin", openapi_url=None, docs_url=None, redoc_url=None)
    routes = APIRouter(prefix=PREFIX, responses=ERRORS, tags=["admin"])
    add_state(routes, supervision, order_deadline_seconds)
    add_engine(routes, supervision)
    add_loras(routes, supervision, adapters)
    add_logs(routes)
    app.include_router(routes)
    answer_errors(app)
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        return _as_answered(describe())

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it
    return app


def admin_route(app: FastAPI) -> BaseRoute:
    """The application as one of the front door's routes; each call of it is logged."""
    return _Below(PREFIX, Noted(app))


class _Below(BaseRoute):
    """Everything at and below a path, which the application behind it sees whole."""

    def __init__(self, path: str, app: ASGIApp) -> None:
        self.path = path
        self._app = app

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        path = scope["path"]
        is_ours = path == self.path or path.startswith(f"{self.path}/")
        is_http = scope["type"] == "http"
        return (Match.FULL if is_http and is_ours else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _as_answered(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI documents 422 for bodies that are wrong; we answer 400."""
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)
    return document
