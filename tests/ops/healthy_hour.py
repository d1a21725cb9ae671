"""An hour in which nothing is wrong: a start of 20 minutes, the proof, and changing load.

The engine runs on two nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.labels import (
    DEATH_CAUSES,
    GROWTH_PHASES,
    LOSS_REASONS,
    MEMORY_ACTIONS,
    NODE_REFUSAL_REASONS,
    PROBE_STEPS,
    REJECTION_KINDS,
    TOOL_CALL_DEFECTS,
)
from holdfast.lifecycle.states import State

MINUTES = 60
STARTED = 9
"""The minute in which the engine is loaded and the probe begins."""
LEARNED = 11
"""The minute in which the probe has failed for want of a reservation, and the engine starts again
with it: what the first start of a model that nobody has declared does."""
STARTED_AGAIN = 18
READY = 20
"""The minute in which the gate opens."""
MIB = 1024 * 1024
_TARGET = 'job="holdfast",instance="a:8000"'
_FOLLOWER = 'job="holdfast-follower",instance="b:8001"'
_RANKS = 2
JOINED = 3
"""The minute in which the follower is there."""

Line = Mapping[str, str]
"""One series as promtool reads it: `series` and `values`."""


def _series(name: str, labels: str, values: Iterable[float | None], target: str = _TARGET) -> Line:
    text = " ".join("_" if value is None else f"{value:g}" for value in values)
    whole = ",".join(part for part in (target, labels) if part)
    return {"series": f"{name}{{{whole}}}", "values": text}


def _after(minute: int, values: Iterable[float]) -> list[float | None]:
    """Nothing before `minute`: what is not known has no series."""
    return [None if at < minute else value for at, value in enumerate(values)]


def _is_idle(minute: int) -> bool:
    return minute % 9 == 0


def _always(value: float) -> list[float]:
    return [value] * MINUTES


def _state_in(minute: int) -> State:
    if minute >= READY:
        return State.READY
    is_proving = STARTED <= minute < LEARNED or minute >= STARTED_AGAIN
    return State.PROBING if is_proving else State.STARTING


def _server() -> Iterable[Line]:
    yield _series("up", "", _always(1))
    yield _series("process_start_time_seconds", "", _always(1_700_000_000))
    yield _series("holdfast_build_info", 'version="1",vllm_version="2"', _always(1))
    for state in State:
        are_in = [float(_state_in(minute) == state) for minute in range(MINUTES)]
        yield _series("holdfast_state", f'state="{state}"', are_in)
    for cause in DEATH_CAUSES:
        yield _series("holdfast_engine_deaths_total", f'cause="{cause}"', _always(0))
    for reason in LOSS_REASONS:
        yield _series("holdfast_requests_lost_total", f'reason="{reason}"', _always(0))
    yield _series("holdfast_requests_replayed_total", "", _always(0))
    yield _series("holdfast_requests_continued_total", "", _always(0))
    yield _series("holdfast_requests_refused_total", 'reason="overloaded"', _always(0))
    calls = [20.0 * max(0, minute - READY) for minute in range(MINUTES)]
    yield _series("holdfast_tool_calls_total", "", calls)
    for defect in TOOL_CALL_DEFECTS:
        yield _series("holdfast_broken_tool_calls_total", f'reason="{defect}"', _always(0))
    yield _series("holdfast_log_stats", "", _always(1))
    for action in MEMORY_ACTIONS:
        yield _series("holdfast_host_memory_actions_total", f'action="{action}"', _always(0))
    for ring in ("api", "admin"):
        yield _series("holdfast_key_file_broken", f'ring="{ring}"', _always(0))
    in_flight = [float(minute % 9) if minute >= READY else 0.0 for minute in range(MINUTES)]
    yield _series("holdfast_requests_in_flight", "", in_flight)


def _proof() -> Iterable[Line]:
    for result, ended in (("passed", READY), ("failed", LEARNED)):
        runs = [float(minute >= ended) for minute in range(MINUTES)]
        yield _series("holdfast_probe_runs_total", f'result="{result}"', runs)
    for step in PROBE_STEPS:
        has_passed = [float(minute >= READY) for minute in range(MINUTES)]
        yield _series("holdfast_probe_passed", f'step="{step}"', _after(LEARNED, has_passed))
    yield _series("holdfast_baseline_configured", "", _always(1))
    for check in ("probe", "canary"):
        agreement = _after(READY, _always(1))
        yield _series("holdfast_baseline_agreement", f'check="{check}"', agreement)
    yield _series("holdfast_probe_limited", "", _after(READY, _always(0)))
    yield _series("holdfast_probe_proven_tokens", "", _after(READY, _always(8191)))


def _ranks() -> Iterable[Line]:
    ages = [240.0 if _is_idle(minute) else 0.01 for minute in range(MINUTES)]
    yield _series("holdfast_last_step_age_seconds", "", _after(STARTED, ages))
    for rank in range(_RANKS):
        labels = f'engine="0",rank="{rank}"'
        slot = f'{labels},ubatch="0",lane="0"'
        yield _series("holdfast_workspace_locked", labels, _after(STARTED, _always(1)))
        size = _after(STARTED, _always(22 * MIB))
        yield _series("holdfast_workspace_size_bytes", slot, size)
        water = [20.0 * MIB if minute >= READY else 0.0 for minute in range(MINUTES)]
        yield _series("holdfast_workspace_high_water_bytes", slot, _after(STARTED, water))
        for phase in GROWTH_PHASES:
            counts = [
                float(phase != "sealed" and minute >= LEARNED - 1) for minute in range(MINUTES)
            ]
            count = _after(STARTED, counts)
            yield _series("holdfast_workspace_growths_total", f'{labels},phase="{phase}"', count)
        unproven = [float(minute == LEARNED - 1) for minute in range(MINUTES)]
        name = "holdfast_workspace_unproven_growths"
        yield _series(name, labels, _after(STARTED, unproven))
        steps = [0.0 if minute < STARTED else 60.0 * minute for minute in range(MINUTES)]
        yield _series("holdfast_engine_steps_total", labels, _after(STARTED, steps))
        yield _series("holdfast_engine_nan_rows_total", labels, _after(STARTED, _always(0)))
        for kind in REJECTION_KINDS:
            name = "holdfast_workspace_growth_rejections_total"
            yield _series(name, f'{labels},kind="{kind}"', _after(STARTED, _always(0)))


def _nodes() -> Iterable[Line]:
    yield _series("holdfast_nodes_wanted", "", _always(2))
    for rank in range(_RANKS):
        node = f'node="spark-{rank + 1}"'
        joined = [float(not rank or minute >= JOINED) for minute in range(MINUTES)]
        yield _series("holdfast_node_joined", node, _after(JOINED if rank else 0, joined))
        labels = f'engine="0",rank="{rank}",{node}'
        yield _series("holdfast_rank_info", labels, _after(STARTED, _always(1)))
    for reason in NODE_REFUSAL_REASONS:
        refused = [float(minute) if reason == "not_needed" else 0.0 for minute in range(MINUTES)]
        name = "holdfast_node_connections_refused_total"
        yield _series(name, f'reason="{reason}"', refused)
    connected = [float(minute >= JOINED) for minute in range(MINUTES)]
    for name, values in {
        "up": _always(1),
        "process_start_time_seconds": _always(1_700_000_000),
        "holdfast_node_head_connected": connected,
    }.items():
        yield _series(name, "", values, _FOLLOWER)
    yield _series("holdfast_build_info", 'version="1",vllm_version="2"', _always(1), _FOLLOWER)


def _vllm() -> Iterable[Line]:
    labels = 'engine="0",model_name="m"'
    running = [0.0 if _is_idle(minute) else 8.0 for minute in range(MINUTES)]
    # A burst that waits for eight minutes of each nine, in the front end and a little in vLLM.
    held = [18.0 if minute % 9 > 1 else 0.0 for minute in range(MINUTES)]
    waiting = [2.0 if minute % 9 > 1 else 0.0 for minute in range(MINUTES)]
    yield _series("holdfast_requests_held", "", _always(0)[:STARTED] + held[STARTED:])
    all_waiting = [here + there for here, there in zip(held, waiting, strict=True)]
    yield _series("holdfast_requests_waiting", "", _always(0)[:STARTED] + all_waiting[STARTED:])
    yield _series("vllm:num_requests_running", labels, _after(STARTED, running))
    yield _series("vllm:num_requests_waiting", labels, _after(STARTED, all_waiting))
    done = [max(0.0, 100.0 * (minute - READY)) for minute in range(MINUTES)]
    success = f'{labels},finished_reason="stop"'
    yield _series("vllm:request_success_total", success, _after(STARTED, done))


def healthy_hour() -> list[Line]:
    """Every series, one value a minute."""
    return [*_server(), *_proof(), *_ranks(), *_nodes(), *_vllm()]


def back_test(rules: Iterable[str], series: list[Line], alerts: Iterable[str]) -> dict[str, Any]:
    """A unit test for promtool: none of the alerts fires in any minute."""
    checks = [
        {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": []}
        for minute in range(MINUTES)
        for alert in alerts
    ]
    test = {"interval": "1m", "input_series": series, "alert_rule_test": checks}
    return {"rule_files": list(rules), "evaluation_interval": "1m", "tests": [test]}
