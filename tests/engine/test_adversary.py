"""One hostile client beside eight honest ones, for a minute; `make soak` has half an hour of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostile_report import Bounds
from hostile_run import HostileRun, run_hostile
from servers import COMPILED

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BOUNDS = Bounds(
    times_as_late=100,
    livez_seconds=15,
    times_the_memory=1.5,
    starts_per_outage=20,
    starts_in_all=40,
    standstill_seconds=60,
)
"""Times are deadlines here, where other engines take the same cores; the soak has the promise."""
AS_USERS_DO = {**COMPILED, "VLLM_CPU_OMP_THREADS_BIND": "auto"}
HOSTILE_RUN = HostileRun(
    seed=1,
    seconds=60,
    alone_seconds=5,
    attack_seconds=5,
    outside_faults=("SIGSTOP EngineCore",),
)


def test_a_hostile_client_costs_the_others_nothing(tmp_path: Path) -> None:
    """Every honest answer is whole and right, the server lives, and nothing is left behind."""
    report = run_hostile(tmp_path, HOSTILE_RUN, environment=AS_USERS_DO)
    print(report.table())  # noqa: T201 - for debugging a failure
    assert not list(report.broken_promises(BOUNDS))
