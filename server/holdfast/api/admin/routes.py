"""The admin application: its routes read a body, ask the supervisor or the engine, and answer.

Its OpenAPI document lists the admin routes only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, FastAPI
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.api.admin import models
from holdfast.api.admin.errors import ERRORS, AuditLog, answer_errors
from holdfast.errors import EngineSilentError, NotReadyError
from holdfast.lifecycle.commands import (
    Command,
    ProbeCommand,
    ProbeResult,
    SleepCommand,
    SleepResult,
    WakeCommand,
)
from holdfast.lifecycle.supervisor import Supervisor
from holdfast.records import Lora
from holdfast.telemetry.logs import log_levels, set_log_level

if TYPE_CHECKING:  # it imports vLLM, and these routes answer before that is imported
    from holdfast.engine.loras import Loras

Value = TypeVar("Value")


def add_state(routes: APIRouter, supervision: Supervisor, deadline_seconds: float) -> None:
    async def carried_out(command: Command) -> Any:
        return await _in_time(supervision.submit(command), str(command), deadline_seconds)

    def state() -> models.StateReply:
        return models.StateReply.model_validate(supervision.status())

    @routes.get("/workspace")
    async def workspace() -> models.WorkspaceReply:
        """List the workspaces of every rank, without waiting for the engine."""
        return models.WorkspaceReply.model_validate(supervision.status())

    @routes.post("/probe")
    async def probe(asked: models.ProbeBody) -> ProbeResult:
        """Run the probe again. New requests wait meanwhile; an engine that fails is replaced."""
        result: ProbeResult = await carried_out(ProbeCommand(asked.suite, asked.max_age_seconds))
        return result

    @routes.post("/drain", status_code=202)
    async def drain() -> models.StateReply:
        """Finish running requests and exit with 0, as after SIGTERM."""
        supervision.request_stop()
        return state()

    @routes.post("/restart", status_code=202)
    async def restart(asked: models.RestartBody) -> models.StateReply:
        """Restart the engine. Streams that have begun may finish; other requests are replayed."""
        supervision.request_restart(asked.reason)
        await asyncio.sleep(0)  # let the restart begin
        return state()

    @routes.post("/sleep")
    async def sleep(asked: models.SleepBody) -> SleepResult:
        """Free the memory of the device. Requests get 503 until the engine is awake again."""
        command = SleepCommand(asked.level, is_abrupt=asked.mode == "abort")
        result: SleepResult = await carried_out(command)
        return result

    @routes.post("/wake")
    async def wake(asked: models.WakeBody) -> SleepResult:
        """Reclaim memory. When the engine has all of it, a quick probe makes the server READY."""
        result: SleepResult = await carried_out(WakeCommand(frozenset(asked.tags)))
        return result


def add_engine(routes: APIRouter, supervision: Supervisor) -> None:
    def state() -> models.StateReply:
        return models.StateReply.model_validate(supervision.status())

    @routes.post("/profile/start")
    async def profile_start(
        asked: models.ProfileBody,
    ) -> models.StateReply:
        """Start the profiler of --profiler-config."""
        await supervision.engine_at_work().upkeep.start_profile(asked.prefix)
        return state()

    @routes.post("/profile/stop")
    async def profile_stop() -> models.StateReply:
        """Stop the profiler and write the profile. The engine runs no steps meanwhile."""
        await supervision.engine_at_work().upkeep.stop_profile()
        return state()

    @routes.post("/cache/reset")
    async def cache_reset(
        asked: models.CacheBody,
    ) -> models.CacheReply:
        """Empty caches. The prefix cache must not be in use."""
        await supervision.engine_at_work().upkeep.reset_caches(frozenset(asked.caches))
        return models.CacheReply(caches=sorted(set(asked.caches)))

    @routes.post("/save-sharded-state")
    async def save_sharded_state(
        asked: models.SaveBody,
    ) -> models.StateReply:
        """Write the weights of each rank for `--load-format sharded_state`; no steps run then."""
        await supervision.engine_at_work().upkeep.save_sharded_state(
            asked.path, pattern=asked.pattern, max_size_bytes=asked.max_size_bytes
        )
        return state()


def add_loras(
    routes: APIRouter, supervision: Supervisor, adapters: Callable[[], Loras | None]
) -> None:
    def at_work() -> Loras:
        supervision.engine_at_work()
        if (found := adapters()) is None:
            raise NotReadyError("vLLM is being imported")
        return found

    @routes.get("/loras")
    async def loras() -> models.LorasReply:
        """List all adapters, without waiting for the engine."""
        found = adapters()
        return models.LorasReply(loras=found.listed() if found else ())

    @routes.post("/loras")
    async def lora_load(asked: models.LoraBody) -> Lora:
        """Load an adapter. The next generations of the engine load it too."""
        return await at_work().load(asked.name, asked.path, is_replacing=asked.replace)

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
        asked: models.LogLevelBody,
    ) -> models.LogLevelReply:
        """Change log levels of the front end, but not of the engine, until the process ends."""
        for name in (asked.logger,) if asked.logger else log_levels():
            set_log_level(name, asked.level)
        return models.LogLevelReply(levels=dict(log_levels()))


async def _in_time(answer: Awaitable[Value], what: str, deadline_seconds: float) -> Value:
    """Return an answer that others may await too, or raise if it is late."""
    try:
        async with asyncio.timeout(deadline_seconds):
            return await asyncio.shield(answer)
    except TimeoutError as error:
        raise EngineSilentError(
            f"{what} did not finish within {deadline_seconds:.0f} s.",
            remedy="it is still running; see /statusz.",
        ) from error


PREFIX = "/admin"


def admin_app(
    supervision: Supervisor,
    adapters: Callable[[], Loras | None],
    *,
    command_deadline_seconds: float,
) -> FastAPI:
    """Return the application for `/admin`, which answers in every state of the server.

    An outer layer checks the key. No route waits longer than `command_deadline_seconds` for a
    command, which has deadlines of its own.
    """
    app = FastAPI(title="Holdfast admin", openapi_url=None, docs_url=None, redoc_url=None)
    routes = APIRouter(prefix=PREFIX, responses=ERRORS, tags=["admin"])
    add_state(routes, supervision, command_deadline_seconds)
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
    """Return the application as one of our own routes; each call of it is logged."""
    return _Below(PREFIX, AuditLog(app))


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
