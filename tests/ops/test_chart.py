"""The Helm chart, rendered by real Helm: what it asks of Kubernetes, and what it says of us."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast import __version__, cli
from holdfast.api.health import health_routes
from holdfast.api.metrics import metrics_route
from holdfast.doctor.deployments import read_deployments
from holdfast.doctor.layout import read_layout
from holdfast.doctor.manifest_checks import ENGINE_STOP_SECONDS, STATE_DIRECTORY, check_deployment
from holdfast.lifecycle.states import HOPELESS, SERVING, State
from holdfast.settings import flags
from holdfast.telemetry.metrics import BY_NAME
from ops import crds
from ops.prometheus import tool
from ops.queries import ROOT, metric_names, vllm_names
from statuses import a_status

CHART = ROOT / "deploy" / "helm" / "holdfast"
RULES = ROOT / "deploy" / "prometheus"
BUILT_IN = frozenset({"apps/v1", "autoscaling/v2", "networking.k8s.io/v1", "policy/v1", "v1"})

Documents = list[dict[str, Any]]
Answer = dict[str, Any]

IMAGE = {"repository": "registry.example/holdfast"}
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
RELEASES = ("123", "true", "my.release", "holdfast.v1", f"{'a' * 49}.bcd")
MODEL = {"cpu": "4", "memory": "16Gi"}
ONE_BY_ONE = {"maxSurge": 0, "maxUnavailable": 1}
MONITORED = {
    "podMonitor": {"enabled": True, "labels": {"release": "kube-prometheus-stack"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "kube-prometheus-stack"}},
    "dashboards": {"enabled": True, "annotations": {"grafana_folder": "vLLM"}},
}


def mounted(path: str) -> dict[str, Any]:
    """The values for an own volume at a path."""
    return {
        "extraVolumes": [{"name": "mine", "hostPath": {"path": "/data"}}],
        "extraVolumeMounts": [{"name": "mine", "mountPath": path}],
    }


def examples() -> dict[str, dict[str, Any]]:
    """Every example of values in the docs, by the model that it serves."""
    page = (ROOT / "docs" / "deploying.md").read_text()
    found = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    return {f"docs: {one['model']}": one for one in found if "model" in one}


def commands() -> dict[str, dict[str, Any]]:
    """The values of every `helm install` in the docs, by the command."""
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/deploying.md")]
    text = "\n".join(pages).replace("\\\n", " ")
    return {line: given(line) for line in re.findall(r"^\$ (helm install .*)$", text, re.MULTILINE)}


def given(command: str) -> dict[str, Any]:
    """The values that the words after `--set` make."""
    words = shlex.split(command)
    values: dict[str, Any] = {}
    for flag, pair in itertools.pairwise(words):
        if flag == "--set":
            path, _, value = pair.partition("=")
            *parents, name = path.split(".")
            place = functools.reduce(lambda part, key: part.setdefault(key, {}), parents, values)
            place[name] = yaml.safe_load(value)
    return values


CASES: dict[str, dict[str, Any]] = {
    "one model": {"model": "Qwen/Qwen3-8B"},
    "demo": {"demo": True, "podDisruptionBudget": {"enabled": False}},
    "monitored": {"model": "Qwen/Qwen3-8B", **MONITORED, "start": {"seconds": 1800}},
    "own alerts": {
        "model": "m",
        "start": {"seconds": 7200},
        "prometheusRule": {
            "enabled": True,
            "runbookBaseUrl": "https://wiki.example/runbooks/",
            "overrides": {"HoldfastStalled": {"for": "5m", "labels": {"severity": "ticket"}}},
        },
    },
    "own patience": {
        "model": "m",
        "prometheusRule": {"enabled": True, "overrides": {"HoldfastNotReady": {"for": "45m"}}},
    },
    "scaled": {
        "model": "Qwen/Qwen3-8B",
        "autoscaling": {"enabled": True},
        "volumes": {"accessMode": "ReadWriteMany", "models": {"storageClassName": "nfs"}},
        "networkPolicy": {
            "enabled": True,
            "from": [{"podSelector": {"matchLabels": {"app": "gateway"}}}],
        },
    },
    "scaled, fast start": {
        "model": "m",
        "autoscaling": {"enabled": True},
        "start": {"seconds": 300},
        "volumes": {"accessMode": "ReadWriteMany"},
    },
    "data parallel": {
        "model": "m",
        "gpu": {"count": 4, "tensorParallelSize": 2},
        "extraArgs": ["--data-parallel-size=2"],
    },
    "two replicas": {
        "model": "m",
        "replicas": 2,
        "volumes": {"accessMode": "ReadWriteMany"},
    },
    "two GPUs": {
        "model": "/models/mine",
        **mounted("/models/"),
        "gpu": {"count": 2, "runtimeClassName": "nvidia"},
        "extraArgs": ["--max-model-len", "32768"],
        "extraEnv": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "keys": {"apiKey": "sk-clients", "adminApiKey": "sk-admin", "huggingFaceToken": "hf_x"},
        "image": {"repository": "registry.example/holdfast", "pullSecrets": [{"name": "pull"}]},
        "podLabels": {"team": "a", "app.kubernetes.io/name": "mine"},
        "podAnnotations": {"note": "b"},
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "inference",
    },
    "claims of the user": {
        "model": "Qwen/Qwen3-8B",
        "networkPolicy": {"enabled": True},
        "keys": {"existingSecret": "mine", "existingKeys": ["api-key", "hugging-face-token"]},
        "volumes": {
            name: {"existingClaim": f"my-{name}"} for name in ("state", "models", "kernels")
        },
    },
    "closed metrics": {
        "model": "Qwen/Qwen3-8B",
        "keys": {"apiKey": "secret", "metricsAuth": "api-key"},
        **MONITORED,
    },
    "no limits": {"model": "m", "resources": {"requests": None, "limits": None}},
    "no memory limit": {
        "model": "m",
        "resources": {"limits": {"memory": None}},
        "gpu": {"count": 2, "resource": "amd.com/gpu"},
    },
    "no GPU": {"model": "m", "gpu": {"count": 0}},
    "TLS": {"model": "m", "tls": {"existingSecret": "certificate"}, **MONITORED},
    "verified TLS": {
        "model": "m",
        "tls": {"existingSecret": "certificate"},
        "podMonitor": {
            "enabled": True,
            "tlsConfig": {
                "serverName": "demo-holdfast.inference.svc",
                "ca": {"secret": {"name": "certificate", "key": "ca.crt"}},
            },
        },
    },
    "digest": {"model": "m", "image": {**IMAGE, "tag": "cuda", "digest": DIGEST}},
    "IPv6": {"model": "m", "listenAddress": "::"},
    "OpenShift": {
        "model": "m",
        "serviceAccountName": "inference",
        "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
        "initContainers": [{"name": "fetch", "image": "registry.example/fetch"}],
    },
    "drain of 0 s": {"model": "m", "stop": {"drainSeconds": 0, "preStopSeconds": 1}},
    "drain of 600 s": {"model": "m", "stop": {"drainSeconds": 600}, "start": {"seconds": 7205}},
    **examples(),
}
REFUSED: dict[str, dict[str, Any]] = {
    "model is empty": {},
    "serves its own model": {"demo": True, "model": "m"},
    "volumes.accessMode=ReadWriteMany": {"model": "m", "replicas": 2},
    "several replicas share": {"model": "m", "autoscaling": {"enabled": True}},
    "image.repository is empty": {"model": "m", "image": {"tag": "0.1.0"}},
    "/image/digest": {"model": "m", "image": {**IMAGE, "digest": "abc"}},
    "/networkPolicy/monitoringNamespace": {
        "model": "m",
        "networkPolicy": {"monitoringNamespace": ""},
    },
    "minReplicas is above": {
        "model": "m",
        "autoscaling": {"enabled": True, "minReplicas": 8, "maxReplicas": 2},
        "volumes": {"accessMode": "ReadWriteMany"},
    },
    "/autoscaling/scaleDownSeconds": {"model": "m", "autoscaling": {"scaleDownSeconds": 7200}},
    "metricsAuth=api-key needs a key": {"model": "m", "keys": {"metricsAuth": "api-key"}},
    "with api-key in keys.existingKeys": {
        "model": "m",
        "keys": {
            "metricsAuth": "api-key",
            "existingSecret": "mine",
            "existingKeys": ["hugging-face-token"],
        },
    },
    "takes the place of the keys": {
        "model": "m",
        "keys": {"existingSecret": "mine", "apiKey": "a"},
    },
    "/model": {"model": "--demo"},
    "keys.adminApiKey is keys.apiKey": {"model": "m", "keys": {"apiKey": "a", "adminApiKey": "a"}},
    "/keys/existingKeys": {"model": "m", "keys": {"existingSecret": "mine", "existingKeys": []}},
    "there is no alert HoldfastSlow": {
        "model": "m",
        "prometheusRule": {"enabled": True, "overrides": {"HoldfastSlow": {"for": "1m"}}},
    },
    "/prometheusRule/runbookBaseUrl": {"model": "m", "prometheusRule": {"runbookBaseUrl": "wiki"}},
    "nothing is mounted at /models/mine": {"model": "/models/mine", **mounted("/models/m")},
    "/extraVolumeMounts/0": {"model": "m", "extraVolumeMounts": [{"name": "models"}]},
    "/extraEnv/0": {"model": "m", "extraEnv": [{"value": "1"}]},
    "/extraEnv/0/value": {"model": "m", "extraEnv": [{"name": "A", "value": 1}]},
    "/keys/metricsAuth": {"model": "m", "keys": {"metricsAuth": "basic"}},
    "additional properties 'modle' not allowed": {"modle": "m"},
    "nvidia.com/gpu is set by gpu.count": {
        "model": "m",
        "resources": {"limits": {"nvidia.com/gpu": 4}},
    },
    "/replicas": {"model": "m", "replicas": "two"},
    "/stop/engineSeconds": {"model": "m", "stop": {"engineSeconds": 5}},
    "/volumes/models/size": {"model": "m", "volumes": {"models": {"size": "big"}}},
    "/service/port": {"model": "m", "service": {"port": 0}},
    "/podMonitor/interval": {"model": "m", "podMonitor": {"interval": "15 seconds"}},
}
MANAGED = {
    "--drain-timeout=600": "stop.drainSeconds",
    "--drain_timeout": "stop.drainSeconds",
    "--port": "service.port",
    "--host": "listenAddress",
    "--uds=/tmp/x": "service.port",
    "--metrics-auth=api-key": "keys.metricsAuth",
    "--tensor-parallel-size": "gpu.tensorParallelSize",
    "-tp=2": "gpu.tensorParallelSize",
    "--ssl-certfile=/x": "tls.existingSecret",
    "--ssl-cert-reqs=2": "networkPolicy",
    "--api-key": "keys.apiKey",
    "--demo": "demo",
    "VLLM_API_KEY": "keys.apiKey",
    "HOLDFAST_ADMIN_API_KEY": "keys.adminApiKey",
    "HOLDFAST_METRICS_AUTH": "keys.metricsAuth",
    "HOLDFAST_LOG_FORMAT": "--log-format",
}


def overriding(name: str) -> dict[str, Any]:
    """Values that set a flag or a variable past the chart."""
    if name.startswith("-"):
        return {"model": "m", "extraArgs": ["--max-model-len", "8", name]}
    return {"model": "m", "extraEnv": [{"name": name, "value": "x"}]}


pytestmark = pytest.mark.tools
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def answer() -> Answer:
    """Every case, rendered in one process."""
    overriding_cases = {name: overriding(name) for name in MANAGED}
    cases = {**CASES, **REFUSED, **overriding_cases}
    cases = {name: {"image": IMAGE, **values} for name, values in cases.items()} | commands()
    request = {"chart": str(CHART), "cases": cases, "releases": RELEASES}
    done = subprocess.run(
        [tool("ops-python"), str(Path(__file__).parent / "render_chart.py")],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def documents(answer: Answer, case: str) -> Documents:
    rendered = answer["cases"][case]
    assert rendered["error"] == ""
    return list(rendered["documents"])


def of_kind(answer: Answer, case: str, kind: str) -> Documents:
    return [one for one in documents(answer, case) if one["kind"] == kind]


def pod(answer: Answer, case: str) -> dict[str, Any]:
    (deployment,) = of_kind(answer, case, "Deployment")
    return dict(deployment["spec"]["template"]["spec"])


def container(answer: Answer, case: str) -> dict[str, Any]:
    (only,) = pod(answer, case)["containers"]
    return dict(only)


def flag(answer: Answer, case: str, name: str) -> str:
    given = [text for text in container(answer, case)["args"] if text.startswith(f"{name}=")]
    return given[-1].partition("=")[2] if given else ""


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
    assert kinds <= BUILT_IN | {"monitoring.coreos.com/v1"}


@pytest.mark.parametrize("release", RELEASES)
def test_every_name_of_a_release_will_do(answer: Answer, release: str) -> None:
    """What YAML reads as something else, what a Service may not be called, and what is long."""
    found = answer["releases"][release]
    assert (found["error"], found["problems"]) == ("", [])
    for one in found["documents"]:
        assert re.fullmatch("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", one["metadata"]["name"])
        assert one["metadata"]["labels"]["app.kubernetes.io/instance"] == release


def test_every_custom_kind_is_valid(answer: Answer) -> None:
    """The same for monitors and rules, by the definitions of the Prometheus operator."""
    cases = ("monitored", "closed metrics", "TLS", "verified TLS", "own alerts")
    custom = [one for case in cases for kind in crds.NAMES for one in of_kind(answer, case, kind)]
    assert {one["kind"] for one in custom} == set(crds.NAMES)
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
    (deployment,) = of_kind(answer, case, "Deployment")
    selected = deployment["spec"]["selector"]["matchLabels"]
    given = CASES[case].get("podLabels", {})
    assert deployment["spec"]["template"]["metadata"]["labels"] == {**given, **selected}


def test_the_drain_is_by_default_that_of_the_server() -> None:
    """The chart changes nothing that was not asked for."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    (drain,) = (one for one in flags() if one.name == "--drain-timeout")
    assert str(values["stop"]["drainSeconds"]) == drain.shown_default


