"""The changelog names what is new, so that an operator finds it there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHANGELOG = ROOT / "CHANGELOG.md"
REFERENCE = ROOT / "docs" / "reference.md"

NAME = re.compile(r"--[a-z][a-z-]*[a-z]|\bholdfast_\w+|\b[a-z]+-[<\w>-]+[.]jsonl?")
"""A flag, a metric, or a file with a part of its name that differs."""

FIRST_FLAGS = """
    --admin-api-key --admin-api-key-file --admit-unproven --api-key-file --body-timeout --demo
    --drain-timeout --engine-core-niceness --header-timeout --hold-timeout --json
    --keep-alive-timeout --learned-dir --learned-restart --log-format --max-body-size
    --max-connections --max-engine-restarts --max-header-size --max-headers --max-json-depth
    --max-requests-per-key --max-url-length --max-waiting --metrics-auth --probe
    --probe-max-tokens --probe-require-full --probe-timeout --request-log --request-timeout
    --restart-window --send-timeout --stall-timeout --workspace-growth
    --workspace-growth-limit --workspace-headroom --workspace-reserve
"""
FIRST_METRICS = """
    build_info engine_deaths_total engine_generation engine_restarts_left
    engine_scheduled_tokens_total engine_start_duration_seconds engine_starts_total
    engine_steps_total event_loop_lag_seconds lamport_workspace_bytes last_step_age_seconds
    memory_bytes probe_duration_seconds probe_limited probe_passed probe_proven_tokens
    probe_runs_total probe_tokens request_wait_seconds requests_held requests_in_flight
    requests_lost_total requests_refused_total requests_replayed_total state
    workspace_caller_bytes workspace_growth_rejections_total workspace_growths_total
    workspace_high_water_bytes workspace_last_rejection_bytes workspace_locked
    workspace_persistent_bytes workspace_reserved_bytes workspace_retired_bytes
    workspace_size_bytes
"""
FIRST_FILES = """
    native-<digest>.json native-last.json times-<digest>.json workspace-<fingerprint>.json
"""
FIRST = {
    *FIRST_FLAGS.split(),
    *(f"holdfast_{name}" for name in FIRST_METRICS.split()),
    *FIRST_FILES.split(),
}
"""What the first build had, which the changelog may leave out: only what changed since is news."""


def names_of_the_reference() -> set[str]:
    """The first columns of its tables, which other tests compare with the code."""
    cells = re.findall(r"^\| (.*?) \|", REFERENCE.read_text(), re.MULTILINE)
    return {name for cell in cells for name in NAME.findall(cell)}


def names_of_the_changelog() -> set[str]:
    return set(NAME.findall(CHANGELOG.read_text()))


def test_each_new_name_is_in_the_changelog() -> None:
    """An operator reads of every flag, metric and file that the first build did not have."""
    assert sorted(names_of_the_reference() - FIRST - names_of_the_changelog()) == []


def test_each_name_that_went_is_in_the_changelog() -> None:
    """What is removed or renamed breaks a command line or a dashboard, so it is named."""
    assert sorted(FIRST - names_of_the_reference() - names_of_the_changelog()) == []
