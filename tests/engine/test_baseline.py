"""An engine agrees with its baseline to the last digit: at its start, after a death, and idle."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from faults import FAULTS, FaultyServer
from holdfast.demo.switches import DemoSwitches
from holdfast.engine.heartbeat import IDLE_SECONDS
from holdfast.verify.baseline import read_baseline
from recorded_baselines import FLAGS
from servers import READY_DEADLINE_SECONDS, Server, running
from untrained import untrained_demo

pytestmark = [
    pytest.mark.engine,
    pytest.mark.shares_engine("compared"),
    pytest.mark.timeout(900),
]


def assert_agrees(server: Server, check: str) -> None:
    """Equal, since the arithmetic of the CPU has no noise."""
    assert server.metric("baseline_agreement", check=check) == 1
    assert server.metric("baseline_worst_difference_nats", check=check) == 0


def test_an_engine_agrees_before_it_is_ready(compared: Server, baseline: Path) -> None:
    """With all that the command has recorded; the step is one of the probe's."""
    assert_agrees(compared, "probe")
    steps = {step["name"]: step for step in compared.status["probe"]["steps"]}
    assert steps["baseline"]["outcome"] == "passed"
    longest = max(len(one.tops) + 1 for one in read_baseline(baseline).sequences)
    assert steps["baseline"]["tokens"] == longest > 400


def test_the_next_engine_is_compared_too(compared: Server, tmp_path: Path) -> None:
    """What was recorded of one engine holds for the one that replaces it."""
    before, began_seconds = compared.metric("engine_generation"), time.monotonic()
    FAULTS["SIGKILL core"].strike(FaultyServer(compared, tmp_path))
    compared.until(lambda: compared.metric("engine_generation") > before, "the next generation")
    compared.until_ready()
    assert_agrees(compared, "probe")
    age_seconds = compared.metric("baseline_comparison_age_seconds", check="probe")
    assert age_seconds < time.monotonic() - began_seconds


def test_an_idle_engine_is_compared(compared: Server) -> None:
    """Its canary says what was recorded over HTTP."""
    compared.until(
        lambda: 'check="canary"' in compared.get("/metrics").text,
        "canary",
        deadline_seconds=IDLE_SECONDS + READY_DEADLINE_SECONDS,
    )
    assert_agrees(compared, "canary")


def test_a_damaged_model_does_not_become_ready(
    baseline: Path, models: Path, tmp_path: Path
) -> None:
    """It answers fluently, and passes every other step; `soak/` has the other damages."""
    switches = DemoSwitches(damage="scaled_weight", damage_start=100)
    model = untrained_demo(models, switches)
    with running(tmp_path, str(model), *FLAGS, f"--verify-baseline={baseline}") as server:
        assert server.wait() == 4
        assert "the probe failed in baseline: " in server.last_line
        assert "nats at position " in server.last_line
        assert "--against" in server.last_line
