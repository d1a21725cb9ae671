"""The pods of the chart: what they are started with, and what Kubernetes does with them."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast import cli
from holdfast.api.health import health_routes
from holdfast.api.metrics import metrics_route
from holdfast.doctor.command import read_deployments
from holdfast.doctor.manifest_checks import ENGINE_STOP_SECONDS
from holdfast.doctor.parallelism import read_layout
from holdfast.lifecycle.states import HOPELESS, SERVING, State
from holdfast.settings import flags
from holdfast.settings.variable_names import IMAGE_VARIABLE
from manifests import hazards_of
from ops.charts import (
    CASES,
    CHART,
    MODEL,
    ONE_BY_ONE,
    Answer,
    arguments,
    container,
    documents,
    every_case,
    flag,
    nodes,
    of_kind,
    pod,
    templates,
)
from ops.queries import ROOT
from sample_status import a_status

ROLE = "app.kubernetes.io/component"
SELECTED = {"app.kubernetes.io/name": "holdfast", "app.kubernetes.io/instance": "demo"}

pytestmark = pytest.mark.tools


@every_case
def test_termination_adds_up(answer: Answer, case: str) -> None:
    """preStop, the drain that the server is told, and the end of the engine fit into the grace."""
    spec, only = pod(answer, case), container(answer, case)
    pre_stop_seconds = only["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain_seconds = float(flag(answer, case, "--drain-timeout"))
    given = CASES[case].get("stop", {}).get("drainSeconds", 45)
    assert drain_seconds == given
    needed_seconds = pre_stop_seconds + drain_seconds + ENGINE_STOP_SECONDS
    assert needed_seconds <= spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        ("one model", {"type": "Recreate"}),
        ("two replicas", {"type": "RollingUpdate", "rollingUpdate": ONE_BY_ONE}),
        ("scaled", {"type": "RollingUpdate", "rollingUpdate": ONE_BY_ONE}),
    ],
)
def test_an_update_needs_no_second_set_of_gpus(
    answer: Answer, case: str, strategy: dict[str, Any]
) -> None:
    """Each pod is stopped before the next starts, and of several the others go on serving."""
    (deployment,) = of_kind(answer, case, "Deployment")
    assert deployment["spec"]["strategy"] == strategy


@every_case
def test_a_new_version_of_the_chart_restarts_nothing(answer: Answer, case: str) -> None:
    """The pods have the labels that they are selected by, those of the values, and no other."""
    given = CASES[case].get("podLabels", {})
    roles = [{}] if nodes(case) == 1 else [{ROLE: "head"}, {ROLE: "follower"}]
    assert [template["metadata"]["labels"] for template in templates(answer, case)] == [
        {**given, **SELECTED, **role} for role in roles
    ]
    for deployment in of_kind(answer, case, "Deployment"):
        assert deployment["spec"]["selector"]["matchLabels"] == SELECTED


def test_the_drain_is_by_default_that_of_the_server() -> None:
    """The chart changes nothing that was not asked for."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    (drain,) = (one for one in flags() if one.name == "--drain-timeout")
    assert str(values["stop"]["drainSeconds"]) == drain.shown_default


@every_case
def test_each_probe_asks_its_own_route(answer: Answer, case: str) -> None:
    """Each probe asks the route that means what Kubernetes makes of the answer."""
    only = container(answer, case)
    routes = health_routes(a_status, queue=lambda: (0, 0))
    paths = {route.path for route in [*routes, metrics_route(lambda: ())]}
    asked = {
        name: only[f"{name}Probe"]["httpGet"]["path"]
        for name in ("startup", "readiness", "liveness")
    }
    assert set(asked.values()) <= paths
    assert asked == {"startup": "/startupz", "readiness": "/readyz", "liveness": "/livez"}
    assert {State.READY} == SERVING
    assert {State.FAILED} == HOPELESS


@every_case
def test_the_probes_are_those_of_the_guide(answer: Answer, case: str) -> None:
    """The guide's probes are the chart's, except for port, scheme and start."""
    page = (ROOT / "docs" / "operating.md").read_text()
    (text,) = re.findall(r"```yaml\n(startupProbe:.*?)```", page, re.DOTALL)
    only = container(answer, case)
    for name, probe in yaml.safe_load(text).items():
        asked = {key: number for key, number in only[name].items() if key != "httpGet"}
        if name == "startupProbe" and "start" in CASES[case]:
            probe["failureThreshold"] = asked["failureThreshold"]
        assert asked == {key: number for key, number in probe.items() if key != "httpGet"}


