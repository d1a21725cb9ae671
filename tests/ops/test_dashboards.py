"""The dashboards that are shipped: Grafana takes them, and every panel keeps the rules."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dashboards.__main__ import GENERATED, rendered
from dashboards.lifecycle import STATES
from holdfast.lifecycle.states import State
from ops import queries
from ops.prometheus import promtool
from ops.queries import Target

SCHEMA = Path("shared", "data", "schemas", "grafana-dashboard.jsonschema.json")
NAMES = ("lifecycle", "serving", "workspace")
VARIABLES = ["datasource", "job", "model", "instance", "engine", "rank"]
ANNOTATIONS = {"Engine restart", "Lock", "Growth"}
SLOS = {"ttft_slo": "2.5", "tpot_slo": "0.1"}

every_dashboard = pytest.mark.parametrize("name", NAMES)
every_target = pytest.mark.parametrize("target", queries.targets(), ids=str)
every_panel = pytest.mark.parametrize(
    "panel",
    [
        pytest.param(panel, id=f"{name}/{panel['title']}")
        for name, dashboard in queries.dashboards().items()
        for panel in queries.panels(dashboard)
    ],
)


@pytest.fixture(scope="module")
def schema() -> Any:
    """Grafana's own schema, which is data that stands beside this checkout."""
    path = queries.ROOT.parent / SCHEMA
    if not path.exists():
        pytest.skip(f"no {SCHEMA} beside this checkout")
    return json.loads(path.read_text())


def filled(expression: str) -> str:
    """A query as the parser takes it."""
    return queries.filled(expression, SLOS)


def test_the_files_are_what_the_generator_writes() -> None:
    """`python -m dashboards` would change nothing."""
    files = {path.name: path.read_text() for path in GENERATED.iterdir()}
    assert files == dict(rendered()), "run python -m dashboards"


def test_there_are_three() -> None:
    """One for each question: is memory as promised, is it up, is it fast."""
    assert tuple(queries.dashboards()) == NAMES


@every_dashboard
def test_grafanas_schema_accepts_it(name: str, schema: Any) -> None:
    """No unknown key, no wrong type."""
    errors = jsonschema.Draft7Validator(schema).iter_errors(queries.dashboards()[name])
    assert [f"{list(error.path)}: {error.message}" for error in errors] == []


@every_dashboard
def test_it_is_templated(name: str) -> None:
    """It has the same choices as the others, and each choice changes a panel of it."""
    dashboard = queries.dashboards()[name]
    listed = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert listed[: len(VARIABLES)] == VARIABLES
    shown = " ".join(target.expression for target in queries.targets() if target.dashboard == name)
    asked = " ".join(str(variable["query"]) for variable in dashboard["templating"]["list"])
    used = queries.variables(shown) | queries.variables(asked)
    assert set(listed) - {"datasource"} <= used


@every_dashboard
def test_the_instance_is_that_of_the_target(name: str) -> None:
    """A label whose name ends alike, as that of Kubernetes for a release, is another one."""
    variables = queries.dashboards()[name]["templating"]["list"]
    (regex,) = (one["regex"] for one in variables if one["name"] == "instance")
    for labels in (
        'instance="a:8000",job="holdfast"',
        'app_kubernetes_io_instance="release",instance="a:8000",job="holdfast"',
    ):
        found = re.search(regex.strip("/"), f"{{{labels}}} 1 1764438000000")
        assert found is not None
        assert found[1] == "a:8000"


@every_dashboard
def test_every_choice_offers_all_and_follows_the_time_range(name: str) -> None:
    """Each list of values offers all of them, many at a time, and follows the time range."""
    variables = queries.dashboards()[name]["templating"]["list"]
    choices = [variable for variable in variables if variable["type"] == "query"]
    assert choices
    for variable in choices:
        assert variable["multi"]
        assert variable["includeAll"]
        assert variable["refresh"] == 2
        assert variable["datasource"]["uid"] == "${datasource}"


@every_dashboard
def test_it_marks_restart_lock_and_growth(name: str) -> None:
    """Its annotations parse, and say which server they are of."""
    annotations = queries.dashboards()[name]["annotations"]["list"]
    assert {annotation["name"] for annotation in annotations} == ANNOTATIONS
    for annotation in annotations:
        of_every_target = {"process_start_time_seconds"}
        names = set(queries.metric_names(filled(annotation["expr"])))
        assert names <= queries.our_names() | of_every_target
        assert "{{instance}}" in annotation["textFormat"]


