"""`holdfast plan` for a device says what it says on a machine that has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_paths.fake_machine import FakeMachines
from model_configs import DEEPSEEK_V4, written

pytestmark = pytest.mark.shares_engine("fake machines")

NAMED = ("h100", "h200", "gb10", "rtxpro6000")


def planned(model: str, device: str | None) -> dict[str, Any]:
    """The plan, for a device or for that of this machine."""
    from holdfast import cli
    from holdfast.planning import command

    report: dict[str, Any] = json.loads(
        command.plan(cli.parse_serve([model], {}), device).to_json()
    )
    return report


def planned_here(model: str) -> str:
    """The plan of a fake machine."""
    from holdfast import cli
    from holdfast.planning import command

    return command.plan(cli.parse_serve([model], {}), None).to_json()


@pytest.mark.parametrize("name", NAMED)
def test_a_named_device_is_planned_as_on_its_machine(
    machines: FakeMachines, tmp_path: Path, name: str
) -> None:
    """The sizes of a step, every term and what stays open: all but the name of the device."""
    model = written(tmp_path, DEEPSEEK_V4)
    here = json.loads(machines.ask(name, planned_here, model))
    assert here | {"device": name} == planned(model, name)
