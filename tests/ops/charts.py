"""The cases in which the chart is rendered, and how a test reads what came of one."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from ops.prometheus import tool
from ops.queries import ROOT

CHART = ROOT / "deploy" / "helm" / "holdfast"
RULES = ROOT / "deploy" / "prometheus"
BUILT_IN = frozenset({"apps/v1", "autoscaling/v2", "networking.k8s.io/v1", "policy/v1", "v1"})
CUSTOM = frozenset({"leaderworkerset.x-k8s.io/v1", "monitoring.coreos.com/v1"})
ROUTERS = ROOT / "deploy" / "routers"
PAGES = ("README.md", "docs/deploying.md", "docs/several-nodes.md", "docs/behind-a-router.md")

Documents = list[dict[str, Any]]
Answer = dict[str, Any]

IMAGE = {"repository": "registry.example/holdfast"}
SEVERAL_NODES = "two nodes"
GROUPS = "groups of four nodes"
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
POD_ADDRESS = "192.0.2.1"
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
    pages = "\n".join((ROOT / name).read_text() for name in PAGES)
    found = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", pages, re.DOTALL))
    return {f"docs: {one['model']}": one for one in found if "model" in one}


def commands() -> dict[str, dict[str, Any]]:
    """The values of every `helm install` in the docs, by the command."""
    text = "\n".join((ROOT / name).read_text() for name in PAGES).replace("\\\n", " ")
    return {line: given(line) for line in re.findall(r"^\$ (helm install .*)$", text, re.MULTILINE)}


def adapter_rule() -> dict[str, Any]:
    """The rule for prometheus-adapter in the docs."""
    page = (ROOT / "docs" / "deploying.md").read_text()
    (rule,) = yaml.safe_load(page.partition("```yaml\nrules:")[2].partition("```")[0])
    return dict(rule)


def merged(values: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Values with others on top, as Helm merges files: objects in part, all else as a whole."""
    result = {**values, **other}
    for name in values.keys() & other.keys():
        if isinstance(values[name], dict) and isinstance(other[name], dict):
            result[name] = merged(values[name], other[name])
    return result


def shipped(*names: str) -> dict[str, Any]:
    """Values for replicas behind a router, from files below deploy/routers."""
    files = (yaml.safe_load((ROUTERS / name).read_text()) for name in names)
    return functools.reduce(merged, files, {"model": "Qwen/Qwen3-8B"})


def given(command: str) -> dict[str, Any]:
    """The values that the words after `--values` and `--set` make."""
    words = shlex.split(command)
    values: dict[str, Any] = {}
    for flag, name in itertools.pairwise(words):
        if flag == "--values":
            values = merged(values, yaml.safe_load((ROOT / name).read_text()))
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
    "closed to the Internet": {
        "model": "/models/mine",
        **mounted("/models/"),
        "networkPolicy": {
            "egress": {"public": False, "rules": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}]}
        },
    },
    "open egress": {"model": "m", "networkPolicy": {"egress": {"restricted": False}}},
    "no policy of the network": {"model": "m", "networkPolicy": {"enabled": False}},
    "scaled, fast start": {
        "model": "m",
        "autoscaling": {"enabled": True},
        "start": {"seconds": 600},
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
    "behind a router": shipped("chart-values.yaml"),
    "llm-d": shipped("chart-values.yaml", "llm-d/chart-values.yaml"),
    "AIBrix": shipped("chart-values.yaml", "aibrix/chart-values.yaml"),
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
    SEVERAL_NODES: {
        "model": "/models/large",
        **mounted("/models"),
        "nodes": {"count": 2, "existingSecret": "node-key"},
        "volumes": {"accessMode": "ReadWriteMany"},
    },
    GROUPS: {
        "model": "Qwen/Qwen3-235B-A22B",
        "nodes": {"count": 4, "existingSecret": "node-key"},
        "gpu": {"count": 2, "tensorParallelSize": 2},
        "extraArgs": ["--pipeline-parallel-size=4"],
        "extraEnv": [{"name": "NCCL_SOCKET_IFNAME", "value": "eth0"}],
        "keys": {"apiKey": "secret", "huggingFaceToken": "hf_x", "metricsAuth": "api-key"},
        "tls": {"existingSecret": "certificate"},
        "stop": {"preStopSeconds": 5, "drainSeconds": 100},
        "autoscaling": {"enabled": True, "maxReplicas": 2},
        "volumes": {"accessMode": "ReadWriteMany"},
        "podLabels": {"team": "a"},
        "listenAddress": "::",
        **MONITORED,
    },
    "drain of 0 s": {"model": "m", "stop": {"drainSeconds": 0, "preStopSeconds": 1}},
    "drain of 600 s": {"model": "m", "stop": {"drainSeconds": 600}, "start": {"seconds": 7205}},
    **examples(),
}
UPGRADES = {"scaled": 3, "two replicas": 3, GROUPS: 0}
"""How many replicas there are in the cluster when a case is an upgrade."""
REFUSED: dict[str, dict[str, Any]] = {
    "model is empty": {},
    "serves its own model": {"demo": True, "model": "m"},
    "volumes.accessMode=ReadWriteMany": {"model": "m", "replicas": 2},
    "several pods share": {"model": "m", "autoscaling": {"enabled": True}},
    "several pods share the volumes": {
        "model": "m",
        "nodes": {"count": 2, "existingSecret": "node-key"},
    },
    "name it in nodes.existingSecret": {
        "model": "m",
        "nodes": {"count": 2},
        "volumes": {"accessMode": "ReadWriteMany"},
    },
    "each node needs GPUs": {
        "demo": True,
        "nodes": {"count": 2, "existingSecret": "node-key"},
        "volumes": {"accessMode": "ReadWriteMany"},
    },
    "the chart sets VLLM_HOST_IP": {
        "model": "m",
        "nodes": {"count": 2, "existingSecret": "node-key"},
        "volumes": {"accessMode": "ReadWriteMany"},
        "extraEnv": [{"name": "VLLM_HOST_IP", "value": "10.0.0.1"}],
    },
    "/nodes/count": {"model": "m", "nodes": {"count": 0}},
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
    "nothing is mounted at /home/holdfast/.cache/huggingface": {
        "model": "/home/holdfast/.cache/huggingface/hub/m"
    },
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
    "--shutdown-timeout=600": "stop.drainSeconds",
    "--port": "service.port",
    "--host": "listenAddress",
    "--uds=/tmp/x": "service.port",
    "--metrics-auth=api-key": "keys.metricsAuth",
    "--tensor-parallel-size": "gpu.tensorParallelSize",
    "-tp=2": "gpu.tensorParallelSize",
    "--nnodes=2": "nodes.count",
    "-n": "nodes.count",
    "--node-key-file=/x": "nodes.existingSecret",
    "--node-ssl-certfile=/x": "followers get no --ssl-ca-certs",
    "--ssl-certfile=/x": "tls.existingSecret",
    "--ssl-cert-reqs=2": "networkPolicy",
    "--api-key": "keys.apiKey",
    "--demo": "demo",
    "VLLM_API_KEY": "keys.apiKey",
    "HOLDFAST_ADMIN_API_KEY": "keys.adminApiKey",
    "HOLDFAST_METRICS_AUTH": "keys.metricsAuth",
    "HOLDFAST_NODE_SSL_KEYFILE": "followers get no --ssl-ca-certs",
    "HOLDFAST_LOG_FORMAT": "--log-format",
    "HF_HOME": "volumes.models",
}