@every_case
def test_each_probe_asks_its_own_route(answer: Answer, case: str) -> None:
    """Each probe asks the route whose answers mean what Kubernetes does with them."""
    only = container(answer, case)
    routes = health_routes(a_status, queue=lambda: (0, 0))
    paths = {route.path for route in [*routes, metrics_route(lambda _: (b"", ""))]}
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
    """Who writes a manifest by hand gets what the chart gives, but for port, scheme and start."""
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
    (deployment,) = of_kind(answer, case, "Deployment")
    grace_seconds = pod(answer, case)["terminationGracePeriodSeconds"]
    assert deployment["spec"]["progressDeadlineSeconds"] > grace_seconds + seconds


@every_case
def test_the_command_is_accepted(answer: Answer, case: str) -> None:
    """The arguments are those of `holdfast serve`, and its variables exist."""
    only = container(answer, case)
    assert only["args"][0] == "serve"
    settings = cli.parse_serve(only["args"][1:], {}, needs_model=False)
    assert settings.listen.port == only["ports"][0]["containerPort"]
    ours = {entry["name"] for entry in only["env"] if entry["name"].startswith("HOLDFAST_")}
    assert ours <= {one.variable for one in flags()}
    layout = read_layout(only["args"])
    limits = only["resources"]["limits"]
    gpus = next((count for name, count in limits.items() if name.endswith("/gpu")), 1)
    assert layout.tensor_parallel_size * layout.data_parallel_size == gpus


