"""A scrape that fails now and then starts no clock again: alerts do what they do without it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.prometheus import RULES, promtool, rules

ALERTS = rules("alerts.yml", "alert")
TOO_SHORT = {None, "1m"}
"""The patience of alerts that do not wait, or for less time than two scrapes may take."""
PATIENT = [
    name
    for name, rule in ALERTS.items()
    if rule.get("for") not in TOO_SHORT and name != "HoldfastTargetAbsent"
]
"""The alerts that wait, except the one that counts failed scrapes."""
_RUN = re.compile(r"(?P<first>-?[\d.]+)(?P<step>[+-][\d.]+)?x(?P<repeats>\d+)")


def samples(text: str) -> Iterator[str]:
    """Each value of a series in promtool's notation."""
    for word in text.split():
        if match := _RUN.fullmatch(word):
            for index in range(int(match["repeats"]) + 1):
                yield f"{float(match['first']) + index * float(match['step'] or 0):.15g}"
        elif word.startswith("_x"):
            yield from ["_"] * int(word.removeprefix("_x"))
        else:
            yield word


def with_missed_scrapes(line: dict[str, str]) -> dict[str, str]:
    """The same series if every third scrape fails, which ends each series except `up`."""
    missed = "0" if line["series"].startswith("up{") else "stale"
    values = [
        missed if at % 3 == 1 and value != "_" else value
        for at, value in enumerate(samples(line["values"]))
    ]
    return {**line, "values": " ".join(values)}


def unit_tests(alert: str) -> list[dict[str, Any]]:
    """Every test of an alert, as if every third scrape failed."""
    found = []
    for path in sorted((RULES / "tests").glob("*_test.yml")):
        for test in yaml.safe_load(path.read_text())["tests"]:
            if test["name"].startswith(f"{alert} "):
                series = [with_missed_scrapes(line) for line in test["input_series"]]
                found.append({**test, "input_series": series})
    return found


@pytest.mark.tools
@pytest.mark.parametrize("alert", PATIENT)
def test_an_alert_does_the_same_if_every_third_scrape_fails(alert: str, tmp_path: Path) -> None:
    """It fires and stays silent as its unit tests say."""
    path = tmp_path / "missed_test.yml"
    file = {
        "rule_files": [str(RULES / "alerts.yml")],
        "evaluation_interval": "1m",
        "fuzzy_compare": True,
        "tests": unit_tests(alert),
    }
    path.write_text(yaml.safe_dump(file, width=10_000))
    outcome = promtool("test", "rules", str(path))
    assert outcome.returncode == 0, outcome.stdout
