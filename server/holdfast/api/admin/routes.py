"""The admin application: its routes read a body, ask the supervisor or the engine, and answer.

Its OpenAPI document lists the admin routes only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.api.admin import models
from holdfast.api.admin.errors import ERRORS, AuditLog, answer_errors
from holdfast.api.auth import ADMIN_PATH
from holdfast.errors import EngineSilentError, NotReadyError, UsageError
from holdfast.lifecycle.commands import (
    Command,
    ProbeCommand,
    ProbeResult,
    SleepCommand,
    SleepResult,
    WakeCommand,
)
from holdfast.lifecycle.states import State
from holdfast.lifecycle.supervisor import Supervisor
from holdfast.records import Lora
from holdfast.telemetry.logs import log_levels, set_log_level
from holdfast.verify.records import VerifyRun

if TYPE_CHECKING:  # it imports vLLM, and these routes answer before that is imported
    from holdfast.engine.loras import Loras

OperationResult = TypeVar("OperationResult")
DRAIN_BEGINS_SECONDS = 1.0
_ENDING = frozenset({State.DRAINING, State.FAILED, State.STOPPED})
OnVerified = Callable[[VerifyRun], None]
"""Receives what an operator tells of a run of `holdfast verify`."""


def add_state(routes: APIRouter, supervisor: Supervisor, deadline_seconds: float) -> None:
    async def carried_out(command: Command) -> Any:
        return await _in_time(supervisor.submit(command), str(command), deadline_seconds)

    def state() -> models.StateReply:
        return models.StateReply.model_validate(supervisor.status())

    @routes.get("/workspace")
    async def workspace() -> models.WorkspaceReply:
        """List the workspaces of every rank, without waiting for the engine."""
        return models.WorkspaceReply.model_validate(supervisor.status())

    @routes.post("/probe")
    async def probe(body: models.ProbeBody) -> ProbeResult:
        """Run the probe again. New requests wait meanwhile; an engine that fails is replaced."""
        result: ProbeResult = await carried_out(ProbeCommand(body.suite, body.max_age_seconds))
        return result

    @routes.post("/drain", status_code=202)
    async def drain() -> models.StateReply:
        """Finish running requests and exit with 0, as after SIGTERM."""
        supervisor.request_stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_BEGINS_SECONDS):
                while supervisor.state not in _ENDING:
                    await supervisor.until_moved()
        return state()

    @routes.post("/restart", status_code=202)
    async def restart(body: models.RestartBody) -> models.StateReply:
        """Restart the engine. Streams may finish, or go on; other requests are replayed."""
        supervisor.request_restart(body.reason)
        await asyncio.sleep(0)  # let the restart begin
        return state()

    @routes.post("/sleep")
    async def sleep(body: models.SleepBody) -> SleepResult:
        """Free the memory of the device. Requests get 503 until the engine is awake again."""
        command = SleepCommand(body.level, is_abrupt=body.mode == "abort")
        result: SleepResult = await carried_out(command)
        return result

    @routes.post("/wake")
    async def wake(body: models.WakeBody) -> SleepResult:
        """Reclaim memory. When the engine has all of it, a quick probe makes the server READY."""
        result: SleepResult = await carried_out(WakeCommand(frozenset(body.tags)))
        return result


def add_engine(routes: APIRouter, supervisor: Supervisor) -> None:
    def state() -> models.StateReply:
        return models.StateReply.model_validate(supervisor.status())

    @routes.post("/profile/start")
    async def profile_start(
        body: models.ProfileBody,
    ) -> models.StateReply:
        """Start the profiler of --profiler-config."""
        await supervisor.serving_engine().maintenance.start_profile(body.prefix)
        return state()

    @routes.post("/profile/stop")
    async def profile_stop() -> models.StateReply:
        """Stop the profiler and write the profile. The engine runs no steps meanwhile."""
        await supervisor.serving_engine().maintenance.stop_profile()
        return state()

    @routes.post("/cache/reset")
    async def cache_reset(
        body: models.CacheBody,
    ) -> models.CacheReply:
        """Empty caches. The prefix cache must not be in use."""
        await supervisor.serving_engine().maintenance.reset_caches(frozenset(body.caches))
        return models.CacheReply(caches=sorted(set(body.caches)))

    @routes.post("/save-sharded-state")
    async def save_sharded_state(
        body: models.SaveBody,
    ) -> models.StateReply:
        """Write the weights of each rank for `--load-format sharded_state`; no steps run then."""
        await supervisor.serving_engine().maintenance.save_sharded_state(
            body.path, pattern=body.pattern, max_size_bytes=body.max_size_bytes
        )
        return state()


def add_loras(
    routes: APIRouter, supervisor: Supervisor, adapters: Callable[[], Loras | None]
) -> None:
    def at_work() -> Loras:
        supervisor.serving_engine()
        if (found := adapters()) is None:
            raise NotReadyError("vLLM is being imported")
        return found

    @routes.get("/loras")
    async def loras() -> models.LorasReply:
        """List all adapters, without waiting for the engine."""
        found = adapters()
        return models.LorasReply(loras=found.listed() if found else ())

    @routes.post("/loras")
    async def lora_load(body: models.LoraBody) -> Lora:
        """Load an adapter. The next generations of the engine load it too."""
        return await at_work().load(body.name, body.path, is_replacing=body.replace)

    @routes.post("/loras/{name:path}/pin")
    async def lora_pin(name: str) -> Lora:
        """Pin an adapter to the device, in the next generations of the engine too."""
        return await at_work().pin(name)

    @routes.delete("/loras/{name:path}")
    async def lora_unload(name: str) -> models.LorasReply:
        """Unload an adapter. Requests that use it may finish."""
        await at_work().unload(name)
        return await loras()


def add_logs(routes: APIRouter) -> None:
    @routes.get("/log-level")
    async def log_level() -> models.LogLevelReply:
        """List the log levels of the front end."""
        return models.LogLevelReply(levels=dict(log_levels()))

    @routes.put("/log-level")
    async def log_level_change(
        body: models.LogLevelBody,
    ) -> models.LogLevelReply:
        """Change log levels of the front end, but not of the engine, until the process ends."""
        for name in (body.logger,) if body.logger else log_levels():
            set_log_level(name, body.level)
        return models.LogLevelReply(levels=dict(log_levels()))


def add_verify_run(routes: APIRouter, on_verified: OnVerified) -> None:
    @routes.put("/verify-run")
    async def verify_run(body: models.VerifyRunBody) -> VerifyRun:
        """Show the verdict of a run of `holdfast verify` on the status page."""
        run = VerifyRun(**body.model_dump())
        on_verified(run)
        return run


async def _has_only_the_body_of_its_route(request: Request) -> None:
    """Refuse what a route would ignore, as it may change what the call is meant to do.

    vLLM's own routes read their parameters from the query, so scripts written for them send one.

    Raises:
        UsageError: there is a query, or a body with something in it that the route does not read.
    """
    if request.scope["query_string"]:
        raise UsageError(
            "Admin calls take no query parameters.", remedy="put them in the JSON body."
        )
    route = request.scope.get("route")
    reads_body = isinstance(route, APIRoute) and route.body_field is not None
    if not reads_body and b"".join((await request.body()).split()) not in {b"", b"{}"}:
        raise UsageError("This route takes no body.", remedy="send none, or {}.")


async def _in_time(
    answer: Awaitable[OperationResult], what: str, deadline_seconds: float
) -> OperationResult:
    """Return an answer that others may await too, or raise if it is late."""
    try:
        async with asyncio.timeout(deadline_seconds):
            return await asyncio.shield(answer)
    except TimeoutError as error:
        raise EngineSilentError(
            f"{what} did not finish within {deadline_seconds:.0f} s.",
            remedy="it is still running; see /statusz.",
        ) from error


def admin_app(
    supervisor: Supervisor,
    adapters: Callable[[], Loras | None],
    *,
    command_deadline_seconds: float,
    on_verified: OnVerified = lambda _: None,
) -> FastAPI:
    """Return the application for `/admin`, which answers in every state of the server.

    An outer layer checks the key. No route waits longer than `command_deadline_seconds` for a
    command, which has deadlines of its own.
    """
    app = FastAPI(title="Holdfast admin", openapi_url=None, docs_url=None, redoc_url=None)
    routes = APIRouter(
        prefix=ADMIN_PATH,
        responses=ERRORS,
        tags=["admin"],
        dependencies=[Depends(_has_only_the_body_of_its_route)],
    )
    add_state(routes, supervisor, command_deadline_seconds)
    add_engine(routes, supervisor)
    add_loras(routes, supervisor, adapters)
    add_logs(routes)
    add_verify_run(routes, on_verified)
    app.include_router(routes)
    answer_errors(app)
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        return _as_answered(describe())

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it
    return app


def admin_route(app: FastAPI) -> BaseRoute:
    """Return the application as one of our own routes; each call of it is logged."""
    return _Below(ADMIN_PATH, AuditLog(app))


class _Below(BaseRoute):
    """Everything at and below a path; the application behind it gets the full path."""

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
    """Remove the 422 that FastAPI documents for invalid bodies: we answer 400."""
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)
    return document
