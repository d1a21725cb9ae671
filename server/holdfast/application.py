"""The composition root: every object is made here, given its collaborators, and ended here."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from holdfast import __version__, configuration
from holdfast.api import openapi
from holdfast.api.admin import admin_app, admin_route
from holdfast.api.admission import PROBE_HEADER, Admission
from holdfast.api.auth import KeyCheck, Keys
from holdfast.api.cross_origin import ReadableByPages
from holdfast.api.gate import Gate
from holdfast.api.health import health_routes
from holdfast.api.limits import Limits
from holdfast.api.load import LoadView, routing_route
from holdfast.api.metrics import HttpCounts, metrics_route, request_counts
from holdfast.api.quotas import Quotas
from holdfast.api.request_log import RequestLog
from holdfast.api.router import LateApp, OwnRoutes
from holdfast.engine.baseline import BaselineWatch
from holdfast.engine.interface import Engine, EngineLauncher
from holdfast.engine.launch.late_engine import LateEngine
from holdfast.engine.requests.sequence_queue import PresentCapacity
from holdfast.lifecycle.learning import Learning
from holdfast.lifecycle.memory_relief import MemoryRelief
from holdfast.lifecycle.operations import command_deadline_seconds
from holdfast.lifecycle.start_times import Forecast
from holdfast.lifecycle.states import State
from holdfast.lifecycle.supervisor import Supervisor
from holdfast.listener import tls
from holdfast.listener.connection_table import connection_limit
from holdfast.listener.own_socket import own_client
from holdfast.listener.server import ALWAYS_ANSWERED, listening
from holdfast.nodes.listener import NodePort
from holdfast.probe import ProbeJournals, Prober, ProbeTimeouts
from holdfast.processes import signals, tree
from holdfast.processes.environment import NativeVariables
from holdfast.records import Death, ProbeReport, RankStats, Status
from holdfast.settings import Settings
from holdfast.status_page.page import StatusPage
from holdfast.status_page.sources import Sources, sources_of
from holdfast.telemetry.collector import HoldfastCollector, OwnRegistry, RequestCounts
from holdfast.telemetry.counters import Counters
from holdfast.telemetry.exposition import vllm_registry
from holdfast.telemetry.key_usage import KeyUsage
from holdfast.telemetry.logs import quieten_access_log
from holdfast.telemetry.loop_lag import LoopLag
from holdfast.telemetry.progress import progress_in
from holdfast.telemetry.vllm_gauges import LoadedRegistry
from holdfast.versions import vllm_version
from holdfast.workspace import learned_store

IDLE_POLL_SECONDS = 0.1


class Application:
    """All objects of one `holdfast serve`, and the host of the supervisor."""

    def __init__(  # noqa: PLR0913 - the resources of `serve`
        self,
        settings: Settings,
        keys: Keys,
        sock: socket.socket,
        directory: Path,
        *,
        own: socket.socket,
        usage: KeyUsage,
        native_variables: NativeVariables,
        end_now: signals.Handler,
        baseline: BaselineWatch | None = None,
        node_port: NodePort | None = None,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._usage = usage
        self._baseline = baseline
        self._counters = Counters()
        self._end_now = end_now
        self._sock, self._own = sock, own
        learned = learned_store.learned_directory(settings.workspace)
        self._page = StatusPage(
            settings.page,
            progress_in(settings.logs.format),
            self._page_sources,
            root_path=settings.listen.root_path,
        )
        self._probe_token = secrets.token_urlsafe(32)
        self._http_counts = HttpCounts(root_path=settings.listen.root_path)
        self._loop_lag = LoopLag()
        self._journals = ProbeJournals(learned)
        self._memory = MemoryRelief(
            settings.memory,
            hold_timeout_seconds=settings.supervision.hold_timeout_seconds,
            on_action=self._counters.memory_actions.count,
            journals=self._journals,
        )
        self._engine = LateEngine(
            settings,
            directory,
            configuration.given(settings, os.environ),
            learned_directory=learned,
            native_variables=native_variables,
            node_port=node_port,
            on_node_refused=self._counters.node_refusals.count,
            state=self._state,
            count_keys=lambda: self._keys.api.count,
            until_out_of_memory=self._memory.until_out_of_memory,
        )
        self._supervisor = self._new_supervisor(learned)
        self._admission = self._new_admission()
        self._load = LoadView(self._admission, self._engine.request_load)
        self._engine_app = LateApp()
        self._server: uvicorn.Server | None = None

    async def run(self, is_asked_to_stop: Callable[[], bool] = lambda: False) -> None:
        """Listen, then start, prove and serve until asked to stop, possibly even before."""
        stop, come = self._supervisor.request_stop, is_asked_to_stop
        with self._page.progress, signals.draining(stop, self._end_now, has_come=come):
            async with (
                listening(
                    self._layers(),
                    self._sock,
                    self._settings.uvicorn_listen,
                    limits=self._settings.limits,
                    refusals=self._counters.refusals,
                    own=self._own,
                    on_refused=self._http_counts.count_refused,
                ) as self._server,
                tls.certificates_refreshed(self._server.config, self._settings.listen),
                self._page.running(),
                self._engine.kept(),
                self._loop_lag.measured(),
                self._memory.running(),
                tree.resource_tracker_kept(),
            ):
                quieten_access_log(
                    ALWAYS_ANSWERED.union(self._settings.listen.unlogged_paths),
                    is_probing=lambda: self._state() is State.PROBING,
                )
                await self._supervisor.run()

    # The supervisor's host

    async def load(self) -> EngineLauncher:
        """Import vLLM, resolve the command line, and let other nodes join."""
        return await self._engine.load()

    async def mount(self) -> None:
        """Build vLLM's application once; its objects reach the current engine through the proxy."""
        if not self._engine_app.is_attached:
            app = await self._engine.openai_app(self._server, self._counters.tool_calls.count)
            openapi.publish(app, self._openapi)
            self._http_counts.add_routes(app.routes)
            self._engine_app.attach(app)

    def prober(self, engine: Engine) -> Prober:
        """Return a prober that uses our own listener, and passes the gate with the token."""
        return Prober(
            self._settings.probe,
            engine,
            self._client,
            self._journals.opened(engine.facts.fingerprint),
            self._page.progress,
            timeouts=ProbeTimeouts(stall_seconds=self._settings.supervision.stall_timeout_seconds),
            baseline=self._baseline,
        )

    async def until_idle(self) -> bool:
        """Wait for queued and running requests within the drain timeout; False if some are left.

        A background response continues after its request has been answered.
        """
        deadline_seconds = self._settings.supervision.drain_timeout_seconds
        try:
            async with asyncio.timeout(deadline_seconds):
                while self._admission.is_busy or self._engine.requests_in_engine():
                    await self._admission.until_idle(deadline_seconds)
                    if self._engine.requests_in_engine():
                        await asyncio.sleep(IDLE_POLL_SECONDS)
        except TimeoutError:
            return False
        return True

    def generation_ended(self, ranks: tuple[RankStats, ...]) -> None:
        """Record the last counters of a generation."""
        self._counters.totals.absorb(ranks)
        self._page.history.saw_ranks(ranks)

    def engine_died(self, death: Death) -> None:
        """Show the death on the status page."""
        self._page.history.engine_died(death)

    def probe_ran(self, report: ProbeReport) -> None:
        """Count a run of the suite."""
        self._counters.totals.probe_ran(report, self._supervisor.status().ranks)
        self._page.history.probe_ran(report)

    def became_ready(self) -> None:
        """Watch from now on for a blocked event loop."""
        self._loop_lag.mark()

    # Construction

    def _new_supervisor(self, learned: Path | None) -> Supervisor:
        return Supervisor(
            self._settings.probe,
            self._settings.supervision,
            self,
            learning=Learning(self._settings.workspace, learned, self._memory.kept_bytes()),
            forecast=Forecast(learned, self._settings.arguments_without_address),
            engine_deaths=self._counters.engine_deaths,
            recycles=self._counters.recycles,
            has_new_weights=self._engine.has_new_weights,
            progress=self._page.progress,
            baseline=self._baseline,
            memory=self._memory,
        )

    def _new_admission(self) -> Admission:
        return Admission(
            self._supervisor,
            probe_token=self._probe_token,
            refusals=self._counters.refusals,
            hold_timeout_seconds=self._settings.supervision.hold_timeout_seconds,
            overload=self._settings.overload,
            capacity=PresentCapacity(lambda: self._supervisor.facts),
            count_keys=lambda: self._keys.api.count,
            suspended_seconds=self._engine.suspended_seconds,
            max_connections=connection_limit(self._settings.limits.max_connections),
        )

    def _openapi(self, document: openapi.OpenAPIDocument) -> openapi.OpenAPIDocument:
        return openapi.complete(
            document,
            version=__version__,
            has_keys=not self._keys.api.is_empty,
            guards_metrics=self._keys.guards_metrics,
            has_page=self._settings.page.is_on,
            others=(self._admin.openapi(),),
            root_path=self._settings.listen.root_path,
        )

    def _state(self) -> State:
        return self._supervisor.state

    def _status(self) -> Status:
        return self._engine.with_nodes(self._supervisor.status())

    def _client(self) -> httpx.AsyncClient:
        headers = {PROBE_HEADER: self._probe_token}
        root_path = self._settings.listen.root_path
        return own_client(self._own, headers, root_path=root_path)

    def _layers(self) -> ASGIApp:
        """Build the layers that a request passes, from the inside out."""
        listen, is_probe = self._settings.listen, self._admission.is_probe
        root_path, refusals = listen.root_path, self._counters.refusals
        gate = Gate(self._engine_app, self._admission, root_path=root_path)
        limits = Limits(gate, self._settings.limits, refusals, is_probe=is_probe)
        quotas = Quotas(limits, self._keys.api, self._usage, refusals, root_path=root_path)
        own_routes = OwnRoutes(self._routes(), quotas, root_path=root_path)
        check = KeyCheck(
            own_routes,
            self._keys,
            refusals,
            is_probe=is_probe,
            is_shell=self._page.is_shell,
            allowed_origins=listen.allowed_origins,
            root_path=root_path,
        )
        return RequestLog(
            ReadableByPages(check, listen),
            quiet_paths=ALWAYS_ANSWERED,
            silent_paths=listen.unlogged_paths,
            is_on=listen.has_access_log and self._settings.logs.requests == "line",
            on_finished=self._http_counts.count,
        )

    def _routes(self) -> list[BaseRoute]:
        collector = HoldfastCollector(
            self._status,
            counters=self._counters,
            requests=self._request_counts,
            waits=self._admission.waits,
            restarts_left=lambda: self._supervisor.restarts_left,
            loop_lag_seconds=self._loop_lag.lag_seconds,
            host_memory_bytes=self._engine.host_memory_bytes,
            host_memory=self._memory.last,
            broken_key_files=self._keys.broken_files,
            key_usage=self._usage.totals,
            baseline=self._baseline.last if self._baseline is not None else None,
            has_log_stats=self._engine.has_log_stats,
            version=__version__,
            vllm_version=vllm_version(),
        )
        registry = OwnRegistry(collector, self._http_counts)
        self._http_counts.add_routes(self._admin.routes)
        return [
            routing_route(self._load.routing),  # first, as it is asked for most often
            *health_routes(
                self._status,
                queue=self._engine.queue,
                broken_key_files=self._keys.broken_files,
                configuration=lambda: self._engine.configuration,
            ),
            metrics_route(lambda: (registry, LoadedRegistry(vllm_registry(), self._load.shown()))),
            *self._page.routes(),
            admin_route(self._admin),
        ]

    def _request_counts(self) -> RequestCounts:
        return request_counts(self._admission, self._engine.requests(), self._load.now())

    def _page_sources(self) -> Sources:
        return sources_of(
            self._supervisor,
            self._engine,
            status=self._status,
            requests=self._request_counts,
            waiting=self._admission.waiting_contexts,
            counters=self._counters,
            memory=self._memory,
            baseline=self._baseline,
        )

    @cached_property
    def _admin(self) -> FastAPI:
        return admin_app(
            self._supervisor,
            self._engine.loras,
            on_verified=self._page.history.verified,
            command_deadline_seconds=command_deadline_seconds(
                self._settings.probe, self._settings.supervision
            ),
        )
