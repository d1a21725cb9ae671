"""What the routes say in each state that a start goes through, on a real engine."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from holdfast import versions
from servers import Demo

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("demo")]


@pytest.mark.parametrize("state", ["STARTING", "PROBING"])
def test_only_liveness_is_green_before_ready(demo_start: Demo, state: str) -> None:
    """Before READY the process is alive, started and ready it is not, and all reports are there."""
    assert demo_start.sights[state].codes == {
        "/livez": 200,
        "/readyz": 503,
        "/health": 503,
        "/ping": 503,
        "/startupz": 503,
        "/statusz": 200,
        "/metrics": 200,
    }
    assert demo_start.sights[state].state_metric == 1


@pytest.mark.parametrize("state", ["STARTING", "PROBING"])
def test_inference_is_refused_before_ready(demo_start: Demo, state: str) -> None:
    """503, an OpenAI error body, Retry-After within bounds, and the state in a header."""
    refusal = demo_start.sights[state].refusal
    assert refusal.status_code == 503
    assert refusal.headers["x-holdfast-state"] == state
    assert refusal.headers["x-should-retry"] == "true"
    assert 1 <= int(refusal.headers["retry-after"]) <= 120
    error = refusal.json()["error"]
    assert error["code"] == 503
    assert error["type"] == "service_unavailable"
    assert state in error["message"]


def test_everything_is_green_in_ready(demo_start: Demo) -> None:
    """In READY all routes are 200 and requests are answered."""
    sight = demo_start.sights["READY"]
    assert set(sight.codes.values()) == {200}
    assert sight.refusal.status_code == 200
    assert demo_start.server.metric("state", state="STARTING") == 0


def test_the_status_says_what_serves_what(demo_start: Demo) -> None:
    """What was given, what it runs on, its limits, and the files of the model with their hashes."""
    server = demo_start.server
    server.until(lambda: server.status["configuration"]["files"], "the files of the model")
    told = server.status["configuration"]
    assert "--demo" in told["flags"]
    assert told["versions"]["vllm"] == versions.vllm_version()
    assert told["fingerprint"]
    assert len(told["devices"]) == 1
    assert told["driver"] == ""
    assert told["max_num_batched_tokens"] >= told["max_num_seqs"] > 0
    directory = Path(told["model"])
    hashes = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }
    assert {one["name"]: one["sha256"] for one in told["files"]} == hashes


def test_probe_leaves_no_trace_in_vllm_metrics(demo_start: Demo) -> None:
    """What the probe sent is not counted among the requests of users."""
    metrics = demo_start.sights["READY"].metrics
    finished = sum(
        value for (name, _), value in metrics.items() if name == "vllm:request_success_total"
    )
    steps = sum(
        value for (name, _), value in metrics.items() if name == "holdfast_engine_steps_total"
    )
    assert steps > 50
    # One that the probe gave up may end when users are let in already.
    assert finished <= 1


def test_only_what_users_ask_is_counted_as_http(demo_start: Demo) -> None:
    """From the first refusal on, and nothing of the probe's."""
    counted = [
        (labels["handler"], labels["status"])
        for labels in (
            dict(pairs)
            for name, pairs in demo_start.sights["READY"].metrics
            if name == "http_requests_total"
        )
    ]
    assert ("/v1/completions", "5xx") in counted
    assert {handler for handler, _ in counted} == {"/v1/completions"}
