"""What routers and autoscalers are told of the load, through a death and a recovery."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import httpx
import pytest

from asgi_server import DEADLINE_SECONDS, serving
from endpoint_picker import POLL_SECONDS, STALE_SECONDS, EndpointPicker, Seen
from holdfast.api.admission import Admission
from holdfast.api.load import LoadView, routing_route
from holdfast.api.router import OwnRoutes
from holdfast.engine.requests.sequence_queue import Capacity
from holdfast.lifecycle.states import SERVING, State
from holdfast.request_context import RequestContext
from holdfast.telemetry.counters import Refusals
from holdfast.telemetry.load import SATURATED_WAITING, Load, SchedulerReport
from inner_app import InnerApp, View
from stub_engine import FACTS, FakeClock

PATH = "/metrics/routing"
OPENMETRICS = "application/openmetrics-text"


@dataclass
class Replica:
    """A server whose state and engine a test sets."""

    supervisor: View = field(default_factory=View)
    engine: Load = field(default_factory=Load)

    def __post_init__(self) -> None:
        self.admission = Admission(
            self.supervisor, probe_token="", refusals=Refusals(), capacity=lambda: Capacity(1, 1)
        )
        self.view = LoadView(self.admission, lambda: self.engine)
        self.app = OwnRoutes([routing_route(self.view.routing)], InnerApp())


def answered(replica: Replica, accept: str = "", method: str = "GET") -> httpx.Response:
    """The answer of the route."""

    async def ask() -> httpx.Response:
        async with serving(replica.app) as client:
            return await client.request(method, PATH, headers={"accept": accept})

    return asyncio.run(ask())


def seen_on(replica: Replica) -> Seen:
    """What a picker reads."""
    return EndpointPicker().read(answered(replica).text)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        (f"{OPENMETRICS};version=1.0.0", f"{OPENMETRICS}; version=1.0.0; charset=utf-8"),
    ],
)
def test_the_page_has_the_format_that_was_asked_for(accept: str, content_type: str) -> None:
    """Routers name none, or any; Prometheus prefers OpenMetrics."""
    answer = answered(Replica(), accept)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(content_type)
    assert answer.text.endswith("# EOF\n") == accept.startswith(OPENMETRICS)


def test_head_answers_as_get_without_a_body() -> None:
    """A check that the route is there costs nothing more."""
    answer = answered(Replica(), method="HEAD")
    assert (answer.status_code, answer.content) == (200, b"")


def test_another_method_is_not_allowed() -> None:
    """The page is only read."""
    assert answered(Replica(), method="POST").status_code == 405


def test_the_facts_of_the_last_engine_are_on_the_page() -> None:
    """Also while there is none: the next one has the same cache."""
    facts = replace(FACTS, kv_blocks=256, max_loras=3)
    page = answered(Replica(View(State.RECOVERING, facts=facts, proven_tokens=1000))).text
    assert 'vllm:cache_config_info{block_size="16",num_gpu_blocks="256"} 1\n' in page
    assert 'vllm:lora_requests_info{max_lora="3",' in page
    assert "\nholdfast_proven_tokens 1000\n" in page


def test_what_waits_at_the_gate_is_waiting() -> None:
    """Beside what waits behind it and in the schedulers."""

    async def scene() -> tuple[int, int]:
        replica = Replica(engine=Load(2, 5, (SchedulerReport(running=4, waiting=1),)))
        tickets = [replica.admission.join(RequestContext(), work="engine") for _ in range(4)]
        found = replica.view.now()
        for ticket in tickets:
            replica.admission.leave(ticket)
        return found.held, found.waiting

    assert asyncio.run(scene()) == (3 + 2, 3 + 2 + 1)


@pytest.mark.parametrize("has_been_ready", [False, True])
@pytest.mark.parametrize("state", State)
def test_only_a_ready_server_looks_as_if_it_had_room(state: State, *, has_been_ready: bool) -> None:
    """Routers see a full one in every other state; vLLM's own gauges, once it has been READY."""
    replica = Replica(View(state, has_been_ready=has_been_ready))
    is_closed = state not in SERVING
    assert seen_on(replica).is_saturated == is_closed
    shown = replica.view.shown()
    assert shown.waiting == (SATURATED_WAITING if is_closed and has_been_ready else 0)
    assert replica.view.now().waiting == 0


def test_no_router_sends_anything_through_a_death_and_a_recovery() -> None:
    """Polled as a picker does: nothing between the death and READY, and soon after that again."""

    async def until(picker: EndpointPicker, client: httpx.AsyncClient, *, sends: bool) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                picker.read((await client.get(PATH)).text)
                if picker.would_send() is sends:
                    return
                await asyncio.sleep(POLL_SECONDS)

    async def scene() -> None:
        replica, picker = Replica(), EndpointPicker()
        async with serving(replica.app) as client:
            await until(picker, client, sends=True)
            for state in (State.RECOVERING, State.PROBING):
                replica.supervisor.move(state, is_recovering=True)
                for _ in range(5):
                    assert picker.read((await client.get(PATH)).text).is_saturated
                    assert not picker.would_send()
                    await asyncio.sleep(POLL_SECONDS)
            replica.supervisor.move(State.READY)
            await until(picker, client, sends=True)

    asyncio.run(scene())


def test_a_picker_believes_no_old_numbers() -> None:
    """The reader of these tests is as strict as the router that it stands for."""
    clock = FakeClock()
    picker = EndpointPicker(clock)
    assert not picker.would_send()
    picker.read(answered(Replica()).text)
    assert picker.would_send()
    clock.now_seconds += STALE_SECONDS + 0.001
    assert not picker.would_send()


@pytest.mark.parametrize(
    ("report", "sends"),
    [
        (SchedulerReport(running=9, waiting=4, kv_usage=0.79), True),
        (SchedulerReport(waiting=5), False),
        (SchedulerReport(kv_usage=0.8), False),
    ],
)
def test_a_picker_sends_up_to_its_thresholds(report: SchedulerReport, *, sends: bool) -> None:
    """Of the queue and of the cache, whichever is the fuller."""
    assert seen_on(Replica(engine=Load(schedulers=(report,)))).is_saturated is not sends
