"""What a peer says of itself, whatever it says."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from asgi_server import serving
from holdfast.api.follower_health import follower_routes
from holdfast.api.health import health_routes
from holdfast.configuration import given
from holdfast.doctor.asking import PeerAnswer
from holdfast.doctor.peer_status import MAX_CHARACTERS, clock_bounds_seconds, read_status
from holdfast.nodes.facts import node_facts
from holdfast.records import FollowerStatus
from holdfast.settings import Settings
from peer_records import FOLLOWER, HEAD, NOW_SECONDS, an_answer
from sample_status import a_status

LONG = 300


def test_a_follower_names_itself_and_why_it_has_not_joined() -> None:
    """Its head is the address that it connects to."""
    status = read_status({**FOLLOWER, "state": "away", "problem": "no answer"})
    assert status is not None
    assert (status.role, status.name, status.state) == ("follower", "spark2", "away")
    assert status.problem == "no answer"
    assert status.facts == {"holdfast_version": "0.1.0"}
    assert status.memory_available_bytes is None


def test_a_head_says_what_is_installed_and_which_nodes_are_missing() -> None:
    """What it does not know yet, or what is empty, is left out."""
    nodes = [
        {"name": "spark1", "is_joined": True, "ranks": [], "problem": ""},
        {"name": "spark2", "is_joined": False, "ranks": [], "problem": "it answered no heartbeat"},
    ]
    status = read_status({**HEAD, "nodes": nodes})
    assert status is not None
    assert (status.role, status.state) == ("head", "READY")
    assert status.problem == "spark2: it answered no heartbeat"
    assert status.facts == {
        "holdfast_version": "0.1.0",
        "vllm_version": "0.32.0",
        "plugins": "all",
    }


def test_a_head_says_its_plugins_driver_and_memory() -> None:
    """As far as it knows them."""
    configuration = {
        "versions": {"torch": "2.13.0"},
        "variables": {"VLLM_PLUGINS": "holdfast"},
        "driver": "580.95.05",
    }
    document = {**HEAD, "configuration": configuration, "memory_available_bytes": 5}
    status = read_status(document)
    assert status is not None
    assert status.facts == {
        "torch_version": "2.13.0",
        "plugins": "holdfast",
        "driver_version": "580.95.05",
    }
    assert status.memory_available_bytes == 5


@pytest.mark.parametrize(
    "document",
    [{}, {"state": "ok"}, {"state": 1, "engine": {}}, {"state": "", "head": "h"}, {"head": "h"}],
)
def test_another_server_is_not_taken_for_a_node(document: dict[str, Any]) -> None:
    """Whatever it answers."""
    assert read_status(document) is None


@pytest.mark.parametrize("value", [None, 3, -1.5, True, "text", [], {}, [[]], {"a": {}}, 10**30])
@pytest.mark.parametrize(
    "name", ["node", "head", "problem", "facts", "engine", "configuration", "nodes"]
)
def test_any_value_anywhere_can_be_read(name: str, value: Any) -> None:
    """A field of another type is as if it were not there."""
    for document in (FOLLOWER, HEAD):
        read_status({**document, name: value})
        nested = {"versions": value, "variables": value, "driver": value, "problem": value}
        read_status({**document, name: nested, "nodes": [value, nested], "facts": nested})


@pytest.mark.parametrize("value", [True, "5", 5.0, 0, -5, 10**400])
def test_a_size_that_cannot_be_one_is_not_a_size(value: Any) -> None:
    """It would be printed."""
    status = read_status({**FOLLOWER, "memory_available_bytes": value})
    assert status is not None
    assert status.memory_available_bytes is None


def test_what_a_peer_says_cannot_drive_the_terminal() -> None:
    """It is one line of printable characters, of limited length."""
    name = "\x1b]0;owned\x07\nspark\u202e" + "x" * LONG
    status = read_status({**FOLLOWER, "node": name})
    assert status is not None
    assert status.name.isprintable()
    assert len(status.name) <= MAX_CHARACTERS + len("...")


def test_the_clock_is_bounded_by_all_answers() -> None:
    """Each says the whole second, which may be a second old."""
    early, late = an_answer(ahead_seconds=-0.4), an_answer(ahead_seconds=0.4)
    assert clock_bounds_seconds([early]) == pytest.approx((-1.001, 1.0), abs=1e-5)
    assert clock_bounds_seconds([early, late]) == pytest.approx((-0.001, 1.0), abs=1e-5)
    assert clock_bounds_seconds([an_answer(ahead_seconds=60)]) == pytest.approx(
        (59.999, 62.0), abs=1e-5
    )


@pytest.mark.parametrize("date", ["", "soon", "Fri, 31 Feb 2027 08:00:00 GMT", "9" * LONG])
def test_an_answer_without_a_time_says_nothing_about_the_clock(date: str) -> None:
    """Beside one that has a time, it does not count."""
    timeless = replace(an_answer(), date=date)
    assert clock_bounds_seconds([timeless]) is None
    assert clock_bounds_seconds([timeless, an_answer()]) == clock_bounds_seconds([an_answer()])


def test_a_clock_that_jumps_is_not_known() -> None:
    """No time could be meant by both answers."""
    assert clock_bounds_seconds([an_answer(), an_answer(ahead_seconds=60)]) is None
    assert clock_bounds_seconds([]) is None


def test_the_width_covers_a_header_that_is_a_second_old() -> None:
    """As uvicorn writes it: a clock that is right is never called wrong."""
    stale = PeerAnswer(200, b"", an_answer().date, NOW_SECONDS + 1.9, NOW_SECONDS + 1.95)
    bounds = clock_bounds_seconds([stale])
    assert bounds is not None
    assert bounds[0] <= 0 <= bounds[1]


def test_what_a_follower_answers_is_understood() -> None:
    """The real one, with everything that can be compared."""
    facts = asdict(node_facts(""))
    status = FollowerStatus("b", "away", "h:29600", is_connected=False, problem="p", facts=facts)
    found = read_status(_statusz(follower_routes(lambda: status)))
    assert found is not None
    assert (found.role, found.name, found.state, found.problem) == ("follower", "b", "away", "p")
    assert found.facts == {name: facts[name] for name in facts if name != "model_digest"}
    assert found.memory_available_bytes is not None


def test_what_a_head_answers_is_understood() -> None:
    """The real one, with the versions that it has told since before its engine started."""
    configuration = given(Settings(), {"VLLM_PLUGINS": "holdfast"})
    routes = health_routes(a_status, queue=lambda: (0, 0), configuration=lambda: configuration)
    found = read_status(_statusz(routes))
    assert found is not None
    assert (found.role, found.state) == ("head", a_status().state)
    ours = asdict(node_facts(""))
    told = {"holdfast_version", "vllm_version", "torch_version"}
    assert found.facts == {"plugins": "holdfast"} | {name: ours[name] for name in told}


def _statusz(routes: list[Route]) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with serving(Starlette(routes=routes)) as client:
            return dict((await client.get("/statusz")).json())

    return asyncio.run(ask())
