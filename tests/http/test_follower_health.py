"""What a follower answers in each of its states."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import get_args

import httpx
import pytest
from starlette.applications import Starlette

from asgi_server import serving
from holdfast import __version__
from holdfast.api.follower_health import follower_routes
from holdfast.nodes.follower import FollowerState
from holdfast.records import FollowerStatus
from sample_status import a_rank

STATES = get_args(FollowerState)
PATHS = ("/livez", "/readyz", "/health", "/ping")
SHORT = {"state", "reason", "node", "generation"}
RUNNING = FollowerStatus(
    node="spark-2",
    state="running",
    head="10.0.0.1:29600",
    is_connected=True,
    generation=7,
    ranks=(a_rank(rank=2), a_rank(rank=3)),
)


def answers(status: FollowerStatus, *paths: str, method: str = "GET") -> dict[str, httpx.Response]:
    async def ask() -> dict[str, httpx.Response]:
        async with serving(Starlette(routes=follower_routes(lambda: status))) as client:
            return {path: await client.request(method, path) for path in paths}

    return asyncio.run(ask())


def codes(status: FollowerStatus, method: str = "GET") -> dict[str, int]:
    """The status of each health route."""
    return {path: one.status_code for path, one in answers(status, *PATHS, method=method).items()}


def reason(status: FollowerStatus) -> str:
    return str(answers(status, "/readyz")["/readyz"].json()["reason"])


@pytest.mark.parametrize("state", STATES)
def test_only_a_follower_whose_ranks_run_is_ready(state: FollowerState) -> None:
    """It is alive until it leaves for good; body and header name the state."""
    is_running = state == "running"
    status = replace(RUNNING, state=state) if is_running else FollowerStatus("b", state, "h", True)
    ready = 200 if is_running else 503
    alive = 503 if state == "left" else 200
    assert codes(status) == {"/livez": alive} | dict.fromkeys(PATHS[1:], ready)
    for answer in answers(status, *PATHS).values():
        assert answer.headers["x-holdfast-state"] == answer.json()["state"] == state
        assert set(answer.json()) == SHORT
        assert answer.json()["reason"]


@pytest.mark.parametrize(
    "status",
    [
        replace(RUNNING, ranks=()),
        replace(RUNNING, ranks=(a_rank(), a_rank(rank=1, is_locked=False))),
        replace(RUNNING, ranks=(a_rank(fatal_error="it is lost"),)),
        replace(RUNNING, is_connected=False),
    ],
)
def test_ranks_that_do_not_serve_yet_are_not_ready(status: FollowerStatus) -> None:
    """Each of them must have locked its workspaces, and the head must be there."""
    assert codes(status)["/readyz"] == 503
    assert reason(status) == "starting generation 7"


def test_the_reason_says_what_is_missing() -> None:
    """With the last problem, if there is one."""
    assert reason(RUNNING) == "running generation 7"
    away = FollowerStatus("b", "away", "h:1", is_connected=False, problem="no answer")
    assert reason(away) == "not connected to the head: no answer"
    assert reason(replace(away, state="waiting", problem="")).startswith("waiting for the head")


def test_the_full_report_has_the_head_and_the_ranks() -> None:
    """The ranks are shown as the head shows them."""
    status = replace(RUNNING, problem="it was silent", facts={"vllm_version": "0.32.0"})
    found = answers(status, "/statusz")["/statusz"].json()
    assert (found["holdfast_version"], found["node"]) == (__version__, "spark-2")
    assert (found["head"], found["is_connected"]) == ("10.0.0.1:29600", True)
    assert (found["problem"], found["generation"]) == ("it was silent", 7)
    assert found["facts"] == {"vllm_version": "0.32.0"}
    assert found["memory_available_bytes"] > 0
    assert [rank["rank"] for rank in found["workspace"]] == [2, 3]
    assert [rank["rank"] for rank in found["memory"]] == [2, 3]


def test_the_error_of_a_rank_is_not_shown() -> None:
    """It may quote a request, and anyone may ask; that there is one is shown."""
    status = replace(RUNNING, ranks=(a_rank(fatal_error="ValueError: my secret"), a_rank(rank=1)))
    for answer in answers(status, *PATHS, "/statusz").values():
        assert "secret" not in answer.text
    lost, alive = answers(status, "/statusz")["/statusz"].json()["workspace"]
    assert (lost["fatal_error"], alive["fatal_error"]) == ("see the log of this node", None)


def test_ping_takes_a_post() -> None:
    """As SageMaker sends it; elsewhere a POST is a mistake, and HEAD is answered."""
    assert codes(RUNNING, "POST") == dict.fromkeys(PATHS[:-1], 405) | {"/ping": 200}
    assert set(codes(RUNNING, "HEAD").values()) == {200}


def test_there_is_no_other_route() -> None:
    """A client that takes a follower for the server is told so."""
    found = answers(RUNNING, "/v1/models", "/startupz", "/")
    assert {one.status_code for one in found.values()} == {404}
