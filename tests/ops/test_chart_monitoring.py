"""How the pods of the chart are watched, and how their number follows what is asked of them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from holdfast import cli
from holdfast.api.metrics import metrics_route
from holdfast.telemetry.metrics import BY_NAME
from ops.charts import (
    GROUPS,
    RULES,
    Answer,
    adapter_rule,
    container,
    of_kind,
)
from ops.queries import ROOT, metric_names

pytestmark = pytest.mark.tools


def test_the_monitor_scrapes_our_metrics(answer: Answer) -> None:
    """It asks the route that has them, under the job that rules and dashboards know."""
    (monitor,) = of_kind(answer, "monitored", "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == metrics_route(lambda: ()).path
    assert endpoint.get("scheme", "http") == "http"
    assert {"targetLabel": "job", "replacement": "holdfast"} in endpoint["relabelings"]
    assert monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"


def test_the_monitor_has_the_key_of_closed_metrics(answer: Answer) -> None:
    """Where `/metrics` asks for a key, Prometheus gets it from the Secret of the container."""
    (monitor,) = of_kind(answer, "closed metrics", "PodMonitor")
    (secret,) = of_kind(answer, "closed metrics", "Secret")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"] == {
        "credentials": {"name": secret["metadata"]["name"], "key": "api-key"}
    }
    settings = cli.parse_serve(
        container(answer, "closed metrics")["args"][1:], {}, needs_model=False
    )
    assert settings.keys.metrics_auth == "api-key"
    (open_monitor,) = of_kind(answer, "monitored", "PodMonitor")
    assert "authorization" not in open_monitor["spec"]["podMetricsEndpoints"][0]


def test_the_rules_are_those_of_the_tree(answer: Answer) -> None:
    """Every file of rules is one PrometheusRule, unchanged; no template of theirs is filled in."""
    contents = {path: yaml.safe_load(path.read_text()) for path in RULES.glob("*.yml")}
    files = [path for path, content in contents.items() if "groups" in content]
    rules = {one["metadata"]["name"]: one for one in of_kind(answer, "monitored", "PrometheusRule")}
    assert files
    assert {f"demo-holdfast-{path.stem}" for path in files} == set(rules)
    for path in files:
        rule = rules[f"demo-holdfast-{path.stem}"]
        assert rule["spec"] == contents[path]
        assert rule["metadata"]["labels"]["release"] == "kube-prometheus-stack"


def alerts(answer: Answer, case: str) -> dict[str, dict[str, Any]]:
    """Every alert of a case, by name."""
    return {
        rule["alert"]: rule
        for one in of_kind(answer, case, "PrometheusRule")
        for group in one["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }


def test_an_alert_links_to_a_runbook_that_can_be_read(answer: Answer) -> None:
    """At the address of the values; each page is one of the tree."""
    pages = {path.name for path in (ROOT / "deploy" / "runbooks").glob("*.md")}
    found = alerts(answer, "own alerts")
    assert found
    for alert in found.values():
        base, _, page = alert["annotations"]["runbook_url"].rpartition("/")
        assert base == "https://wiki.example/runbooks"
        assert page in pages


def test_an_alert_is_what_the_values_make_of_it(answer: Answer) -> None:
    """What they name is merged into the rule, and all else stays."""
    found, shipped = alerts(answer, "own alerts"), alerts(answer, "monitored")
    stalled = found.pop("HoldfastStalled")
    assert (stalled["for"], stalled["labels"]) == ("5m", {"severity": "ticket"})
    assert stalled["expr"] == shipped["HoldfastStalled"]["expr"]
    assert found["HoldfastRequestsLost"]["expr"] == shipped["HoldfastRequestsLost"]["expr"]


@pytest.mark.parametrize(
    ("case", "patience"), [("monitored", "30m"), ("own alerts", "7200s"), ("own patience", "45m")]
)
def test_a_start_that_may_be_long_is_no_alert(answer: Answer, case: str, patience: str) -> None:
    """A server that is not READY has the time of a start, unless the values say otherwise."""
    rule = alerts(answer, case)["HoldfastNotReady"]
    assert rule["for"] == patience
    said = "30 minutes" if patience == "30m" else patience
    assert rule["annotations"]["summary"] == f"A server has not been READY for {said}."


def test_the_dashboards_are_those_of_the_tree(answer: Answer) -> None:
    """Every generated dashboard is one ConfigMap that Grafana's sidecar finds, unchanged."""
    files = sorted((ROOT / "dashboards" / "generated").glob("*.json"))
    maps = {one["metadata"]["name"]: one for one in of_kind(answer, "monitored", "ConfigMap")}
    assert files
    assert {f"demo-holdfast-dashboard-{path.stem}" for path in files} == set(maps)
    for path in files:
        found = maps[f"demo-holdfast-dashboard-{path.stem}"]
        assert found["data"] == {f"holdfast-{path.name}": path.read_text()}
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert found["metadata"]["annotations"] == {"grafana_folder": "vLLM"}


def test_scaling_goes_by_requests_that_wait(answer: Answer) -> None:
    """By the metric that the rule in the docs serves to the autoscaler."""
    (scaler,) = of_kind(answer, "scaled", "HorizontalPodAutoscaler")
    (deployment,) = of_kind(answer, "scaled", "Deployment")
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    (metric,) = scaler["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    rule = adapter_rule()
    (series,) = metric_names(rule["seriesQuery"])
    assert rule.get("name", {"as": series}) == {"as": name}  # as the adapter names what has no name
    assert series.removeprefix("holdfast_") in BY_NAME
    query = rule["metricsQuery"].replace("<<.Series>>", series)
    query = query.replace("<<.LabelMatchers>>", 'pod="p"').replace("<<.GroupBy>>", "pod")
    assert metric_names(query) == [series, "holdfast_ready"]


@pytest.mark.parametrize(
    ("case", "kind", "replicas"),
    [
        ("scaled", "Deployment", 3),
        (GROUPS, "LeaderWorkerSet", 0),
        ("two replicas", "Deployment", 2),
    ],
)
def test_an_upgrade_keeps_the_replicas_of_the_autoscaler(
    answer: Answer, case: str, kind: str, replicas: int
) -> None:
    """Without a number in the manifest, the upgrade that turns it on would leave one replica."""
    upgrade = answer["upgrades"][case]
    assert upgrade["error"] == ""
    (only,) = (one for one in upgrade["documents"] if one["kind"] == kind)
    assert only["spec"]["replicas"] == replicas


@pytest.mark.parametrize(("case", "kind"), [("scaled", "Deployment"), (GROUPS, "LeaderWorkerSet")])
def test_the_autoscaler_begins_where_kubernetes_does(answer: Answer, case: str, kind: str) -> None:
    """With one replica: a new release has no other number."""
    (only,) = of_kind(answer, case, kind)
    assert "replicas" not in only["spec"]


@pytest.mark.parametrize(("case", "seconds"), [("scaled", 1800), ("scaled, fast start", 600)])
def test_no_replica_is_added_before_the_last_one_could_help(
    answer: Answer, case: str, seconds: int
) -> None:
    """One for each time of a start, within the half hour that Kubernetes allows."""
    (scaler,) = of_kind(answer, case, "HorizontalPodAutoscaler")
    (policy,) = scaler["spec"]["behavior"]["scaleUp"]["policies"]
    assert policy == {"type": "Pods", "value": 1, "periodSeconds": seconds}
