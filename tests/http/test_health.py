from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import httpx
import pytest

from asgi_server import serving
from holdfast.api.health import health_routes, report
from holdfast.api.router import OwnRoutes
from holdfast.configuration_record import Configuration, ModelFile
from holdfast.lifecycle.states import HEALTHY, HOPELESS, SERVING, State
from holdfast.records import EngineReport, RankMemory, Status
from inner_app import InnerApp
from sample_status import REJECTION, a_fresh_status, a_rank, a_status

PATHS = ("/livez", "/readyz", "/health", "/ping", "/startupz", "/statusz")
OPEN_KEYS = {"state", "reason", "since", "eta_s", "progress", "probe"}
FULL_KEYS = OPEN_KEYS | {
    *("broken_key_files", "configuration", "engine", "start", "workspace", "memory", "nodes")
}


def _expected(path: str, status: Status) -> int:
    good = {
        "/livez": status.state not in HOPELESS,
        "/readyz": status.state in SERVING,
        "/health": status.state in HEALTHY,
        "/ping": status.state in HEALTHY,
        "/startupz": status.has_been_ready,
        "/statusz": True,
    }
    return 200 if good[path] else 503


def _front(status: Status) -> OwnRoutes:
    return OwnRoutes(health_routes(lambda: status, queue=lambda: (3, 4)), InnerApp())


def _answers(
    front: OwnRoutes, paths: Sequence[str], method: str = "GET", **request: Any
) -> dict[str, httpx.Response]:
    async def ask() -> dict[str, httpx.Response]:
        async with serving(front) as client:
            return {path: await client.request(method, path, **request) for path in paths}

    return asyncio.run(ask())


@pytest.mark.parametrize("has_been_ready", [False, True])
@pytest.mark.parametrize("state", State)
def test_every_route_answers_in_every_state(state: State, *, has_been_ready: bool) -> None:
    """Code, body and header follow from the state, with no engine and no application attached."""
    status = a_status(state, has_been_ready=has_been_ready)
    answers = _answers(_front(status), PATHS)
    assert {path: a.status_code for path, a in answers.items()} == {
        path: _expected(path, status) for path in PATHS
    }
    assert {a.headers["x-holdfast-state"] for a in answers.values()} == {state.value}
    assert {a.json()["state"] for a in answers.values()} == {state.value}


@pytest.mark.parametrize("state", [State.READY, State.FAILED])
def test_head_answers_as_get_without_a_body(state: State) -> None:
    """A HEAD request has the code and the headers of the GET."""
    status = a_status(state)
    got, headed = (_answers(_front(status), PATHS, method) for method in ("GET", "HEAD"))
    for path in PATHS:
        assert headed[path].status_code == got[path].status_code
        assert headed[path].headers["x-holdfast-state"] == state
        assert headed[path].content == b""


def test_other_methods_are_not_allowed() -> None:
    """A POST to a health route is a mistake, except to /ping, which SageMaker posts to."""
    codes = {p: a.status_code for p, a in _answers(_front(a_status()), PATHS, "POST").items()}
    assert codes == dict.fromkeys(PATHS, 405) | {"/ping": 200}


def test_the_routes_say_only_what_anyone_may_know() -> None:
    """All routes but /statusz leave out engine, workspace, memory and the steps of the probe."""
    answers = _answers(_front(a_status()), PATHS)
    assert set(answers["/statusz"].json()) == FULL_KEYS
    for path in PATHS[:-1]:
        assert set(answers[path].json()) == OPEN_KEYS
        assert set(answers[path].json()["probe"]) == {"passed", "limited", "proven_tokens"}


def _report(status: Status, *, is_full: bool = True) -> dict[str, Any]:
    return report(status, running=3, waiting=4, now_seconds=1002.5, is_full=is_full)


def test_the_report_says_where_the_server_stands() -> None:
    """State, reason, time and estimate are those of the status."""
    found = _report(a_status(State.RECOVERING, eta_seconds=12.0))
    assert found["state"] == "RECOVERING"
    assert found["reason"] == "because of RECOVERING"
    assert found["since"] == "2023-11-14T22:13:20.500+00:00"
    assert found["eta_s"] == 12.0


