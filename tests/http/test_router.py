from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from asgi_server import DEADLINE_SECONDS, serving
from holdfast.api.admission import Admission
from holdfast.api.gate import Gate
from holdfast.api.health import health_routes
from holdfast.api.metrics import metrics_route, request_counts
from holdfast.api.router import LateApp, OwnRoutes
from holdfast.lifecycle.states import State
from holdfast.records import Status
from holdfast.telemetry.collector import HoldfastCollector, OwnRegistry
from holdfast.telemetry.counters import Counters, Refusals
from holdfast.telemetry.exposition import Registries
from holdfast.telemetry.load import Load
from inner_app import InnerApp, View
from sample_status import a_fresh_status, a_status


def _front(
    status: Status, *, root_path: str = "", registries: Registries = ()
) -> tuple[OwnRoutes, LateApp]:
    admission = Admission(View(State(status.state)), probe_token="", refusals=Refusals())
    collector = HoldfastCollector(
        lambda: status,
        counters=Counters(),
        requests=lambda: request_counts(admission, None, Load(admission.held)),
        waits=admission.waits,
        restarts_left=lambda: 3,
        loop_lag_seconds=lambda: 0.0,
        host_memory=lambda: None,
        version="0.1.0",
        vllm_version="0.32.0",
    )
    vllm = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Running.", registry=vllm).set(1)
    registries = registries or (OwnRegistry(collector), vllm)
    routes = [
        *health_routes(lambda: status, queue=lambda: (0, 0)),
        metrics_route(lambda: registries),
    ]
    engine_app = LateApp()
    engine_app.attach(InnerApp())
    return OwnRoutes(routes, Gate(engine_app, admission), root_path=root_path), engine_app


def _get(front: OwnRoutes, path: str, **request: dict[str, str]) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with serving(front) as client:
            return await client.get(path, **request)  # type: ignore[arg-type]

    return asyncio.run(ask())


@pytest.mark.parametrize("path", ["/health", "/ping", "/health/", "/metrics", "/metrics/"])
def test_our_routes_hide_those_of_the_application(path: str) -> None:
    """Health and metrics are ours though the application has routes of the same path."""
    front, _ = _front(a_status())
    answer = _get(front, path)
    assert answer.status_code == 200
    assert "inner" not in answer.text


def test_only_exact_paths_are_ours() -> None:
    """A path below one of ours belongs to the application."""
    front, _ = _front(a_status())
    assert _get(front, "/metrics/deeper").text == "inner 0"


@pytest.mark.parametrize("path", ["/prefix/readyz", "/readyz"])
def test_our_routes_are_found_under_the_root_path(path: str) -> None:
    """A proxy may leave the root path in the request or take it away."""
    front, _ = _front(a_status(), root_path="/prefix")
    assert _get(front, path).headers["x-holdfast-state"] == "READY"


def test_a_longer_word_is_not_the_root_path() -> None:
    """`/prefixed/readyz` does not lie under `/prefix`."""
    front, _ = _front(a_status(), root_path="/prefix")
    assert _get(front, "/prefixed/readyz").status_code == 404


def test_the_door_knows_whether_an_application_is_attached() -> None:
    """Who attaches it can tell that it was done."""
    app = LateApp()
    assert not app.is_attached
    app.attach(InnerApp())
    assert app.is_attached


def test_an_application_may_be_attached_again() -> None:
    """What comes after the next start reaches the new application."""
    front, engine_app = _front(a_status())

    async def other(scope: object, receive: object, send: object) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 299, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body"})  # type: ignore[operator]

    engine_app.attach(other)
    assert _get(front, "/v1/whoami").status_code == 299


def test_the_metrics_page_stands_in_the_first_second() -> None:
    """Before there is an engine the page says so, with vLLM's metrics beside ours."""
    front, _ = _front(a_fresh_status())
    answer = _get(front, "/metrics")
    families = {f.name: f for f in text_string_to_metric_families(answer.text)}
    states = {s.labels["state"]: s.value for s in families["holdfast_state"].samples}
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert states["STARTING"] == 1
    assert families["vllm:num_requests_running"].samples[0].value == 1


def test_the_metrics_page_speaks_openmetrics() -> None:
    """The Accept header chooses the format."""
    front, _ = _front(a_status())
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    answer = _get(front, "/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


class Slow(Collector):
    """A registry that waits until a test lets it answer."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.may_end = threading.Event()

    def collect(self) -> Iterator[Metric]:
        self.is_asked.set()
        yield GaugeMetricFamily(
            "in_time", "Whether it was let go.", self.may_end.wait(DEADLINE_SECONDS)
        )


def test_a_slow_scrape_stops_nobody() -> None:
    """While a page is rendered the other routes answer."""
    slow = Slow()
    front, _ = _front(a_status(), registries=(slow,))

    async def ask() -> tuple[int, str]:
        async with serving(front) as client, asyncio.TaskGroup() as tasks:
            scrape = tasks.create_task(client.get("/metrics"))
            try:
                assert await asyncio.to_thread(slow.is_asked.wait, DEADLINE_SECONDS)
                live = await client.get("/livez")
            finally:
                slow.may_end.set()
            return live.status_code, (await scrape).text

    status, page = asyncio.run(ask())
    assert status == 200
    assert "in_time 1.0" in page
