"""Dashboards and alerts against a real server: they show what happened, and nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ops import queries
from ops.prometheus import DEADLINE_SECONDS, Webhook, alertmanager, rules, webhook
from ops_tests.expected import PANELS, RECORDS, due_alerts
from ops_tests.life import (
    GROWN_BYTES,
    GROWTH_PROMPT,
    OUTPUT_TOKENS,
    PROMPT,
    SCRAPE_SECONDS,
    Life,
    Moment,
    Rules,
    a_life,
)
from ops_tests.seen import Seen, Values, looks
from servers import wait_until

MOMENTS = (
    "starting",
    "ready",
    "loaded",
    "grown",
    "recovering",
    "recovered",
    "draining",
    "rejected",
    "killed too",
)
ONLY_ON_A_GPU = {"holdfast_lamport_workspace_bytes"}
ONLY_ON_SEVERAL_NODES = {
    "holdfast_node_connections_refused_total",
    "holdfast_node_head_connected",
    "holdfast_node_joined",
    "holdfast_nodes_wanted",
    "holdfast_rank_info",
}


def expressions(file: str, kind: str) -> dict[str, str]:
    """The expressions of the rules of a file by the name of their alert or record."""
    return {name: rule["expr"] for name, rule in rules(file, kind).items()}


ALERTS = expressions("alerts.yml", "alert")
ASKED = Rules(ALERTS, expressions("recording-rules.yml", "record"))
TRAVELLED = {"HoldfastWorkspaceGrew", "HoldfastWorkspaceRejected", "HoldfastRestartLoop"}

SERVER_WIDE = {"serving/Waiting/A with $engine", "serving/Waiting/A with $model"}
"""What waits in the front end belongs to no engine yet."""
INCREASE_SHARE = 0.1
"""Prometheus draws an increase out to the ends of its window, by half a scrape at each."""
CLOCKS = {
    "lifecycle/Time since the last step/A",
    "lifecycle/Event loop/A",
    "lifecycle/Pressure/A",
}
"""What goes up and down by itself, within a second where something runs; a share, by at most 1."""
SIZES = {"lifecycle/Host memory of the engine/A", "lifecycle/Memory of the host/A"}
"""What goes up and down by itself, by a share of it."""
SIZE_SHARE = 0.2

every_moment = pytest.mark.parametrize("name", MOMENTS)
pytestmark = [pytest.mark.engine, pytest.mark.tools, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def duty() -> Iterator[Webhook]:
    """Where the alerts of both lives arrive."""
    with webhook() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def manager(duty: Webhook, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The Alertmanager that sends them there; its URL."""
    with alertmanager(tmp_path_factory.mktemp("alertmanager"), duty) as url:
        yield url


@pytest.fixture(scope="module")
def life(manager: str, tmp_path_factory: pytest.TempPathFactory) -> Life:
    """A life in which a workspace grows and the engine is killed."""
    directory = tmp_path_factory.mktemp("life")
    with a_life(directory, ASKED, alertmanager_url=manager) as script:
        return script.live()


@pytest.fixture(scope="module")
def refused(manager: str, duty: Webhook, tmp_path_factory: pytest.TempPathFactory) -> Life:
    """A life in which a workspace may not grow, and the engine dies twice."""
    directory = tmp_path_factory.mktemp("deny")
    deny = "--workspace-growth=deny"
    with a_life(directory, ASKED, deny, alertmanager_url=manager) as script:
        lived = script.live_without_growth()
        wait_until(
            lambda: {"HoldfastWorkspaceRejected", "HoldfastRestartLoop"} <= set(duty.alerts()),
            deadline_seconds=DEADLINE_SECONDS,
            what=lambda: f"only {sorted(duty.alerts())} arrived",
        )
        return lived


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
    is_rate = "[$__" in target.expression
    share = 2.5 * SCRAPE_SECONDS / moment.window_seconds if is_rate else 0.0
    share = SIZE_SHARE if str(target) in SIZES else share
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
def test_every_panel_follows_the_choices(moments: Mapping[str, Moment], name: str) -> None:
    """Where a variable names nobody, no query that has it shows anything."""
    assert set(moments[name].unfollowed) <= SERVER_WIDE


