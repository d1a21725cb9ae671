"""Manifests of Compose and Kubernetes, and what the doctor reads and finds in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from holdfast.cli import parse_serve
from holdfast.doctor.command import read_deployments
from holdfast.doctor.deployments import SHARED_MEMORY, STATE_DIRECTORY, Deployment
from holdfast.doctor.findings import Finding
from holdfast.doctor.manifest_checks import check_deployment, check_follower
from holdfast.doctor.parallelism import read_layout
from machines import doctor, findings


def volume(target: str, **changes: Any) -> dict[str, Any]:
    return {"type": "volume", "source": "x", "target": target, **changes}


SERVICE = {
    "image": "holdfast:cuda",
    "command": ["serve", "Qwen/Qwen3-8B"],
    "restart": "on-failure:5",
    "stop_grace_period": "1m15s",
    "ipc": "host",
    "volumes": [volume(STATE_DIRECTORY)],
}
"""A service with nothing wrong, as `docker compose config` prints it."""

LONG_START = {"periodSeconds": 10, "failureThreshold": 180, "timeoutSeconds": 5}

CONTAINER: dict[str, Any] = {
    "name": "server",
    "image": "registry.example/holdfast:0.1.0",
    "args": ["serve", "Qwen/Qwen3-8B"],
    "lifecycle": {"preStop": {"sleep": {"seconds": 15}}},
    "startupProbe": {"httpGet": {"path": "/startupz", "port": 8000}, **LONG_START},
    "readinessProbe": {"httpGet": {"path": "/readyz", "port": 8000}, "timeoutSeconds": 5},
    "livenessProbe": {"httpGet": {"path": "/livez", "port": 8000}, "timeoutSeconds": 5},
    "volumeMounts": [
        {"name": "shm", "mountPath": SHARED_MEMORY},
        {"name": "state", "mountPath": "/home/holdfast/.local/state/holdfast"},
    ],
}
POD: dict[str, Any] = {
    "terminationGracePeriodSeconds": 90,
    "volumes": [
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "state", "persistentVolumeClaim": {"claimName": "state"}},
    ],
}
"""A container and the rest of its pod, with nothing wrong."""
ONE = {"containers": [CONTAINER]}
DRAIN_OF_A_SHELL = ["sh", "-c", "exec holdfast serve m --drain-timeout $${D:-45} > /tmp/log"]


def written(tmp_path: Path, *documents: Any) -> Path:
    path = tmp_path / "manifest.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return path


def service(**changes: Any) -> dict[str, Any]:
    return {"services": {"server": {**SERVICE, **changes}}}


def deployment(**changes: Any) -> dict[str, Any]:
    """Return a Deployment; `changes` are of its container, except those that a pod has."""
    of_pod = {"hostIPC", "terminationGracePeriodSeconds", "volumes"}
    pod = {**POD, **{name: value for name, value in changes.items() if name in of_pod}}
    of_container = {name: value for name, value in changes.items() if name not in of_pod}
    pod["containers"] = [{**CONTAINER, **of_container}]
    return {
        "kind": "Deployment",
        "metadata": {"name": "holdfast"},
        "spec": {"template": {"spec": pod}},
    }


def only(tmp_path: Path, document: dict[str, Any]) -> Deployment:
    (found,) = read_deployments([written(tmp_path, document)])
    return found


def checked(
    tmp_path: Path, document: dict[str, Any], drain_seconds: float = 45
) -> dict[str, Finding]:
    found = only(tmp_path, document)
    given = {"HOLDFAST_DRAIN_TIMEOUT": str(drain_seconds), **found.settings_environment}
    variables = {name: value for name, value in given.items() if name.startswith("HOLDFAST")}
    settings = parse_serve(found.arguments, variables, needs_model=False)
    return {
        finding.name: finding
        for finding in check_deployment(found, read_layout(found.arguments), settings)
    }


def failures(tmp_path: Path, document: dict[str, Any]) -> list[str]:
    """The failures that the command finds."""
    done = doctor("--json", "--manifest", str(written(tmp_path, document)))
    failed = [one for one in findings(done) if one["severity"] == "failure"]
    assert {one["source"] for one in failed} <= {"manifest.yaml: server"}
    assert done.returncode == (2 if failed else 0)
    return [one["name"] for one in failed]


def text_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    return path


def hazards_of(found: Deployment) -> list[Finding]:
    """What the checks have against one container, with no variable of its environment."""
    if found.is_follower:
        return [one for one in check_follower(found) if one.severity != "ok"]
    settings = parse_serve(found.arguments, {}, needs_model=False)
    findings_of_it = check_deployment(found, read_layout(found.arguments), settings)
    return [one for one in findings_of_it if one.severity != "ok"]
