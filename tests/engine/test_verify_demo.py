"""`holdfast verify` against the demo model: what is well passes, on every road."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.verify.baseline import read_baseline
from holdfast.verify.checks import oracle, roads, wire
from holdfast.verify.options import Options
from holdfast.verify.records import Status, at_most
from servers import Server
from verified import not_passed, results_at, verified_at

pytestmark = [
    pytest.mark.engine,
    pytest.mark.shares_engine("demo"),
    pytest.mark.timeout(600),
]

BEYOND_IT = {"self.needles": Status.SKIPPED, "self.restart": Status.SKIPPED}
"""The weights are random, and the server has no key of an operator."""
ASKS_FOR_PONG = "wire.provider_check"


def test_every_road_passes(demo: Server) -> None:
    """Nothing fails or is left open; in float32 on a CPU, noise is none.

    Nor does a check of the protocol that the profile of the test below does not have.
    """
    further = [check for check in wire.CHECKS if "quick" not in check.profiles]
    made = results_at(demo.url, [*further, *roads.CHECKS])
    reasons = {name: made[name].reason for name in not_passed(made)}
    assert not_passed(made) == BEYOND_IT, reasons
    (limits,) = {n.limit for n in made["self.full_batch"].numbers if n.unit == "nat"}
    assert limits == at_most(0, "A/A")


def test_what_a_user_records_is_met(demo: Server, tmp_path: Path) -> None:
    """The command makes every group of checks of its profile; the random weights know no answers.

    `test_recorder.py` has the command compare as well.
    """
    path = tmp_path / "demo.baseline"
    run = asyncio.run(verified_at(demo.url, tmp_path, f"--record={path}"))
    assert run.errors == ""
    others = [status for status in Status if status is not Status.PASSED]
    of_groups = {one for one in run.named(*others) if one.startswith(("wire.", "self.", "oracle."))}
    assert of_groups == {ASKS_FOR_PONG}
    assert ASKS_FOR_PONG in run.named(Status.WARNED)
    met = results_at(demo.url, oracle.comparing.CHECKS, Options(read_baseline(path)))
    assert len(met) == 4
    assert {name: met[name].reason for name in not_passed(met)} == {}
