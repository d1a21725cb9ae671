"""Dashboards and alerts against a real server: they show what happened, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import yaml

from ops import queries
from ops.prometheus import RULES, tool
from ops_tests.expected import PANELS, due_alerts
from ops_tests.life import (
    GROWN_BYTES,
    GROWTH_PROMPT,
    OUTPUT_TOKENS,
    PROMPT,
    SCRAPE_SECONDS,
    Life,
    Moment,
    a_life,
)
from ops_tests.seen import Seen, Values, looks

MOMENTS = (
    "starting",
    "ready",
    "loaded",
    "grown",
    "recovering",
    "recovered",
    "draining",
    "rejected",
)
ONLY_ON_A_GPU = {"holdfast_lamport_workspace_bytes"}
ALERTS: Mapping[str, str] = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}

CLOCKS = {"lifecycle/Time since the last step/A", "lifecycle/Event loop/A"}
"""What goes up and down by itself, within a second where something runs."""

every_moment = pytest.mark.parametrize("name", MOMENTS)
pytestmark = [pytest.mark.engine, pytest.mark.tools, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    """A life in which a workspace grows and the engine is killed."""
    tool("prometheus")
    with a_life(tmp_path_factory.mktemp("life"), ALERTS) as script:
        return script.live()


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Life:
    """A life in which a workspace may not grow."""
    tool("prometheus")
    with a_life(tmp_path_factory.mktemp("deny"), ALERTS, "--workspace-growth=deny") as script:
        return script.live_without_growth()


@pytest.fixture(scope="module")
def moments(life: Life, refused: Life) -> Mapping[str, Moment]:
    """What was seen in both."""
    return {**life.moments, **refused.moments}


def is_close(value: float, low: float, high: float, share: float, slack: float) -> bool:
    """Whether a value is between two others, or nearly; NaN is where both are."""
    if math.isnan(value):
        return math.isnan(low) and math.isnan(high)
    slack += share * max(abs(low), abs(high))
    return min(low, high) - slack <= value <= max(low, high) + slack


def difference(target: queries.Target, moment: Moment) -> str:
    """What a panel shows and should not; empty if it shows what it should."""
    shown = sorted(moment.panels[str(target)].values())
    wanted: list[Values] = [sorted(PANELS[str(target)](seen)) for seen in looks(moment)]
    # Prometheus draws a rate out to the ends of its window: at most a scrape at each.
    is_rate = "$__rate_interval" in target.expression
    share = 2.5 * SCRAPE_SECONDS / moment.window_seconds if is_rate else 0.0
    slack = 1.0 if str(target) in CLOCKS else 1e-9
    if all(len(values) == len(shown) for values in wanted) and all(
        is_close(value, low, high, share, slack)
        for value, low, high in zip(shown, *wanted, strict=True)
    ):
        return ""
    return f"{target}: {shown}, not {wanted}"


def last_page(moment: Moment) -> Seen:
    """What the server said in the end."""
    return looks(moment)[1]


def test_every_panel_has_its_expectation() -> None:
    """No query of a panel goes unchecked, and nothing is expected of no panel."""
    assert set(PANELS) == {str(target) for target in queries.targets()}


@every_moment
def test_every_panel_shows_what_the_server_said(moments: Mapping[str, Moment], name: str) -> None:
    """Each value is the one that the pages of the server at that moment lead to."""
    moment = moments[name]
    found = [difference(target, moment) for target in queries.targets()]
    assert [line for line in found if line] == []


@every_moment
def test_every_alert_is_due_when_it_must_be(moments: Mapping[str, Moment], name: str) -> None:
    """The condition of each alert holds when what it is for happened, and not otherwise."""
    moment = moments[name]
    holding = {alert for alert, series in moment.alerts.items() if series}
    assert holding == due_alerts(last_page(moment))


def test_every_metric_that_is_asked_for_exists(life: Life, refused: Life) -> None:
    """Prometheus saw each name of a panel or an alert, but for those that need a GPU."""
    panels = [queries.filled(target.expression, {}) for target in queries.targets()]
    asked = {name for text in (*panels, *ALERTS.values()) for name in queries.metric_names(text)}
    assert asked - life.names - refused.names == ONLY_ON_A_GPU


def test_the_pages_say_what_the_script_did(life: Life, moments: Mapping[str, Moment]) -> None:
    """The requests, their tokens and the growth are counted, and nothing else."""
    before, after = last_page(moments["ready"]), last_page(moments["grown"])
    done = life.requests + 1
    assert before.total("vllm:request_success_total") == [0]
    assert after.total("vllm:request_success_total") == [done]
    assert after.total("vllm:generation_tokens_total") == [done * OUTPUT_TOKENS]
    assert after.total("vllm:prompt_tokens_total") == [
        life.requests * len(PROMPT) + len(GROWTH_PROMPT)
    ]
    assert before.total("holdfast_workspace_growths_total", phase="locked") == [0]
    assert after.total("holdfast_workspace_growths_total", phase="locked") == [1]
    assert after.total("holdfast_workspace_high_water_bytes") == [GROWN_BYTES]


def test_the_pages_say_what_the_deaths_cost(life: Life, moments: Mapping[str, Moment]) -> None:
    """A kill costs a request that comes meanwhile only time, a rejection the one that met it."""
    killed, rejected = last_page(moments["recovered"]), last_page(moments["rejected"])
    assert killed.total("holdfast_engine_deaths_total") == [1]
    assert killed.total("holdfast_engine_generation") == [2]
    assert killed.total("vllm:request_success_total") == [life.requests + 2]
    assert rejected.total("holdfast_engine_deaths_total", cause="workspace_rejection") == [1]
    assert rejected.total("holdfast_workspace_growth_rejections_total", kind="scratch") == [1]
    assert rejected.total("holdfast_requests_replayed_total") == [1]
    for seen in (killed, rejected):
        assert seen.total("holdfast_requests_lost_total") == [0]
    assert life.exit_code == 0


def test_the_bounds_of_the_slos_are_bounds_of_buckets(moments: Mapping[str, Moment]) -> None:
    """Each choice of an SLO is a bucket that vLLM has, so that the share is exact."""
    histograms = {
        "ttft_slo": "vllm:time_to_first_token_seconds_bucket",
        "tpot_slo": "vllm:request_time_per_output_token_seconds_bucket",
    }
    variables = queries.dashboards()["serving"]["templating"]["list"]
    for name, histogram in histograms.items():
        (variable,) = (variable for variable in variables if variable["name"] == name)
        bounds = {dict(labels)["le"] for labels in last_page(moments["ready"]).of(histogram)}
        assert {option["value"] for option in variable["options"]} <= bounds