def test_what_the_engine_said_is_for_the_full_report() -> None:
    """A health check does not reveal the paths and pids of an exception."""
    status = a_status(State.RECOVERING, reason="the engine died: core_exit", detail="pid 7: /opt/x")
    assert _report(status, is_full=False)["reason"] == "the engine died: core_exit"
    assert _report(status)["reason"] == "the engine died: core_exit: pid 7: /opt/x"


def test_the_report_shows_progress() -> None:
    """Age of the newest step and both queues."""
    assert _report(a_status(), is_full=False)["progress"] == {
        "last_step_age_s": 2.5,
        "running": 3,
        "waiting": 4,
    }


def test_the_report_shows_what_the_start_spent_its_time_on() -> None:
    """Seconds of each phase of the last start, empty before the first one."""
    assert _report(a_fresh_status())["start"] == {"phases_s": {}}
    status = a_status(start_phases={"import": 8.1, "probe": 6.9})
    assert _report(status)["start"] == {"phases_s": {"import": 8.1, "probe": 6.9}}


def test_the_report_shows_the_life_of_the_engine() -> None:
    """Generation, restarts and how the last one ended."""
    engine = EngineReport(generation=3, restarts=2, starts=3, last_exit="stall")
    assert _report(a_status(engine=engine))["engine"] == {
        "generation": 3,
        "restarts": 2,
        "last_exit": "stall",
    }


def test_the_report_shows_each_step_of_the_probe() -> None:
    """What was proven, what was left out, and why."""
    probe = _report(a_status())["probe"]
    assert (probe["passed"], probe["limited"], probe["proven_tokens"]) == (True, True, 2048)
    assert [(step["name"], step["outcome"], step["reason"]) for step in probe["steps"]] == [
        ("first_token", "passed", ""),
        ("context_sweep", "passed", "journal"),
        ("widest_decode", "skipped", "log-probs are off"),
    ]


def test_the_report_shows_workspace_and_memory_by_rank() -> None:
    """Each rank has its slots, its last rejection and what was measured of its memory."""
    ranks = (a_rank(), a_rank(rank=1, last_rejection=REJECTION, memory={}))
    found = _report(a_status(ranks=ranks))
    assert [(w["rank"], len(w["slots"])) for w in found["workspace"]] == [(0, 2), (1, 2)]
    assert found["workspace"][1]["last_rejection"]["needed_bytes"] == REJECTION.needed_bytes
    others = {"steps": 3, "scheduled_tokens": 96, "fatal_error": None}
    shown = {one.name for one in fields(RankMemory)} - {"memory"} | set(others)
    assert set(found["workspace"][0]) == shown
    assert others.items() <= found["workspace"][0].items()
    assert found["memory"][0]["weights_bytes"] == 100 * 1024 * 1024
    assert found["memory"][1] == {"engine": 0, "rank": 1}


def test_the_report_says_what_serves_what() -> None:
    """All of it; health checks, which need no key, have nothing of it."""
    file = ModelFile("config.json", 2, "ab" * 32, "holdfast")
    served = Configuration(image="holdfast:1", flags=("--demo",), files=(file,))
    routes = health_routes(a_status, queue=lambda: (0, 0), configuration=lambda: served)
    answers = _answers(OwnRoutes(routes, InnerApp()), PATHS)
    told = answers["/statusz"].json()["configuration"]
    assert set(told) == {one.name for one in fields(Configuration)}
    assert (told["image"], told["flags"], told["versions"]) == ("holdfast:1", ["--demo"], {})
    assert told["files"] == [asdict(file)]


def test_the_report_of_the_first_second_is_whole() -> None:
    """Before anything is known every key is there, and null."""
    found = json.loads(json.dumps(_report(a_fresh_status())))
    assert set(found) == FULL_KEYS
    assert found["progress"]["last_step_age_s"] is None
    assert found["probe"] == {
        "passed": None,
        "limited": None,
        "proven_tokens": None,
        "steps": [],
    }
    assert (found["workspace"], found["memory"]) == ([], [])