@every_case
def test_the_start_gets_its_time(answer: Answer, case: str) -> None:
    """The startup probe gives what the values ask for, and at most one period more."""
    probe = container(answer, case)["startupProbe"]
    seconds = CASES[case].get("start", {}).get("seconds", 3600)
    assert 0 <= probe["periodSeconds"] * probe["failureThreshold"] - seconds < 10
    grace_seconds = pod(answer, case)["terminationGracePeriodSeconds"]
    for deployment in of_kind(answer, case, "Deployment"):
        assert deployment["spec"]["progressDeadlineSeconds"] > grace_seconds + seconds


@every_case
def test_the_command_is_accepted(answer: Answer, case: str) -> None:
    """The arguments are those of `holdfast serve`, and its variables exist."""
    only = container(answer, case)
    command, *given = arguments(only)
    assert command == "serve"
    settings = cli.parse_serve(given, {}, needs_model=False)
    assert settings.listen.port == only["ports"][0]["containerPort"]
    ours = {entry["name"] for entry in only["env"] if entry["name"].startswith("HOLDFAST_")}
    assert ours <= {IMAGE_VARIABLE, *(one.variable for one in flags())}
    layout = read_layout(given)
    limits = only["resources"]["limits"]
    gpus = next((count for name, count in limits.items() if name.endswith("/gpu")), 1)
    assert layout.ranks == gpus


@every_case
def test_the_server_knows_its_image(answer: Answer, case: str) -> None:
    """With the digest, if the values have it; `/statusz` says so."""
    for template in templates(answer, case):
        (only,) = template["spec"]["containers"]
        variables = {one["name"]: one.get("value") for one in only["env"]}
        assert variables[IMAGE_VARIABLE] == only["image"]


@every_case
def test_the_doctor_is_content(answer: Answer, case: str, tmp_path: Path) -> None:
    """No hazard that `holdfast doctor --manifest` knows is in what the chart renders."""
    path = tmp_path / "rendered.yaml"
    path.write_text(yaml.safe_dump_all(documents(answer, case)))
    for deployment in read_deployments([path]):
        assert hazards_of(deployment) == []


