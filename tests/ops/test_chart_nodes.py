"""What the chart renders for an engine over several nodes: groups of a head and its followers."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest

from holdfast import cli
from holdfast.api.follower_health import follower_routes
from holdfast.follow import LEAVE_SECONDS
from holdfast.nodes.command_line import FollowSettings, read_follow
from holdfast.processes.tree import KILL_DEADLINE_SECONDS
from holdfast.records import FollowerStatus
from holdfast.settings import Settings
from holdfast.telemetry.metrics import FOLLOWER_METRICS, RANK_METRICS
from ops import crds
from ops.charts import (
    CASES,
    GROUPS,
    POD_ADDRESS,
    RELEASES,
    Answer,
    Documents,
    arguments,
    documents,
    every_case,
    every_group,
    nodes,
    of_kind,
    templates,
)

LEADER_ADDRESS = "$(LWS_LEADER_ADDRESS)"
"""LeaderWorkerSet gives the variable to every container of a group."""

pytestmark = pytest.mark.tools


def group(answer: Answer, case: str) -> dict[str, Any]:
    """The specification of the LeaderWorkerSet."""
    (found,) = of_kind(answer, case, "LeaderWorkerSet")
    return dict(found["spec"])


def pair(answer: Answer, case: str) -> Documents:
    """The containers of head and follower."""
    return [template["spec"]["containers"][0] for template in templates(answer, case)]


def served(only: dict[str, Any]) -> Settings:
    """What the arguments of a head say."""
    command, *given = arguments(only)
    assert command == "serve"
    return cli.parse_serve(given, {}, needs_model=False)


def followed(only: dict[str, Any]) -> FollowSettings:
    """What the arguments of a follower say, once the address of its head is known."""
    command, head, *given = arguments(only)
    assert (command, head) == ("follow", LEADER_ADDRESS)
    return read_follow(["demo-0.demo.inference", *given], {})


@every_case
def test_one_node_needs_no_operator(answer: Answer, case: str) -> None:
    """There is a Deployment or a LeaderWorkerSet, and the latter only for several nodes."""
    kinds = {one["kind"] for one in documents(answer, case)}
    expected = {"Deployment"} if nodes(case) == 1 else {"LeaderWorkerSet"}
    assert kinds & {"Deployment", "LeaderWorkerSet"} == expected


@every_group
def test_a_group_survives_the_restart_of_a_pod(answer: Answer, case: str) -> None:
    """All pods of a group are started together, and one that restarts takes no other with it."""
    spec = group(answer, case)
    assert spec["leaderWorkerTemplate"]["size"] == nodes(case)
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "None"
    assert spec["startupPolicy"] == "LeaderCreated"


@every_group
def test_an_update_needs_no_second_set_of_gpus(answer: Answer, case: str) -> None:
    """Each group is stopped before the next starts."""
    assert group(answer, case)["rolloutStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdateConfiguration": {"maxSurge": 0, "maxUnavailable": 1},
    }


@every_group
def test_head_and_follower_find_each_other(answer: Answer, case: str) -> None:
    """The head waits for the rest of its group, at its own address and the port they connect to."""
    head, follower = pair(answer, case)
    settings = served(head)
    assert settings.node_count == nodes(case)
    assert settings.nodes.port == followed(follower).head_port
    assert settings.master_address == POD_ADDRESS
    for only in (head, follower):
        variables = {one["name"]: one for one in only["env"]}
        source = variables["VLLM_HOST_IP"]["valueFrom"]
        assert source == {"fieldRef": {"fieldPath": "status.podIP"}}


@every_group
def test_both_have_the_key_of_the_secret(answer: Answer, case: str) -> None:
    """The same file of the Secret that the values name, and no key is rendered."""
    head, follower = pair(answer, case)
    settings = served(head)
    path = settings.nodes.key_file
    assert path is not None
    assert followed(follower).key_file == path
    for template in templates(answer, case):
        (volume,) = (one for one in template["spec"]["volumes"] if one["name"] == "node-key")
        assert volume["secret"]["secretName"] == CASES[case]["nodes"]["existingSecret"]
        assert volume["secret"]["items"] == [{"key": "node-key", "path": path.name}]
        (only,) = template["spec"]["containers"]
        (mount,) = (one for one in only["volumeMounts"] if one["name"] == "node-key")
        assert mount["mountPath"] == str(path.parent)


@every_group
def test_a_follower_has_no_key_of_clients(answer: Answer, case: str) -> None:
    """It serves no client, so it has neither their keys nor the certificate."""
    _, follower = templates(answer, case)
    assert {"keys", "tls"}.isdisjoint(one["name"] for one in follower["spec"]["volumes"])


@every_group
def test_a_follower_outlasts_the_drain_of_its_head(answer: Answer, case: str) -> None:
    """Kubernetes stops them together, and what the head drains runs on both."""
    head, follower = pair(answer, case)
    settings = served(head)
    drained_seconds = (
        head["lifecycle"]["preStop"]["sleep"]["seconds"]
        + settings.supervision.drain_timeout_seconds
    )
    kept_seconds = followed(follower).stop.head_drain_seconds
    assert kept_seconds >= drained_seconds
    # It gets SIGTERM at once, so that it joins no other head.
    assert "lifecycle" not in follower
    graces = {one["spec"]["terminationGracePeriodSeconds"] for one in templates(answer, case)}
    (grace_seconds,) = graces
    assert grace_seconds >= kept_seconds + LEAVE_SECONDS + KILL_DEADLINE_SECONDS


@every_group
def test_each_probe_of_a_follower_asks_its_own_route(answer: Answer, case: str) -> None:
    """On the port that it listens on, without TLS, and without waiting for the engine."""
    head, follower = pair(answer, case)
    (port,) = follower["ports"]
    assert port == {"name": "http", "containerPort": followed(follower).listen.port}
    routes = follower_routes(lambda: FollowerStatus("n", "away", "h:1", is_connected=False))
    asked = {name: follower[f"{name}Probe"] for name in ("readiness", "liveness")}
    assert "startupProbe" not in follower
    for name, path in {"readiness": "/readyz", "liveness": "/livez"}.items():
        assert path in {route.path for route in routes}
        assert asked[name]["httpGet"] == {"path": path, "port": "http", "scheme": "HTTP"}
        others = {key: value for key, value in asked[name].items() if key != "httpGet"}
        assert others.items() <= head[f"{name}Probe"].items()


@every_group
def test_pods_of_a_release_reach_each_other(answer: Answer, case: str) -> None:
    """Both ways and at every port; clients reach heads alone, and Prometheus reaches both."""
    found = of_kind(answer, case, "NetworkPolicy")
    policies = {one["metadata"]["name"]: one["spec"] for one in found}
    head, follower = policies["demo-holdfast"], policies["demo-holdfast-followers"]
    pods = [one["metadata"]["labels"].items() for one in templates(answer, case)]
    for policy in (head, follower):
        (inward,) = (rule for rule in policy["ingress"] if "ports" not in rule)
        (outward,) = (rule for rule in policy["egress"] if "ports" not in rule)
        assert inward["from"] == outward["to"]
        (peer,) = inward["from"]
        assert all(peer["podSelector"]["matchLabels"].items() <= labels for labels in pods)
    assert head["egress"] == follower["egress"]
    (asked,) = (rule for rule in follower["ingress"] if "ports" in rule)
    monitoring = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    assert asked["from"] == [{"namespaceSelector": monitoring}]
    for policy, selected in ((head, [True, False]), (follower, [False, True])):
        wanted = policy["podSelector"]["matchLabels"].items()
        assert [wanted <= labels for labels in pods] == selected


def test_nothing_of_a_follower_is_counted_twice(answer: Answer) -> None:
    """It has a job of its own, and Prometheus keeps only what the head does not report."""
    found = of_kind(answer, GROUPS, "PodMonitor")
    monitors = {one["metadata"]["name"]: one["spec"] for one in found}
    (endpoint,) = monitors["demo-holdfast-followers"]["podMetricsEndpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "holdfast-follower"}]
    assert "scheme" not in endpoint
    assert "authorization" not in endpoint
    (kept,) = endpoint["metricRelabelings"]
    assert (kept["action"], kept["sourceLabels"]) == ("keep", ["__name__"])
    for metric in FOLLOWER_METRICS:
        assert re.fullmatch(kept["regex"], metric.full_name)
    for rank_metric in RANK_METRICS:
        assert not re.fullmatch(kept["regex"], rank_metric.full_name)
    (of_servers,) = monitors["demo-holdfast"]["podMetricsEndpoints"]
    assert {"targetLabel": "job", "replacement": "holdfast"} in of_servers["relabelings"]


def test_groups_are_scaled_as_a_whole(answer: Answer) -> None:
    """The autoscaler changes the number of groups."""
    (scaler,) = of_kind(answer, GROUPS, "HorizontalPodAutoscaler")
    (found,) = of_kind(answer, GROUPS, "LeaderWorkerSet")
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"]) == (found["apiVersion"], found["kind"])
    assert target["name"] == found["metadata"]["name"]


@pytest.mark.parametrize("release", RELEASES)
def test_the_names_of_a_group_are_free_and_short_enough(answer: Answer, release: str) -> None:
    """LeaderWorkerSet makes a Service of its name, and labels that are 14 characters longer."""
    found = answer["groups"][release]["documents"]
    (name,) = (one["metadata"]["name"] for one in found if one["kind"] == "LeaderWorkerSet")
    assert name not in {one["metadata"]["name"] for one in found if one["kind"] == "Service"}
    assert len(name) + 14 <= 63


@every_group
def test_the_notes_wait_for_the_group(answer: Answer, case: str) -> None:
    """By its own name and kind."""
    (found,) = of_kind(answer, case, "LeaderWorkerSet")
    assert f"wait leaderworkerset/{found['metadata']['name']} " in answer["cases"][case]["notes"]


@every_group
def test_the_definition_accepts_the_pods_of_a_group(answer: Answer, case: str) -> None:
    """LeaderWorkerSet would drop a field of theirs that it did not know."""
    (group,) = of_kind(answer, case, "LeaderWorkerSet")
    found = deepcopy(group)  # other tests have the same
    assert crds.problems(found) == []
    found["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["probe"] = {}
    assert len(crds.problems(found)) == 1
