"""A client with several keys does everything hostile that is known, beside eight honest ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from faults import BIND
from hostile_report import Bounds
from hostile_run import HostileRun, run_hostile

MINUTES = float(os.environ.get("SOAK_ADVERSARY_MINUTES", "30"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
CHOSEN = tuple(name for name in os.environ.get("SOAK_ADVERSARY_NAMES", "").split(",") if name)
"""The attacks to draw from; empty for all of them."""
REPORT_FILE = os.environ.get("SOAK_REPORT", "")
"""A file to append the table to."""
BOUNDS = Bounds(
    times_as_late=10,
    livez_seconds=1,
    times_the_memory=1.5,
    starts_per_outage=4,
    starts_in_all=20,
)
"""A death and its trials take three engines. They start beside an adversary, but import nothing and
prove less than the first. Each of four killers may take them, and one kill comes from outside."""
LEAST_MINUTES = 30
"""A shorter run may end before its last killer is sent."""
RANKS = {"TP=1": ((), {}), "TP=2": (("--tensor-parallel-size=2",), BIND)}
OUTSIDE = ("SIGSTOP EngineCore", "SIGKILL Worker", "SIGSTOP Worker")
"""One of them kills the engine: the default restart budget allows three within half an hour."""


@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_hostile_client_costs_the_others_nothing(ranks: str, tmp_path: Path) -> None:
    """Honest answers are whole, right and in time, `/livez` and memory hold, nothing is left."""
    flags, environment = RANKS[ranks]
    run = HostileRun(
        seed=SEED,
        seconds=MINUTES * 60,
        alone_seconds=min(60, MINUTES * 12),
        outside_faults=OUTSIDE if not CHOSEN else (),
        names=CHOSEN,
        meets_killers=MINUTES >= LEAST_MINUTES and not CHOSEN,
    )
    report = run_hostile(tmp_path, run, *flags, environment=environment)
    table = f"{ranks}, seed {SEED}, {MINUTES:.0f} minutes\n{report.table()}\n"
    broken = list(report.broken_promises(BOUNDS))
    print(f"\n{table}", *broken, sep="\n")
    if REPORT_FILE:
        with Path(REPORT_FILE).open("a", encoding="utf-8") as file:
            file.write("\n".join([table, *broken, ""]))
    assert not broken
