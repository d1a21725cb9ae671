"""The rules that are shipped: promtool takes them, and every alert fires, and only when it must."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.api.health import report
from ops import queries
from ops.prometheus import (
    DEADLINE_SECONDS,
    RULES,
    Page,
    Webhook,
    alertmanager,
    now,
    page,
    prometheus,
    promtool,
    rules,
    tool,
    webhook,
)
from sample_status import a_status
from servers import wait_until

RUNBOOKS = queries.ROOT / "deploy" / "runbooks"
SECTIONS = ["Symptom", "Cause", "Check", "Remedy"]
UNIT_TESTS = sorted((RULES / "tests").glob("*_test.yml"))


ALERTS = rules("alerts.yml", "alert")
RECORDS = rules("recording-rules.yml", "record")
EXPRESSIONS = {name: rule["expr"] for name, rule in {**ALERTS, **RECORDS}.items()}

every_alert = pytest.mark.parametrize("name", ALERTS)
every_rule = pytest.mark.parametrize("name", EXPRESSIONS)


def unit_tests() -> Iterator[dict[str, Any]]:
    """Every test that promtool runs."""
    for path in UNIT_TESTS:
        yield from yaml.safe_load(path.read_text())["tests"]


def runbook(name: str) -> str:
    """The page of an alert."""
    return (RUNBOOKS / f"{name.lower()}.md").read_text()


def has(document: Any, path: list[str]) -> bool:
    """Whether a document has a field at a path, in the first entry of each list on the way."""
    if isinstance(document, list):
        return not path or has(document[0], path)
    return not path or (path[0] in document and has(document[path[0]], path[1:]))


@pytest.mark.tools
def test_promtool_accepts_the_rules() -> None:
    """Every file of rules passes with all lints."""
    files = (str(RULES / name) for name in ("alerts.yml", "recording-rules.yml"))
    outcome = promtool("check", "rules", "--lint=all", "--lint-fatal", *files)
    assert outcome.returncode == 0, outcome.stdout


@pytest.mark.tools
def test_promtool_accepts_the_configuration() -> None:
    """It loads with the rules that it names."""
    outcome = promtool("check", "config", "--lint=all", str(RULES / "prometheus.yml"))
    assert outcome.returncode == 0, outcome.stdout


@pytest.mark.tools
@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: str(path.stem))
def test_the_unit_tests_pass(path: Path) -> None:
    """Every alert fires and stays silent as the file says."""
    outcome = promtool("test", "rules", str(path))
    assert outcome.returncode == 0, outcome.stdout


@every_alert
@pytest.mark.parametrize("way", ["fires", "stays silent", "fires when the series is gone"])
def test_the_alert_has_a_unit_test(name: str, way: str) -> None:
    """One makes it fire, one keeps it silent, one takes its series away."""
    if name == "HoldfastTargetAbsent":
        way = way.replace("the series is gone", "there is no target at all")
    found = [test for test in unit_tests() if test["name"].startswith(f"{name} {way}")]
    assert found
    for test in found:
        (checked,) = test["alert_rule_test"]
        assert checked["alertname"] == name
        assert bool(checked["exp_alerts"]) == (way != "stays silent")


@every_rule
def test_the_expression_parses(name: str) -> None:
    """A parser of PromQL accepts it, types included."""
    assert queries.nodes(EXPRESSIONS[name])


@every_rule
def test_the_expression_names_metrics_and_labels_that_exist(name: str) -> None:
    """Each is in our table, in vLLM's source, or of every target."""
    of_every_target = {"up", "process_start_time_seconds"}
    names = set(queries.metric_names(EXPRESSIONS[name]))
    assert names <= queries.our_names() | queries.vllm_names() | of_every_target
    assert queries.unknown_labels(EXPRESSIONS[name]) == []


@every_rule
def test_the_expression_divides_by_nothing_but_what_is_there(name: str) -> None:
    """Each divisor is a comparison with `> 0` or a number."""
    assert queries.unguarded_divisions(EXPRESSIONS[name]) == []


