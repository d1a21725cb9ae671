"""What autoscalers count, by the queries that are shipped: promtool evaluates them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from holdfast.telemetry.metrics import BY_NAME
from ops.charts import ROUTERS, adapter_rule
from ops.prometheus import promtool

AWAY, READY = "holdfast-away", "holdfast-ready"
WAITING = {AWAY: 12, READY: 3}
SERIES = "holdfast_requests_waiting"


def of_adapter() -> str:
    """The query of the rule for prometheus-adapter, as the adapter fills it in for pods."""
    matchers = f'namespace="default",pod=~"{AWAY}|{READY}"'
    query = str(adapter_rule()["metricsQuery"]).replace("<<.Series>>", SERIES)
    return query.replace("<<.LabelMatchers>>", matchers).replace("<<.GroupBy>>", "pod")


def of_keda() -> str:
    """The query of KEDA's object."""
    (trigger,) = yaml.safe_load((ROUTERS / "keda" / "scaled-object.yaml").read_text())["spec"][
        "triggers"
    ]
    return str(trigger["metadata"]["query"])


def test_both_metrics_have_the_labels_of_their_target_alone() -> None:
    """So that PromQL multiplies those of the same server."""
    assert BY_NAME["requests_waiting"].labels == BY_NAME["ready"].labels == ()


@pytest.mark.tools
@pytest.mark.parametrize(
    ("query", "counted"),
    [(of_adapter(), {f'{{pod="{AWAY}"}}': 0, f'{{pod="{READY}"}}': 3}), (of_keda(), {"{}": 3})],
    ids=["prometheus-adapter", "KEDA"],
)
def test_what_a_server_holds_while_its_engine_is_replaced_does_not_count(
    tmp_path: Path, query: str, counted: dict[str, int]
) -> None:
    """Another replica for each engine that dies would come when that one serves again."""
    labels = 'job="holdfast",namespace="default",container="holdfast"'
    series = [
        {"series": f'{name}{{{labels},instance="{pod}:8000",pod="{pod}"}}', "values": str(value)}
        for pod, waiting in WAITING.items()
        for name, value in ((SERIES, waiting), ("holdfast_ready", int(pod == READY)))
    ]
    samples = [{"labels": labels_of, "value": value} for labels_of, value in counted.items()]
    asked = {"expr": query, "eval_time": "0s", "exp_samples": samples}
    test = {"interval": "1m", "input_series": series, "promql_expr_test": [asked]}
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"tests": [test]}))
    outcome = promtool("test", "rules", str(path))
    assert outcome.returncode == 0, outcome.stdout