def overriding(name: str) -> dict[str, Any]:
    """Values that set a flag or a variable past the chart."""
    if name.startswith("-"):
        return {"model": "m", "extraArgs": ["--max-model-len", "8", name]}
    return {"model": "m", "extraEnv": [{"name": name, "value": "x"}]}


def nodes(case: str) -> int:
    """How many nodes one engine of a case runs on."""
    return int(CASES[case].get("nodes", {}).get("count", 1))


every_case = pytest.mark.parametrize("case", CASES)
every_group = pytest.mark.parametrize("case", [case for case in CASES if nodes(case) > 1])


def pod_of_kserve() -> dict[str, Any]:
    """What KServe starts with our configuration, as a pod."""
    path = ROUTERS / "kserve" / "llm-inference-service-config.yaml"
    template = yaml.safe_load(path.read_text())["spec"]["template"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "main"}, "spec": template}


def render() -> Answer:
    """Every case, rendered in one process."""
    overriding_cases = {name: overriding(name) for name in MANAGED}
    cases = {**CASES, **REFUSED, **overriding_cases}
    cases = {name: {"image": IMAGE, **values} for name, values in cases.items()} | commands()
    request = {
        "chart": str(CHART),
        "cases": cases,
        "releases": RELEASES,
        "several nodes": SEVERAL_NODES,
        "upgrades": UPGRADES,
        "pods": {"KServe": pod_of_kserve()},
    }
    done = subprocess.run(
        [tool("ops-python"), "-m", "ops.render_chart"],
        cwd=ROOT / "tests",
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


def templates(answer: Answer, case: str) -> Documents:
    """The templates of the pods of a case: first of those that serve, then of those that follow."""
    kinds = {"Deployment", "LeaderWorkerSet"}
    (only,) = (one for one in documents(answer, case) if one["kind"] in kinds)
    pair = only["spec"].get("leaderWorkerTemplate")
    return [pair["leaderTemplate"], pair["workerTemplate"]] if pair else [only["spec"]["template"]]


def pod(answer: Answer, case: str) -> dict[str, Any]:
    return dict(templates(answer, case)[0]["spec"])


def container(answer: Answer, case: str) -> dict[str, Any]:
    (only,) = pod(answer, case)["containers"]
    return dict(only)


def arguments(only: dict[str, Any]) -> list[str]:
    """The arguments of a container, as they are in a pod that has an address."""
    return [word.replace("$(VLLM_HOST_IP)", POD_ADDRESS) for word in only["args"]]


def flag(answer: Answer, case: str, name: str) -> str:
    given = [text for text in container(answer, case)["args"] if text.startswith(f"{name}=")]
    return given[-1].partition("=")[2] if given else ""