@every_alert
def test_the_alert_keeps_the_conventions(name: str) -> None:
    """A common first word, a severity, a headline that is the same for all, and a description."""
    rule = ALERTS[name]
    assert re.fullmatch(r"Holdfast[A-Z][A-Za-z]+", name)
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert re.fullmatch(r"[A-Z][^{]+\.", rule["annotations"]["summary"])
    assert "$labels.instance" in rule["annotations"]["description"]


@every_alert
def test_the_alert_has_a_runbook(name: str) -> None:
    """It names symptom, cause, check and remedy, and the metrics that the alert watches."""
    text = runbook(name)
    url = ALERTS[name]["annotations"]["runbook_url"]
    assert url == f"deploy/runbooks/{name.lower()}.md"
    assert re.findall(r"^# (.+)$", text, re.MULTILINE) == [name]
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    assert any(metric in text for metric in queries.metric_names(ALERTS[name]["expr"]))


@every_alert
def test_the_runbook_names_what_status_has(name: str) -> None:
    """Each field that a line about `/statusz` names is in its answer."""
    document = report(a_status(), running=0, waiting=0, now_seconds=0.0, is_full=True)
    lines = [line for line in runbook(name).splitlines() if line.startswith("* `/statusz`")]
    fields = [field for line in lines for field in re.findall(r"`([a-z][a-z_.]+)`", line)]
    assert [field for field in fields if not has(document, field.split("."))] == []


def test_no_runbook_is_of_no_alert() -> None:
    """Every page but the list belongs to an alert."""
    pages = {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"}
    assert pages == {name.lower() for name in ALERTS}


@pytest.mark.parametrize("name", RECORDS)
def test_the_record_has_a_unit_test(name: str) -> None:
    """One expects a value of it."""
    checks = [check["expr"] for test in unit_tests() for check in test.get("promql_expr_test", ())]
    assert any(name in expression for expression in checks)


@pytest.mark.parametrize("name", RECORDS)
def test_the_record_keeps_the_conventions(name: str) -> None:
    """Its name is level:metric:operations."""
    assert re.fullmatch(r"[a-z_]+:(holdfast|vllm)_[a-z_]+:[a-z0-9_]+", name)


READY = 'holdfast_state{state="READY"}'
REJECTIONS = 'holdfast_workspace_growth_rejections_total{engine="0",rank="0",kind="scratch"}'
GROWTHS = 'holdfast_workspace_unproven_growths{engine="0",rank="0"}'
LOST = 'holdfast_requests_lost_total{reason="engine_lost"}'
DEATHS = 'holdfast_engine_deaths_total{cause="workspace_rejection"}'


@pytest.fixture
def well() -> Iterator[Page]:
    """A server that says what the alerts below watch, and that nothing happened."""
    with page({READY: 1, REJECTIONS: 0, GROWTHS: 0, LOST: 0, DEATHS: 0}) as target:
        yield target


@pytest.fixture
def hook() -> Iterator[Webhook]:
    """Where alerts arrive."""
    with webhook() as receiver:
        yield receiver


@pytest.mark.tools
def test_three_alerts_reach_a_webhook(well: Page, hook: Webhook, tmp_path: Path) -> None:
    """What a server counts goes through Prometheus and Alertmanager to the person on duty."""
    tool("prometheus")
    watched = {"HoldfastWorkspaceRejected", "HoldfastWorkspaceGrew", "HoldfastRequestsLost"}
    with (
        alertmanager(tmp_path / "alertmanager", hook) as manager_url,
        prometheus(tmp_path / "prometheus", [well.address], manager_url) as server,
    ):
        server.until_scraped(now())
        assert server.firing() & watched == set()
        well.samples = {READY: 1, REJECTIONS: 1, GROWTHS: 1, LOST: 3, DEATHS: 1}
        wait_until(
            lambda: watched <= set(hook.alerts()),
            deadline_seconds=DEADLINE_SECONDS,
            what=lambda: f"only {sorted(hook.alerts())} arrived",
        )
    rejected = hook.alerts()["HoldfastWorkspaceRejected"]
    assert rejected["labels"]["severity"] == "critical"
    assert well.address in rejected["annotations"]["description"]
    assert rejected["annotations"]["runbook_url"].endswith("holdfastworkspacerejected.md")
