"""Every answer is counted by route, method and class of status, whichever layer gives it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.routing import Mount, Route

from asgi_server import DEADLINE_SECONDS, serving
from counter_values import counter_values
from holdfast.api.admission import PROBE_HEADER, Admission
from holdfast.api.auth import KeyCheck, Keys
from holdfast.api.gate import Gate
from holdfast.api.health import health_routes
from holdfast.api.limits import Limits
from holdfast.api.metrics import HttpCounts
from holdfast.api.request_log import RequestLog
from holdfast.api.router import LateApp, OwnRoutes
from holdfast.engine.requests.sequence_queue import Capacity
from holdfast.lifecycle.states import State
from holdfast.listener.server import bound_socket, listening
from holdfast.settings import KeySettings, LimitSettings, OverloadSettings
from holdfast.telemetry.collector import OwnRegistry
from holdfast.telemetry.counters import Refusals
from inner_app import InnerApp, View
from listening import LOCAL, Wire
from sample_status import a_status

KEY = {"authorization": "Bearer the-api-key"}
PROBE = "a-token"
TOO_LARGE = b"POST /prefix/v1/whoami?x HTTP/1.1\r\nhost: x\r\ncontent-length: 11\r\n\r\n"
Requests = Counter[tuple[str, str, str]]


class Front:
    """All layers of the front end, around an application that stands for vLLM's."""

    def __init__(self, state: State = State.READY, *, capacity: float = 8) -> None:
        self.inner = InnerApp()
        self.counts = HttpCounts(root_path="/prefix")
        self.counts.add_routes(self.inner.routes)
        self.counts.add_routes(
            [Route("/v1/things/{name:path}", _nothing), Mount("/docs", _nothing)]
        )
        self.refusals = Refusals()
        overload = OverloadSettings(0, 0)
        self.admission = Admission(
            View(state),
            probe_token=PROBE,
            refusals=self.refusals,
            overload=overload,
            capacity=lambda: Capacity(capacity, capacity),
        )
        engine_app = LateApp()
        engine_app.attach(self.inner)
        is_probe = self.admission.is_probe
        gate = Gate(engine_app, self.admission)
        limits = Limits(gate, LimitSettings(), self.refusals, is_probe=is_probe)
        door = OwnRoutes(health_routes(a_status, queue=lambda: (0, 0)), limits)
        keys = Keys.read(("the-api-key",), KeySettings())
        check = KeyCheck(door, keys, self.refusals, is_probe=is_probe)
        self.app = RequestLog(check, is_on=False, on_finished=self.counts.count)

    def sample(self, name: str, **labels: str) -> float | None:
        """One sample of the page."""
        return OwnRegistry(self.counts).get_sample_value(name, labels)

    @property
    def requests(self) -> Requests:
        """How often each (method, status, handler) was counted."""
        return Counter(
            {
                (labels["method"], labels["status"], labels["handler"]): int(sample.value)
                for family in self.counts.collect()
                for sample in family.samples
                if sample.name == "http_requests_total"
                for labels in [sample.labels]
            }
        )

    async def until_counted(self, requests: int) -> Requests:
        """Return the counts when this many requests are counted, each after its answer."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while self.requests.total() < requests:  # noqa: ASYNC110 - nobody is told of it
                await asyncio.sleep(0.001)
        return self.requests


async def _nothing(*_: Any) -> None:
    raise AssertionError


def _asked(front: Front, *asks: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Requests:
    async def run() -> Requests:
        async with serving(front.app) as client:
            for ask in asks:
                await ask(client)
            return await front.until_counted(len(asks))

    return asyncio.run(run())


def test_an_answer_is_counted_under_its_route() -> None:
    """With its method and class of status, its time, and the bytes that passed."""
    front = Front()
    found = _asked(front, lambda client: client.post("/v1/whoami", content=b"four", headers=KEY))
    assert found == {("POST", "2xx", "/v1/whoami"): 1}
    handler = {"handler": "/v1/whoami"}
    assert front.sample("http_request_size_bytes_sum", **handler) == len(b"four")
    assert front.sample("http_response_size_bytes_sum", **handler) == len(b"inner 4")
    assert front.sample("http_request_duration_seconds_count", method="POST", **handler) == 1
    assert front.sample("http_request_duration_highr_seconds_count") == 1


def test_a_missing_key_is_counted_under_the_route() -> None:
    """Who has no key is answered before vLLM's application is asked."""
    found = _asked(Front(), lambda client: client.get("/prefix/v1/whoami/?a=b"))
    assert found == {("GET", "4xx", "/v1/whoami"): 1}