@every_case
def test_the_doctor_is_content(answer: Answer, case: str, tmp_path: Path) -> None:
    """No hazard that `holdfast doctor --manifest` knows is in what the chart renders."""
    path = tmp_path / "rendered.yaml"
    path.write_text(yaml.safe_dump_all(documents(answer, case)))
    (deployment,) = read_deployments(path, {})
    findings = check_deployment(
        deployment,
        read_layout(deployment.arguments),
        drain_seconds=float(flag(answer, case, "--drain-timeout")),
        state_directory=STATE_DIRECTORY,
    )
    assert [one for one in findings if one.severity != "ok"] == []


@every_case
def test_the_container_may_do_little(answer: Answer, case: str) -> None:
    """No root, no capability, no writable root file system, no token of the cluster."""
    spec, only = pod(answer, case), container(answer, case)
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
    """Service, policies and monitor select by labels that the pods have, as the Deployment does."""
    (deployment,) = of_kind(answer, case, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [
        one["spec"].get("podSelector") or one["spec"]["selector"]
        for one in documents(answer, case)
        if one["kind"] in {"Deployment", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor"}
    ]
    (service,) = of_kind(answer, case, "Service")
    wanted = [selector["matchLabels"] for selector in selectors] + [service["spec"]["selector"]]
    assert all(one.items() <= labels.items() for one in wanted)


@every_case
def test_every_port_by_name_exists(answer: Answer, case: str) -> None:
    """What names a port names one of the container."""
    names = {port["name"] for port in container(answer, case)["ports"]}
    (service,) = of_kind(answer, case, "Service")
    used = {port["targetPort"] for port in service["spec"]["ports"]}
    for monitor in of_kind(answer, case, "PodMonitor"):
        used |= {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    for policy in of_kind(answer, case, "NetworkPolicy"):
        used |= {port["port"] for port in policy["spec"]["ingress"][0]["ports"]}
    assert used == names


@every_case
def test_every_volume_and_secret_is_there_or_named_by_the_user(answer: Answer, case: str) -> None:
    """Claims are made or given, mounts name a volume, and no pod starts without a key it needs."""
    spec, only = pod(answer, case), container(answer, case)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert {mount["name"] for mount in only["volumeMounts"]} == set(volumes)
    given = CASES[case].get("extraVolumes", [])
    assert all(one in spec["volumes"] for one in given)
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in volumes.values()
        if "persistentVolumeClaim" in volume and volume not in given
    }
    made = {one["metadata"]["name"] for one in of_kind(answer, case, "PersistentVolumeClaim")}
    named = {"my-state", "my-models", "my-kernels"} if case == "claims of the user" else set()
    assert claims == made | named
    references = [one["valueFrom"]["secretKeyRef"] for one in only["env"] if "valueFrom" in one]
    references += [volume["secret"] for volume in volumes.values() if "secret" in volume]
    assert not any(reference.get("optional") for reference in references)


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
    references = [one["valueFrom"]["secretKeyRef"] for one in only["env"] if "valueFrom" in one]
    return files, {(reference["name"], reference["key"]) for reference in references}


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


def test_the_monitor_scrapes_our_metrics(answer: Answer) -> None:
    """It asks the route that has them, under the job that rules and dashboards know."""
    (monitor,) = of_kind(answer, "monitored", "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == metrics_route(lambda _: (b"", "")).path
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
    for alert in alerts(answer, "own alerts").values():
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
    """Whoever is not READY has the time of a start, unless the values say otherwise."""
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
    """Replicas are the autoscaler's, by the metric that the rule in the docs serves to it."""
    (scaler,) = of_kind(answer, "scaled", "HorizontalPodAutoscaler")
    (deployment,) = of_kind(answer, "scaled", "Deployment")
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"]
    (metric,) = scaler["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    page = (ROOT / "docs" / "deploying.md").read_text()
    (rule,) = yaml.safe_load(page.partition("```yaml\nrules:")[2].partition("```")[0])
    assert rule["name"] == {"as": name}
    (series,) = metric_names(rule["seriesQuery"])
    assert series.removeprefix("holdfast_") in BY_NAME
    query = rule["metricsQuery"].replace("<<.Series>>", series)
    query = query.replace("<<.LabelMatchers>>", 'pod="p"').replace("<<.GroupBy>>", "pod")
    first, added = metric_names(query)
    assert (first, added in vllm_names()) == (series, True)


@pytest.mark.parametrize(("case", "seconds"), [("scaled", 1800), ("scaled, fast start", 300)])
def test_no_replica_is_added_before_the_last_one_could_help(
    answer: Answer, case: str, seconds: int
) -> None:
    """One for each time of a start, within the half hour that Kubernetes allows."""
    (scaler,) = of_kind(answer, case, "HorizontalPodAutoscaler")
    (policy,) = scaler["spec"]["behavior"]["scaleUp"]["policies"]
    assert policy == {"type": "Pods", "value": 1, "periodSeconds": seconds}


@every_case
def test_the_notes_give_the_time_to_stop(answer: Answer, case: str) -> None:
    """They name the same grace period as the Deployment."""
    grace_seconds = pod(answer, case)["terminationGracePeriodSeconds"]
    assert f"takes up to {grace_seconds} s" in answer["cases"][case]["notes"]