@every_moment
def test_every_legend_is_filled(moments: Mapping[str, Moment], name: str) -> None:
    """Each series has the labels that the legend of its query names."""
    for dashboard, panel, target in legends():
        for labels in moments[name].panels[f"{dashboard}/{panel}/{target['refId']}"]:
            wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            has_one_number = target.get("instant") and target["legendFormat"] == "{{instance}}"
            assert has_one_number or wanted <= set(dict(labels)), f"{dashboard}/{panel}"


def legends() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Every query of every panel, with its legend."""
    for name, dashboard in queries.dashboards().items():
        for panel in queries.panels(dashboard):
            for target in panel["targets"]:
                yield name, panel["title"], target


@every_moment
def test_every_alert_is_due_when_it_must_be(moments: Mapping[str, Moment], name: str) -> None:
    """The condition of each alert holds when what it is for happened, with its number."""
    moment = moments[name]
    holding = {alert: sorted(series.values()) for alert, series in moment.alerts.items() if series}
    due = due_alerts(last_page(moment))
    assert set(holding) == set(due)
    for alert, values in holding.items():
        assert values == pytest.approx(sorted(due[alert]), rel=INCREASE_SHARE), alert


@every_moment
def test_every_alert_names_its_server(
    life: Life, refused: Life, moments: Mapping[str, Moment], name: str
) -> None:
    """The person who is called knows where to look."""
    address = (refused if name in refused.moments else life).address
    for series in moments[name].alerts.values():
        for labels in series:
            assert dict(labels).items() >= {"job": "holdfast", "instance": address}.items()


@every_moment
def test_every_record_is_what_the_server_said(moments: Mapping[str, Moment], name: str) -> None:
    """The rule comes to what the pages lead to, and that is what was recorded."""
    moment = moments[name]
    for record in ASKED.records:
        computed, recorded = moment.records[f"={record}"], moment.records[record]
        assert set(recorded) == set(computed), record
        wanted = [sorted(RECORDS[record](seen)) for seen in looks(moment) if record in RECORDS]
        for found in (computed, recorded) if wanted else ():
            for value, low, high in zip(sorted(found.values()), *wanted, strict=True):
                assert is_close(value, low, high, INCREASE_SHARE, 1e-9), record


def test_a_server_that_is_gone_is_seen(life: Life) -> None:
    """It has a band of its own, is not ready, and its alerts are due."""
    assert list(life.gone_panels["lifecycle/States/A"].values()) == [0]
    assert list(life.gone_panels["lifecycle/Ready/A"].values()) == [0]
    due = {alert for alert, series in life.gone_alerts.items() if series}
    assert due == {"HoldfastTargetAbsent", "HoldfastNotReady"}
    assert set(map(frozenset, life.servers_listed.values())) == {frozenset({life.address})}


def test_what_happened_is_marked(life: Life) -> None:
    """Each annotation marks something: a lock, a growth, a restart."""
    assert set(life.marks) == {"Engine restart", "Lock", "Growth"}
    assert min(life.marks.values()) >= 1, life.marks


def test_three_alerts_of_real_servers_reach_a_webhook(
    life: Life, refused: Life, duty: Webhook
) -> None:
    """What happened there went through Prometheus and Alertmanager to the person on duty."""
    arrived = duty.alerts()
    assert set(arrived) >= TRAVELLED
    for alert in TRAVELLED:
        address = life.address if alert == "HoldfastWorkspaceGrew" else refused.address
        assert arrived[alert]["labels"]["instance"] == address
        assert address in arrived[alert]["annotations"]["description"]
        assert arrived[alert]["annotations"]["runbook_url"].endswith(f"{alert.lower()}.md")


def test_every_metric_that_is_asked_for_exists(life: Life, refused: Life) -> None:
    """Prometheus saw each name of a panel or an alert, except those of a GPU and several nodes."""
    panels = [queries.filled(target.expression, {}) for target in queries.targets()]
    asked = {name for text in (*panels, *ALERTS.values()) for name in queries.metric_names(text)}
    assert asked - life.names - refused.names == ONLY_ON_A_GPU | ONLY_ON_SEVERAL_NODES


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
