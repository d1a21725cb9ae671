"""The back-test: an hour in which nothing is wrong pages nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ops import queries
from ops.healthy_hour import Line, back_test, healthy_hour
from ops.prometheus import RULES, promtool, rules

pytestmark = pytest.mark.tools

PATH = RULES / "alerts.yml"
RULES_OF = rules("alerts.yml", "alert")


def outcome(series: list[Line], directory: Path) -> tuple[int, str]:
    """What promtool says of an hour, with every alert expected to be silent."""
    path = directory / "hour_test.yml"
    test: dict[str, Any] = back_test([str(PATH)], series, RULES_OF)
    path.write_text(yaml.safe_dump(test))
    ran = promtool("test", "rules", str(path))
    return ran.returncode, ran.stdout


def test_no_alert_fires_in_a_healthy_hour(tmp_path: Path) -> None:
    """A start of 20 minutes, the proof, idle minutes and bursts: silence."""
    code, said = outcome(healthy_hour(), tmp_path)
    assert code == 0, said


def test_the_hour_has_every_series_that_an_alert_watches() -> None:
    """No alert is silent because the hour lacks what it asks for."""
    there = {line["series"].partition("{")[0] for line in healthy_hour()}
    asked = {name for rule in RULES_OF.values() for name in queries.metric_names(rule["expr"])}
    assert asked <= there


@pytest.mark.parametrize(
    ("series", "was", "becomes", "alert"),
    [
        ('kind="scratch"', "0 0", "0 1", "HoldfastWorkspaceRejected"),
        ("holdfast_workspace_locked", "1 1 1", "1 0 0", "HoldfastWorkspaceNotLocked"),
        ("holdfast_probe_limited", "0", "1", "HoldfastProofIncomplete"),
        ("holdfast_probe_proven_tokens", "8191", "_", "HoldfastProofIncomplete"),
        ('result="passed"', "0", "0", ""),
    ],
)
def test_one_change_of_the_hour_is_noticed(
    series: str, was: str, becomes: str, alert: str, tmp_path: Path
) -> None:
    """The same hour with one fault in it is not silent, so the silence above means something."""
    changed: list[Line] = [
        {**line, "values": line["values"].replace(was, becomes)}
        if series in line["series"]
        else line
        for line in healthy_hour()
    ]
    code, said = outcome(changed, tmp_path)
    assert (code != 0) == bool(alert), said
    assert not alert or f"alertname: {alert}" in said
