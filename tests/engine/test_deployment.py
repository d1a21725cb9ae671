"""What the chart and its rules ask of a server, asked of a real one."""

from __future__ import annotations

import re

import pytest
import yaml

from ops.prometheus import rules
from ops.queries import ROOT, metric_names
from servers import Server
from two_nodes import NODE_METRICS

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("demo")]

TEMPLATES = ROOT / "deploy" / "helm" / "holdfast" / "templates"
OF_PROMETHEUS = {"up"}
"""What Prometheus itself says of a target."""
OF_A_BASELINE = {"holdfast_baseline_agreement"}
"""What only a server with `--verify-baseline` says; `test_baseline.py` reads it from one.

Those of several nodes are read in `test_nodes.py`.
"""


def probed_paths() -> list[str]:
    """The path of every probe of a server in the chart; those of a follower are without TLS."""
    text = (TEMPLATES / "_pod.tpl").read_text()
    return re.findall(r"httpGet: \{path: (/\w+), port: http, scheme: \{\{", text)


def asked_names() -> set[str]:
    """Every metric that a rule names, and that no rule makes."""
    records = rules("recording-rules.yml", "record")
    both = [*rules("alerts.yml", "alert").values(), *records.values()]
    asked = {name for rule in both for name in metric_names(rule["expr"])}
    return asked - set(records) - OF_PROMETHEUS


def scaling_names() -> set[str]:
    """The metrics that the autoscaler of the chart goes by, through the rule in the docs."""
    page = (ROOT / "docs" / "deploying.md").read_text()
    (rule,) = yaml.safe_load(page.partition("```yaml\nrules:")[2].partition("```")[0])
    return set(re.findall(r"\b(?:holdfast_|vllm:)\w+", rule["seriesQuery"] + rule["metricsQuery"]))


def test_every_probe_of_the_chart_is_answered(demo: Server) -> None:
    """With 200, once the server is READY."""
    paths = probed_paths()
    assert len(paths) == 3
    assert {path: demo.get(path).status_code for path in paths} == dict.fromkeys(paths, 200)


def test_every_metric_of_rules_and_autoscaler_is_there(demo: Server) -> None:
    """On the page of a server that is READY, so that no alert and no replica waits in vain."""
    demo.completion("hello")
    found = {name for name, _ in demo.metrics()}
    wanted = asked_names() | scaling_names()
    assert len(wanted) > 10
    assert wanted - found == OF_A_BASELINE | NODE_METRICS
