"""The Helm chart, rendered by real Helm: valid, complete, and strict about its values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from holdfast import __version__
from ops import crds
from ops.charts import (
    BUILT_IN,
    CASES,
    CHART,
    CUSTOM,
    DIGEST,
    GROUPS,
    MANAGED,
    REFUSED,
    RELEASES,
    RULES,
    SEVERAL_NODES,
    Answer,
    commands,
    container,
    documents,
    every_case,
    of_kind,
    pod,
)
from ops.queries import ROOT

pytestmark = pytest.mark.tools


def test_helm_has_no_complaint(answer: Answer) -> None:
    """`helm lint --strict` finds nothing."""
    assert answer["lint"]["messages"] == []
    assert answer["lint"]["errors"] == []


def test_a_package_has_the_rules_and_dashboards(answer: Answer) -> None:
    """What the tree has as links, a package has as files, so that it installs from anywhere."""
    packaged = set(answer["packaged"])
    rules = {f"prometheus/{path.name}" for path in RULES.glob("*.yml")}
    boards = {
        f"dashboards/{path.name}" for path in (ROOT / "dashboards" / "generated").glob("*.json")
    }
    assert rules | boards <= packaged
    assert not any("test" in name for name in packaged)


@every_case
def test_every_built_in_kind_is_valid(answer: Answer, case: str) -> None:
    """No unknown field and no wrong type, by the schemas of the oldest and newest Kubernetes."""
    assert answer["cases"][case]["problems"] == []
    kinds = {one["apiVersion"] for one in documents(answer, case)}
    assert kinds <= BUILT_IN | CUSTOM


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("form", ["releases", "groups"])
def test_every_name_of_a_release_will_do(answer: Answer, form: str, release: str) -> None:
    """What YAML reads as something else, what a Service may not be called, and what is long."""
    found = answer[form][release]
    assert (found["error"], found["problems"]) == ("", [])
    for one in found["documents"]:
        assert re.fullmatch("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", one["metadata"]["name"])
        assert one["metadata"]["labels"]["app.kubernetes.io/instance"] == release


def test_every_custom_kind_is_valid(answer: Answer) -> None:
    """The same for monitors, rules and groups of pods, by the definitions of their operators."""
    monitored = ("monitored", "closed metrics", "TLS", "verified TLS", "own alerts")
    cases = (*monitored, SEVERAL_NODES, GROUPS)
    custom = [
        one for case in cases for kind in crds.OF_THE_CHART for one in of_kind(answer, case, kind)
    ]
    assert {one["kind"] for one in custom} == set(crds.OF_THE_CHART)
    assert [problem for one in custom for problem in crds.problems(one)] == []
    custom[0]["spec"]["scrapeinterval"] = "15s"
    assert len(crds.problems(custom[0])) == 1


def test_it_may_be_a_dependency(answer: Answer) -> None:
    """Of a chart with global values, and with a condition; what is rendered is the same."""
    found = answer["dependency"]
    assert found["error"] == ""
    assert found["documents"] == documents(answer, next(iter(CASES)))


@pytest.mark.parametrize("reason", REFUSED)
def test_wrong_values_are_refused(answer: Answer, reason: str) -> None:
    """By the schema of the values or by the chart, with the reason."""
    assert reason in answer["cases"][reason]["error"].replace("'/", "/")


@pytest.mark.parametrize("name", MANAGED)
def test_what_the_chart_sets_is_not_set_past_it(answer: Answer, name: str) -> None:
    """Else probes, Service and grace period would not know; the message has the value to use."""
    error = answer["cases"][name]["error"]
    assert "is set by the chart: use " in error
    assert MANAGED[name] in error


@pytest.mark.parametrize("command", commands())
def test_every_command_in_the_docs_installs(answer: Answer, command: str) -> None:
    """What a reader copies is rendered, with an image that is pulled from where it was pushed."""
    assert container(answer, command)["image"].startswith("registry.example/holdfast:")


@pytest.mark.parametrize(
    ("case", "image"),
    [
        ("one model", f"registry.example/holdfast:{__version__}"),
        ("digest", f"registry.example/holdfast:cuda@{DIGEST}"),
    ],
)
def test_the_image_is_the_one_that_was_named(answer: Answer, case: str, image: str) -> None:
    """By its tag, that of the version if there is none, and by its digest if there is one."""
    assert container(answer, case)["image"] == image


def test_every_value_is_in_the_schema() -> None:
    """What can be set has a type, and what is not a value cannot be set."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    of_helm = {name: schema["properties"].pop(name) for name in ("global", "enabled")}
    assert {part["type"] for part in of_helm.values()} == {"object", "boolean"}

    def compare(part: dict[str, Any], values: dict[str, Any], path: str) -> Iterator[str]:
        properties = part.get("properties")
        if properties is None:
            return
        if set(properties) != set(values) or part.get("additionalProperties") is not False:
            yield path
        for name in set(properties) & set(values):
            if isinstance(values[name], dict):
                yield from compare(properties[name], values[name], f"{path}.{name}")

    assert list(compare(schema, yaml.safe_load((CHART / "values.yaml").read_text()), "")) == []


def test_the_oldest_kubernetes_is_one_that_is_checked(answer: Answer) -> None:
    """What the chart asks for is what its manifests are held against."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={answer['versions'][0]}.0-0"


def test_the_version_is_ours() -> None:
    """Chart and image carry the version of the package."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


@every_case
def test_the_notes_give_the_time_to_stop(answer: Answer, case: str) -> None:
    """They name the same grace period as the pod."""
    grace_seconds = pod(answer, case)["terminationGracePeriodSeconds"]
    assert f"takes up to {grace_seconds} s" in answer["cases"][case]["notes"]
