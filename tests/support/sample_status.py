"""The one fake: records as a running server would fill them, with what a test wants to differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.lifecycle.states import State
from holdfast.records import (
    EngineReport,
    ProbeReport,
    ProbeStep,
    RankStats,
    Rejection,
    SlotStats,
    Status,
)

MIB = 1024 * 1024

REJECTION = Rejection(
    kind="scratch",
    caller="attention.py:1457:_forward_prefill",
    needed_bytes=22 * MIB,
    held_bytes=21 * MIB,
    reason="growth policy is deny",
)


def a_rank(**differences: Any) -> RankStats:
    """A locked rank of the first generation that has run three steps and refused nothing."""
    rank = RankStats(
        engine=0,
        rank=0,
        generation=1,
        pid=4242,
        slots=(
            SlotStats(0, 0, 24 * MIB, 22 * MIB, 20 * MIB, "attention.py:10:prefill"),
            SlotStats(1, 0, 8 * MIB, 8 * MIB, 0, ""),
        ),
        retired_bytes=2 * MIB,
        persistent_bytes=1 * MIB,
        lamport_bytes=0,
        is_locked=True,
        is_sealed=True,
        growths={"warmup": 2, "sealed": 1, "locked": 0},
        rejections={"scratch": 0, "persistent": 0, "permute": 0},
        last_rejection=None,
        callers={"attention.py:10:prefill": 20 * MIB},
        memory={"weights": 100 * MIB, "kv_cache": 64 * MIB},
        phases={"import": 1.0, "load": 2.0},
        steps=3,
        scheduled_tokens=96,
        running_step_started_seconds=None,
        last_step_ended_seconds=1000.0,
        recent_steps=(),
        fatal_error="",
    )
    return replace(rank, **differences)


def a_probe(**differences: Any) -> ProbeReport:
    """A passed probe with a limited sweep and a skipped step."""
    probe = ProbeReport(
        suite="worst-case",
        passed=True,
        limited=True,
        proven_tokens=2048,
        duration_seconds=4.0,
        steps=(
            ProbeStep("first_token", "passed", 0.5),
            ProbeStep("context_sweep", "passed", 2.5, 2048, limited=True, reason="journal"),
            ProbeStep("widest_decode", "skipped", 0.0, reason="log-probs are off"),
        ),
    )
    return replace(probe, **differences)


def a_status(state: State = State.READY, **differences: Any) -> Status:
    """A server in `state` whose first engine generation passed its probe."""
    status = Status(
        state=state,
        reason=f"because of {state}",
        since_unix_seconds=1_700_000_000.5,
        eta_seconds=None,
        has_been_ready=True,
        engine=EngineReport(generation=1, restarts=0, starts=1, last_start_seconds=25.5),
        probe=a_probe(),
        ranks=(a_rank(),),
        has_engine=True,
    )
    return replace(status, **differences)


def a_fresh_status(**differences: Any) -> Status:
    """A server in its first second: no engine, no rank, no probe."""
    fresh = a_status(
        State.STARTING,
        has_been_ready=False,
        engine=EngineReport(),
        probe=None,
        ranks=(),
        has_engine=False,
    )
    return replace(fresh, **differences)
