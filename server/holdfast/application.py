"""The composition root: every object is made here, given its collaborators, and ended here."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from holdfast import __version__, configuration, patches
from holdfast.api import openapi
from holdfast.api.admin import admin_app, admin_route
from holdfast.api.admission import PROBE_HEADER, Admission
from holdfast.api.auth import KeyCheck, Keys
from holdfast.api.gate import Gate
from holdfast.api.health import health_routes
from holdfast.api.limits import Limits
from holdfast.api.metrics import HttpCounts, metrics_route, request_counts
from holdfast.api.request_log import RequestLog
from holdfast.api.router import LateApp, OwnRoutes
from holdfast.engine import unsupported
from holdfast.engine.baseline import BaselineWatch
from holdfast.engine.interface import Engine, EngineLauncher
from holdfast.engine.replay import ReplayManager
from holdfast.engine.sequence_queue import Capacity
from holdfast.lifecycle.learning import Learning
from holdfast.lifecycle.proof import MAX_PASSES
from holdfast.lifecycle.start_times import Forecast
from holdfast.lifecycle.states import State
from holdfast.lifecycle.supervisor import Supervisor
from holdfast.listener import tls
from holdfast.listener.server import ALWAYS_ANSWERED, listening, own_client
from holdfast.probe import ProbeJournal, Prober, ProbeTimeouts
from holdfast.processes import signals, tree
from holdfast.processes.environment import NativeVariables
from holdfast.records import EngineFacts, ProbeReport, RankStats
from holdfast.settings import ListenSettings, Settings, WorkspaceSettings
from holdfast.telemetry.collector import HoldfastCollector, OwnRegistry
from holdfast.telemetry.counters import EngineDeaths, Refusals, ToolCalls, Totals
from holdfast.telemetry.exposition import vllm_registry
from holdfast.telemetry.logs import quieten_access_log
from holdfast.telemetry.loop_lag import LoopLag
from holdfast.telemetry.progress import LogProgress, Progress, progress_for
from holdfast.versions import vllm_version
from holdfast.workspace import learned_store

if TYPE_CHECKING:
    from holdfast.engine.configure import ConfiguredEngine

IDLE_POLL_SECONDS = 0.1
COMMAND_MARGIN_SECONDS = 900.0
"""The time for an engine to sleep and wake, in addition to the drain and the proof."""


class Application:
    """All objects of one `holdfast serve`, and the host of the supervisor."""

    def __init__(  # noqa: PLR0913 - the resources of `serve`
        self,
        settings: Settings,
        keys: Keys,
        sock: socket.socket,
        directory: Path,
        *,
        native_variables: NativeVariables,
        end_now: signals.Handler,
        baseline: BaselineWatch | None = None,
    ) -> None:
        self._native_variables = native_variables
        self._settings = settings
        self._keys = keys
        self._baseline = baseline
        self._end_now = end_now
        self._sock = sock
        self._directory = directory
        self._learned_directory = learned_directory(settings.workspace)
        self._progress = _progress(settings)
        self._configuration = configuration.given(settings, os.environ)
        self._probe_token = secrets.token_urlsafe(32)
        self._totals = Totals()
        self._engine_deaths = EngineDeaths()
        self._refusals = Refusals()
        self._tool_calls = ToolCalls()
        self._http_counts = HttpCounts(root_path=settings.listen.root_path)
        self._loop_lag = LoopLag()
        self._supervisor = Supervisor(
            settings.probe,
            settings.supervision,
            self,
            learning=Learning(settings.workspace, self._learned_directory),
            forecast=Forecast(self._learned_directory, settings.arguments_without_address),
            engine_deaths=self._engine_deaths,
            progress=self._progress,
            baseline=baseline,
        )
        self._facts_of_capacity: EngineFacts | None = None
        self._known_capacity = Capacity()
        self._admission = Admission(
            self._supervisor,
            probe_token=self._probe_token,
            refusals=self._refusals,
            hold_timeout_seconds=settings.supervision.hold_timeout_seconds,
            overload=settings.overload,
            capacity=self._capacity,
            count_keys=lambda: self._keys.api.count,
        )
        self._engine_app = LateApp()
        self._identity = (
            tls.own_identity(directory)
            if settings.listen.is_tls and settings.listen.ssl_cert_reqs
            else None
        )
        self._server: uvicorn.Server | None = None
        self._vllm: ConfiguredEngine | None = None
        self._mounted = AsyncExitStack()

    async def run(self, is_asked_to_stop: Callable[[], bool] = lambda: False) -> None:
        """Listen, then start, prove and serve until asked to stop, possibly even before."""
        stop = self._supervisor.request_stop
        asked = signals.draining(stop, self._end_now, has_come=is_asked_to_stop)
        with self._progress, asked:
            async with (
                listening(
                    self._layers(),
                    self._sock,
                    self._listen(),
                    limits=self._settings.limits,
                    refusals=self._refusals,
                    on_refused=self._http_counts.count_refused,
                ) as self._server,
                tls.certificates_refreshed(
                    self._server.config.ssl, self._settings.listen, self._identity
                ),
                self._mounted,
                self._loop_lag.measured(),
                tree.resource_tracker_kept(),
            ):
                tls.accept_identity(self._server.config.ssl, self._identity)
                quieten_access_log(
                    ALWAYS_ANSWERED.union(self._settings.listen.unlogged_paths),
                    is_probing=lambda: self._state() is State.PROBING,
                )
                await self._supervisor.run()

    # The supervisor's host

    async def load(self) -> EngineLauncher:
        """Import vLLM and resolve the configuration, off the loop: it takes seconds."""
        # The end of the loop would wait for its own executor, and an import cannot be cancelled.
        loader = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._vllm = await asyncio.get_running_loop().run_in_executor(loader, self._configure)
        self._vllm.launcher.count_keys = lambda: self._keys.api.count
        fingerprint = self._vllm.launcher.fingerprint
        self._configuration = replace(self._configuration, fingerprint=fingerprint)
        return self._vllm.launcher

    async def mount(self) -> None:
        """Build vLLM's application once; its objects reach the current engine through the proxy."""
        if self._vllm is not None and not self._engine_app.is_attached:
            app: Any = await self._mounted.enter_async_context(
                self._vllm.openai_app(self._server, self._tool_calls.count)
            )
            openapi.publish(app, self._openapi)
            self._http_counts.add_routes(app.routes)
            self._engine_app.attach(app)
            # By now all files of the model are here. A file system that hangs holds nobody up.
            threading.Thread(target=self._identify, name="identity", daemon=True).start()

    def prober(self, engine: Engine) -> Prober:
        """Return a prober that uses our own listener, and passes the gate with the token."""
        return Prober(
            self._settings.probe,
            engine,
            self._client,
            ProbeJournal(self._learned_directory, engine.facts.fingerprint),
            self._progress,
            timeouts=ProbeTimeouts(stall_seconds=self._settings.supervision.stall_timeout_seconds),
            baseline=self._baseline,
        )

    async def until_idle(self) -> bool:
        """Wait for queued and running requests within the drain time-out; False if some are left.

        A background response continues after its request has been answered.
        """
        deadline_seconds = self._settings.supervision.drain_timeout_seconds
        try:
            async with asyncio.timeout(deadline_seconds):
                while self._admission.is_busy or self._requests_in_engine():
                    await self._admission.until_idle(deadline_seconds)
                    if self._requests_in_engine():
                        await asyncio.sleep(IDLE_POLL_SECONDS)
        except TimeoutError:
            return False
        return True

    def generation_ended(self, ranks: tuple[RankStats, ...]) -> None:
        """Record the last counters of a generation."""
        self._totals.absorb(ranks)

    def probe_ran(self, report: ProbeReport) -> None:
        """Count a run of the suite."""
        self._totals.probe_ran(report)

    def became_ready(self) -> None:
        """Watch from now on for a blocked event loop."""
        self._loop_lag.mark()

    # Construction

    def _configure(self) -> ConfiguredEngine:
        try:
            from holdfast.engine.configure import configure  # noqa: PLC0415 - imports vLLM
        except ValueError:
            unsupported.check_variables(os.environ)  # vLLM reads some variables during its import
            raise
        except (ImportError, AttributeError):
            patches.check("front end")  # which says so if it is something that we change
            raise
        patches.check("front end")
        return configure(
            self._settings,
            self._directory,
            self._state,
            self._native_variables,
            learned_directory=self._learned_directory,
        )

    def _identify(self) -> None:
        if self._vllm is not None:
            self._configuration = self._vllm.identified(self._configuration)

    def _openapi(self, document: openapi.Document) -> openapi.Document:
        listen = self._settings.listen
        return openapi.complete(
            document,
            version=__version__,
            has_keys=not self._keys.api.is_empty,
            others=(self._admin.openapi(),),
            root_path=listen.root_path,
        )

    def _requests(self) -> ReplayManager | None:
        return self._vllm.launcher.requests if self._vllm else None

    def _suspended_seconds(self, key: str) -> float:
        requests = self._requests()
        return requests.suspended_seconds(key) if requests else 0.0

    def _requests_in_engine(self) -> int:
        requests = self._requests()
        return requests.in_engine + requests.held if requests else 0

    def _state(self) -> State:
        return self._supervisor.state

    def _client(self) -> httpx.AsyncClient:
        headers = {PROBE_HEADER: self._probe_token}
        return own_client(self._sock, self._settings.listen, headers, self._identity)

    def _capacity(self) -> Capacity:
        """Return the capacity of the present engine; called for each request."""
        facts = self._supervisor.facts
        if self._facts_of_capacity is not facts:
            self._facts_of_capacity, self._known_capacity = facts, Capacity.of(facts)
        return self._known_capacity

    def _queue(self) -> tuple[int, int]:
        return self._vllm.launcher.queues.totals() if self._vllm else (0, 0)

    def _listen(self) -> ListenSettings:
        """Return the given settings, with uvicorn's access log only if it replaces our own line."""
        listen, logs = self._settings.listen, self._settings.logs
        has_access_log = listen.has_access_log and logs.requests == "uvicorn"
        return replace(listen, has_access_log=has_access_log)

    def _layers(self) -> ASGIApp:
        """Build the layers that a request passes, from the inside out."""
        root_path = self._settings.listen.root_path
        is_probe = self._admission.is_probe
        gate = Gate(
            self._engine_app,
            self._admission,
            suspended_seconds=self._suspended_seconds,
            root_path=root_path,
        )
        limits = Limits(gate, self._settings.limits, self._refusals, is_probe=is_probe)
        own_routes = OwnRoutes(self._routes(), limits, root_path=root_path)
        check = KeyCheck(
            own_routes, self._keys, self._refusals, is_probe=is_probe, root_path=root_path
        )
        return RequestLog(
            check,
            quiet_paths=ALWAYS_ANSWERED,
            silent_paths=self._settings.listen.unlogged_paths,
            is_on=self._settings.listen.has_access_log and self._settings.logs.requests == "line",
            on_finished=self._http_counts.count,
        )

    def _routes(self) -> list[BaseRoute]:
        collector = HoldfastCollector(
            self._supervisor.status,
            totals=self._totals,
            requests=lambda: request_counts(self._admission, self._requests()),
            waits=self._admission.waits,
            engine_deaths=self._engine_deaths,
            refusals=self._refusals,
            tool_calls=self._tool_calls,
            restarts_left=lambda: self._supervisor.restarts_left,
            loop_lag_seconds=self._loop_lag.lag_seconds,
            broken_key_files=self._keys.broken_files,
            baseline=self._baseline.last if self._baseline is not None else None,
            version=__version__,
            vllm_version=vllm_version(),
        )
        registry = OwnRegistry(collector, self._http_counts)
        self._http_counts.add_routes(self._admin.routes)
        return [
            *health_routes(
                self._supervisor.status,
                queue=self._queue,
                broken_key_files=self._keys.broken_files,
                configuration=lambda: self._configuration,
            ),
            metrics_route(lambda: (registry, vllm_registry())),
            admin_route(self._admin),
        ]

    @cached_property
    def _admin(self) -> FastAPI:
        probe, supervision = self._settings.probe, self._settings.supervision
        passes_seconds = MAX_PASSES * probe.timeout_seconds
        return admin_app(
            self._supervisor,
            lambda: self._vllm.launcher.loras if self._vllm else None,
            command_deadline_seconds=supervision.drain_timeout_seconds
            + passes_seconds
            + COMMAND_MARGIN_SECONDS,
        )


def learned_directory(settings: WorkspaceSettings) -> Path | None:
    """Return the directory of learned reservations and the probe journal; None for nowhere."""
    if settings.learned_directory == "default":
        return learned_store.default_directory()
    return settings.learned_directory


def _progress(settings: Settings) -> Progress:
    if settings.logs.format == "auto":
        return progress_for(sys.stderr)
    return LogProgress(logging.getLogger("holdfast.progress"))