@every_case
def test_the_container_may_do_little(answer: Answer, case: str) -> None:
    """No root, no capability, no writable root file system, no token of the cluster."""
    for template in templates(answer, case):
        spec = template["spec"]
        (only,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_cluster_may_choose_the_user(answer: Answer) -> None:
    """What is null in the values is left to it; the rest of the context stays."""
    spec = pod(answer, "OpenShift")
    assert set(spec["securityContext"]) == {
        "runAsNonRoot",
        "fsGroupChangePolicy",
        "seccompProfile",
    }
    assert spec["serviceAccountName"] == "inference"
    assert spec["initContainers"] == CASES["OpenShift"]["initContainers"]


@pytest.mark.parametrize(("case", "host"), [("one model", ""), ("IPv6", "::")])
def test_the_server_listens_where_its_pod_is(answer: Answer, case: str, host: str) -> None:
    """On IPv4, if nothing is said."""
    settings = cli.parse_serve(container(answer, case)["args"][1:], {}, needs_model=False)
    assert settings.listen.host == host


@every_case
def test_every_selector_finds_the_pods(answer: Answer, case: str) -> None:
    """Service, policies and monitors select by labels that pods have, as the Deployment does."""
    pods = [template["metadata"]["labels"] for template in templates(answer, case)]
    selectors = [
        one["spec"].get("podSelector") or one["spec"]["selector"]
        for one in documents(answer, case)
        if one["kind"] in {"Deployment", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor"}
    ]
    for selector in selectors:
        assert any(selector["matchLabels"].items() <= labels.items() for labels in pods)
    (service,) = of_kind(answer, case, "Service")
    serving = [service["spec"]["selector"].items() <= labels.items() for labels in pods]
    assert serving == [True, False][: len(pods)]


@every_case
def test_every_port_by_name_exists(answer: Answer, case: str) -> None:
    """What names a port names one of the container."""
    names = {
        port["name"]
        for template in templates(answer, case)
        for port in template["spec"]["containers"][0]["ports"]
    }
    (service,) = of_kind(answer, case, "Service")
    used = {port["targetPort"] for port in service["spec"]["ports"]}
    for monitor in of_kind(answer, case, "PodMonitor"):
        used |= {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    for policy in of_kind(answer, case, "NetworkPolicy"):
        used |= {port["port"] for port in policy["spec"]["ingress"][0]["ports"]}
    assert used == names


@every_case
def test_scratch_takes_no_more_than_it_may(answer: Answer, case: str) -> None:
    """What clients or compilers have written there ends this pod, and not its node."""
    for template in templates(answer, case):
        (scratch,) = (one for one in template["spec"]["volumes"] if one["name"] == "scratch")
        assert scratch["emptyDir"] == {"sizeLimit": "16Gi"}


@every_case
def test_every_volume_and_secret_is_there_or_named_by_the_user(answer: Answer, case: str) -> None:
    """Claims are made or given, mounts name a volume, and no pod starts without a key it needs."""
    given = CASES[case].get("extraVolumes", [])
    made = {one["metadata"]["name"] for one in of_kind(answer, case, "PersistentVolumeClaim")}
    named = {"my-state", "my-models", "my-kernels"} if case == "claims of the user" else set()
    for template in templates(answer, case):
        (only,) = template["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert {mount["name"] for mount in only["volumeMounts"]} == set(volumes)
        assert all(one in volumes.values() for one in given)
        claims = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if "persistentVolumeClaim" in volume and volume not in given
        }
        assert claims == made | named
        secrets = [volume["secret"] for volume in volumes.values() if "secret" in volume]
        assert not any(one.get("optional") for one in [*secrets, *references(only)])


@every_case
def test_nothing_is_mounted_inside_a_claim(answer: Answer, case: str) -> None:
    """On NFS with `root_squash`, the runtime may not create the directory for it there."""
    for template in templates(answer, case):
        (only,) = template["spec"]["containers"]
        volumes = template["spec"]["volumes"]
        claims = {one["name"] for one in volumes if "persistentVolumeClaim" in one}
        mounts = [(one["name"], Path(one["mountPath"])) for one in only["volumeMounts"]]
        above = {path for name, path in mounts if name in claims}
        assert not any(above.intersection(path.parents) for _, path in mounts)


@every_case
def test_models_are_downloaded_to_the_claim_for_them(answer: Answer, case: str) -> None:
    """Of a server and of a follower."""
    for template in templates(answer, case):
        (only,) = template["spec"]["containers"]
        (place,) = (one["mountPath"] for one in only["volumeMounts"] if one["name"] == "models")
        assert [one["value"] for one in only["env"] if one["name"] == "HF_HOME"] == [place]


@pytest.mark.parametrize(
    ("case", "name", "keys"),
    [
        ("one model", "", set()),
        ("two GPUs", "demo-holdfast", {"api-key", "admin-api-key", "hugging-face-token"}),
        ("claims of the user", "mine", {"api-key", "hugging-face-token"}),
        ("closed metrics", "demo-holdfast", {"api-key"}),
    ],
)
def test_the_container_reads_every_key_of_its_secret(
    answer: Answer, case: str, name: str, keys: set[str]
) -> None:
    """API keys as files, which are read again when they change, and the token as a variable."""
    files, variables = read_keys(answer, case)
    assert {secret for secret, _ in files | variables} == ({name} if name else set())
    assert {key for _, key in files | variables} == keys
    assert {key for _, key in variables} == keys & {"hugging-face-token"}


def read_keys(answer: Answer, case: str) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Secret and key of each file that a flag names, and of each variable."""
    spec, only = pod(answer, case), container(answer, case)
    paths = {mount["name"]: mount["mountPath"] for mount in only["volumeMounts"]}
    given = {flag(answer, case, name) for name in ("--api-key-file", "--admin-api-key-file")}
    files = {
        (volume["secret"]["secretName"], item["key"])
        for volume in spec["volumes"]
        for item in volume.get("secret", {}).get("items", [])
        if f"{paths[volume['name']]}/{item['path']}" in given
    }
    return files, {(reference["name"], reference["key"]) for reference in references(only)}


def references(only: dict[str, Any]) -> list[dict[str, Any]]:
    """The keys of Secrets that variables of a container get their values from."""
    sources = [one["valueFrom"] for one in only["env"] if "valueFrom" in one]
    return [source["secretKeyRef"] for source in sources if "secretKeyRef" in source]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("one model", {"limits": {"memory": "64Gi", "nvidia.com/gpu": 1}, "requests": MODEL}),
        ("no limits", {"limits": {"nvidia.com/gpu": 1}, "requests": {}}),
        ("no memory limit", {"limits": {"amd.com/gpu": 2}, "requests": MODEL}),
        ("no GPU", {"limits": {"memory": "64Gi"}, "requests": MODEL}),
        ("demo", {"limits": {"memory": "8Gi"}, "requests": {"cpu": "1", "memory": "4Gi"}}),
    ],
)
def test_resources_are_those_of_the_values_and_the_gpus(
    answer: Answer, case: str, expected: dict[str, Any]
) -> None:
    """What is null in the values is left out, GPUs come on top, and the demo asks for little."""
    assert container(answer, case)["resources"] == expected


def test_everybody_speaks_tls_once_the_server_does(answer: Answer) -> None:
    """Server, probes and PodMonitor; the certificate is the mounted one, as it is renewed."""
    spec, only = pod(answer, "TLS"), container(answer, "TLS")
    settings = cli.parse_serve(only["args"][1:], {}, needs_model=False).listen
    assert (settings.is_tls, settings.is_tls_refreshed) == (True, True)
    (volume,) = (one for one in spec["volumes"] if one["name"] == "tls")
    assert volume["secret"]["secretName"] == "certificate"
    (mount,) = (one for one in only["volumeMounts"] if one["name"] == "tls")
    assert settings.ssl_certfile == f"{mount['mountPath']}/tls.crt"
    assert settings.ssl_keyfile == f"{mount['mountPath']}/tls.key"
    assert (schemes(answer, "TLS"), schemes(answer, "one model")) == ("HTTPS", "HTTP")
    (monitor,) = of_kind(answer, "TLS", "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"insecureSkipVerify": True})
    assert "--insecure https://" in answer["cases"]["TLS"]["notes"]


def schemes(answer: Answer, case: str) -> str:
    """The one scheme that all probes use."""
    only = container(answer, case)
    probes = ("startup", "readiness", "liveness")
    (scheme,) = {only[f"{name}Probe"]["httpGet"]["scheme"] for name in probes}
    return str(scheme)


def test_a_certificate_is_verified_as_the_values_say(answer: Answer) -> None:
    """What they give takes the place of no verification."""
    (monitor,) = of_kind(answer, "verified TLS", "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["tlsConfig"] == CASES["verified TLS"]["podMonitor"]["tlsConfig"]


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("one model", {"state", "kernels", "models"}),
        ("two GPUs", {"state", "kernels"}),
        ("demo", {"state"}),
        ("claims of the user", set()),
    ],
)
def test_no_claim_is_made_for_what_is_not_kept(answer: Answer, case: str, names: set[str]) -> None:
    """A model in a directory is not downloaded, and of the demo only what it learned is kept."""
    made = {one["metadata"]["name"] for one in of_kind(answer, case, "PersistentVolumeClaim")}
    assert made == {f"demo-holdfast-{name}" for name in names}


def test_keys_are_in_a_secret_alone(answer: Answer) -> None:
    """Keys that are given in the values stand in a Secret, and nowhere else."""
    (secret,) = of_kind(answer, "two GPUs", "Secret")
    assert {name: base64.b64decode(text).decode() for name, text in secret["data"].items()} == {
        "api-key": "sk-clients",
        "admin-api-key": "sk-admin",
        "hugging-face-token": "hf_x",
    }
    others = [one for one in documents(answer, "two GPUs") if one["kind"] != "Secret"]
    assert not re.search("sk-clients|sk-admin|hf_x", json.dumps(others))
    assert of_kind(answer, "claims of the user", "Secret") == []