@pytest.mark.parametrize("state", [State.STARTING, State.DRAINING])
def test_a_closed_gate_is_counted_under_the_route(state: State) -> None:
    """What is asked for the most is known before vLLM is loaded."""
    found = _asked(
        Front(state), lambda client: client.post("/v1/chat/completions", json={}, headers=KEY)
    )
    assert found == {("POST", "5xx", "/v1/chat/completions"): 1}


def test_a_full_queue_is_counted_under_the_route() -> None:
    """429 is a class of its route's answers."""
    found = _asked(
        Front(capacity=0), lambda client: client.post("/v1/whoami", content=b"", headers=KEY)
    )
    assert found == {("POST", "4xx", "/v1/whoami"): 1}


def test_a_failure_of_the_application_is_counted() -> None:
    """As the 500 that the client got."""
    found = _asked(Front(), lambda client: client.get("/v1/broken", headers=KEY))
    assert found == {("GET", "5xx", "/v1/broken"): 1}


def test_a_client_that_leaves_is_no_failure_of_the_server() -> None:
    """It is counted like any request that the client spoilt, once the application is done."""
    front = Front()

    async def leave(client: httpx.AsyncClient) -> None:
        async with client.stream("GET", "/v1/stream", headers=KEY):
            pass
        front.inner.released.set()

    assert _asked(front, leave) == {("GET", "2xx", "/v1/stream"): 1}


def test_the_probe_is_not_counted() -> None:
    """Its requests are nobody's."""
    probe = {**KEY, PROBE_HEADER: PROBE}

    async def run() -> Requests:
        front = Front(State.PROBING)
        async with serving(front.app) as client:
            assert (await client.get("/v1/whoami", headers=probe)).status_code == 200
            await client.get("/v1/headers")
            return await front.until_counted(1)

    assert asyncio.run(run()) == {("GET", "4xx", "/v1/headers"): 1}


def test_what_watches_the_server_is_not_counted() -> None:
    """Health routes and scrapes are not traffic, and vLLM leaves its own out too."""

    async def run() -> Requests:
        front = Front()
        async with serving(front.app) as client:
            for path in ("/livez", "/readyz", "/startupz", "/health", "/ping", "/metrics"):
                await client.get(path)
            await client.get("/v1/whoami")
            return await front.until_counted(1)

    assert asyncio.run(run()) == {("GET", "4xx", "/v1/whoami"): 1}


def test_clients_make_no_series() -> None:
    """Whatever paths and methods they invent, the labels are of a closed set."""
    front = Front()
    paths = [f"/v1/{number}" for number in range(30)]
    paths += [f"/v1/things/{number}/of/mine" for number in range(30)]
    paths += [f"/docs/{number}" for number in range(30)]
    paths += ["/v1/whoami%00", "/v1/whoami%0a", "/%76%31/whoami"]
    asks = [lambda client, path=path: client.get(path) for path in paths]
    asks += [
        lambda client, method=method: client.request(method, "/v1/whoami")
        for method in ("PROPFIND", "MKCOL", "SEARCH")
    ]
    found = _asked(front, *asks)
    assert found == {
        ("GET", "4xx", "none"): 32,
        ("GET", "4xx", "/v1/things/{name:path}"): 30,
        ("GET", "4xx", "/docs"): 30,
        ("GET", "4xx", "/v1/whoami"): 1,
        ("other", "4xx", "/v1/whoami"): 3,
    }


def test_what_a_connection_refuses_is_counted_once() -> None:
    """A body that is announced too large never reaches the application."""
    front = Front()

    async def run() -> Requests:
        limits = LimitSettings(max_body_bytes=10)
        with bound_socket(LOCAL) as sock:
            async with listening(
                front.app,
                sock,
                LOCAL,
                limits=limits,
                refusals=front.refusals,
                on_refused=front.counts.count_refused,
            ):
                wire = Wire(*await asyncio.open_connection(*sock.getsockname()[:2]))
                await wire.send(TOO_LARGE)
                assert (await wire.answer()).status == 413
                wire.writer.transport.abort()
        return await front.until_counted(1)

    assert asyncio.run(run()) == {("POST", "4xx", "/v1/whoami"): 1}
    assert counter_values(front.refusals)["body_too_large"] == 1
