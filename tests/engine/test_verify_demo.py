"""`holdfast verify` against the demo model: what is well passes, on every road."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.verify.checks import roads, wire
from holdfast.verify.records import Status, at_most
from servers import Server
from verified import not_passed, results_at, verified_at

pytestmark = [
    pytest.mark.engine,
    pytest.mark.shares_engine("demo"),
    pytest.mark.timeout(600),
]

BEYOND_IT = {
    "wire.provider_check": Status.WARNED,  # it asks for PONG
    "self.needles": Status.SKIPPED,
    "self.restart": Status.SKIPPED,
}
"""The weights are random, and the server has no key of an operator."""


def test_the_protocol_and_every_road_pass(demo: Server) -> None:
    """Nothing fails or is left open; in float32 on a CPU, noise is none."""
    made = results_at(demo.url, [*wire.CHECKS, *roads.CHECKS])
    reasons = {name: made[name].reason for name in not_passed(made)}
    assert not_passed(made) == BEYOND_IT, reasons
    (limits,) = {n.limit for n in made["self.full_batch"].numbers if n.unit == "nat"}
    assert limits == at_most(0, "A/A")


def test_a_user_records_and_compares(demo: Server, tmp_path: Path) -> None:
    """By the command, with every group of the profile; the random weights know no answers."""
    path = tmp_path / "demo.baseline"

    def failed(*arguments: str) -> set[str]:
        run = asyncio.run(verified_at(demo.url, tmp_path, *arguments))
        assert run.errors == ""
        groups = ("wire.", "self.", "oracle.")
        bad = run.named(Status.FAILED, Status.INCONCLUSIVE, Status.WARNED)
        return {name for name in bad if name.startswith(groups)} - BEYOND_IT.keys()

    assert failed(f"--record={path}") == set()
    assert failed(f"--against={path}") == set()
