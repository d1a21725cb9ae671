"""A damage of the model's arithmetic is found by the step of the probe that is meant for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.demo.files import ensure_demo_model
from holdfast.demo.switches import Damage, DemoSwitches
from holdfast.verify.baseline import write_baseline
from recorded_baselines import FLAGS, recorded
from servers import running


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the sound model says."""
    directory = tmp_path_factory.mktemp("recorded")
    model = ensure_demo_model(directory, DemoSwitches(declares_need=False))
    with running(directory, str(model), *FLAGS) as server:
        server.until_ready()
        write_baseline(recorded(server), directory / "baseline.gz")
    return directory / "baseline.gz"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "damage", ["shifted_positions", "dropped_block", "swapped_rows", "quantized_head"]
)
def test_a_damaged_model_does_not_become_ready(
    damage: Damage, baseline: Path, tmp_path: Path
) -> None:
    """It passes every other step."""
    switches = DemoSwitches(declares_need=False, damage=damage, damage_start=100)
    model = ensure_demo_model(tmp_path, switches)
    with running(tmp_path, str(model), *FLAGS, f"--verify-baseline={baseline}") as server:
        assert server.wait() == 4
        assert "the probe failed in baseline: " in server.last_line