@pytest.mark.tools
def test_the_lock_of_each_generation_is_marked(tmp_path: Path) -> None:
    """Once, at the steps that Grafana asks for, also if the next engine was locked between two."""
    (lock,) = (
        annotation["expr"]
        for annotation in queries.dashboards()["workspace"]["annotations"]["list"]
        if annotation["name"] == "Lock"
    )
    of_server = 'job="holdfast", instance="a:8000"'
    locked = f'holdfast_workspace_locked{{{of_server}, engine="0", rank="0"}}'
    mark = [{"labels": locked, "value": 1}]
    test = {
        "interval": "15s",
        "input_series": [
            {"series": locked, "values": "1x8 stale 1x20 stale _x8 1x20"},
            {"series": f"holdfast_engine_generation{{{of_server}}}", "values": "1x8 2x20 3x40"},
        ],
        "promql_expr_test": [
            {
                "expr": filled(lock),
                "eval_time": f"{minute}m",
                "exp_samples": mark if minute in {0, 3, 10} else [],
            }
            for minute in range(14)
        ],
    }
    path = tmp_path / "lock_test.yml"
    path.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    outcome = promtool("test", "rules", str(path))
    assert outcome.returncode == 0, outcome.stdout


@every_dashboard
def test_it_is_found_and_not_edited_by_mistake(name: str) -> None:
    """It has the identity that links rely on, and is read-only."""
    dashboard = queries.dashboards()[name]
    assert dashboard["uid"] == f"holdfast-{name}"
    assert dashboard["tags"] == ["holdfast"]
    assert dashboard["editable"] is False
    titles = [panel["title"] for panel in queries.panels(dashboard)]
    assert len(set(titles)) == len(titles)


@every_panel
def test_the_panel_explains_itself(panel: dict[str, Any]) -> None:
    """It has a title, and a description that ends with the metrics that are shown."""
    names = [
        name for target in panel["targets"] for name in queries.metric_names(filled(target["expr"]))
    ]
    listed = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
    assert panel["title"]
    assert panel["description"].endswith(f". Metrics: {listed}")


@every_panel
def test_the_panel_has_unit_and_thresholds(panel: dict[str, Any]) -> None:
    """Its numbers have a unit, and colours from a least value on."""
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"]
    first, *others = defaults["thresholds"]["steps"]
    assert first["value"] is None
    assert all(step["value"] is not None for step in others)


@every_panel
def test_the_panel_asks_the_chosen_data_source(panel: dict[str, Any]) -> None:
    """Panel and queries name the variable, no data source of one Grafana."""
    sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    assert {source["uid"] for source in sources} == {"${datasource}"}


@every_target
def test_the_query_parses(target: Target) -> None:
    """A parser of PromQL accepts it, types included."""
    assert queries.nodes(filled(target.expression))


@every_target
def test_the_query_names_metrics_that_exist(target: Target) -> None:
    """Each is in our table, or in vLLM's source."""
    names = set(queries.metric_names(filled(target.expression)))
    assert names
    assert names <= queries.our_names() | queries.vllm_names() | {"up"}


@every_target
def test_the_query_selects_by_labels_that_there_are(target: Target) -> None:
    """Each metric of ours is narrowed by labels of the table, or of the target."""
    assert queries.unknown_labels(filled(target.expression)) == []


@every_target
def test_the_query_follows_the_choices(target: Target) -> None:
    """Every selector is narrowed by job and instance."""
    selectors = list(queries.selectors(filled(target.expression)))
    assert selectors
    for selector in selectors:
        assert {"job", "instance"} <= {matcher.name for matcher in selector.matchers.matchers}


@every_target
def test_the_query_divides_by_nothing_but_what_is_there(target: Target) -> None:
    """Each divisor is a comparison with `> 0` or a number, so there is no NaN to show."""
    assert queries.unguarded_divisions(filled(target.expression)) == []


@every_target
def test_the_query_takes_its_range_from_the_graph(target: Target) -> None:
    """A range is `$__rate_interval`, which covers two scrapes at any zoom, or all that is shown."""
    ranges = re.findall(r"\[[^\]]*\]", target.expression)
    assert set(ranges) <= {"[$__rate_interval]", "[$__range]"}


def test_the_states_on_the_timeline_are_those_of_the_server() -> None:
    """Each state of the table has a number and a colour, and 0 is a server that says none."""
    assert [STATES[number][0] for number in sorted(STATES)][1:] == [state.value for state in State]


@pytest.mark.parametrize(
    ("expression", "count"),
    [("a / b", 1), ("a / (b > 0)", 0), ("a / 2", 0), ("a / (b > 1) / (c > 0)", 1), ("a / 0", 1)],
)
def test_an_unguarded_division_is_found(expression: str, count: int) -> None:
    """The check above finds what it is for."""
    assert len(queries.unguarded_divisions(expression)) == count
