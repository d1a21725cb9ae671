"""`holdfast doctor --manifest`: hazards that stand in Compose files and Kubernetes manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.doctor.deployments import Deployment, read_deployments
from holdfast.doctor.findings import Finding, Severity
from holdfast.doctor.layout import read_layout
from holdfast.doctor.manifest_checks import STATE_DIRECTORY, check_deployment
from holdfast.errors import UsageError
from machines import doctor, findings

SERVICE = {
    "image": "holdfast:cuda",
    "command": ["serve", "Qwen/Qwen3-8B"],
    "restart": "on-failure:5",
    "stop_grace_period": "1m15s",
    "ipc": "host",
    "volumes": ["state:/home/holdfast/.local/state/holdfast"],
}
"""A service of Compose with nothing wrong."""

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a path in a manifest

CONTAINER: dict[str, Any] = {
    "name": "server",
    "image": "registry.example/holdfast:0.1.0",
    "args": ["serve", "Qwen/Qwen3-8B"],
    "lifecycle": {"preStop": {"sleep": {"seconds": 15}}},
    "startupProbe": {"httpGet": {"path": "/startupz", "port": 8000}},
    "livenessProbe": {"httpGet": {"path": "/livez", "port": 8000}},
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


def written(tmp_path: Path, *documents: Any) -> Path:
    path = tmp_path / "manifest.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return path


def service(**changes: Any) -> dict[str, Any]:
    return {"services": {"server": {**SERVICE, **changes}}}


def deployment(**changes: Any) -> dict[str, Any]:
    """A Deployment; `changes` are of its container but for those that a pod has."""
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
    (found,) = read_deployments(written(tmp_path, document), {})
    return found


def checked(
    tmp_path: Path, document: dict[str, Any], drain_seconds: float = 45
) -> dict[str, Finding]:
    found = only(tmp_path, document)
    layout = read_layout(found.arguments)
    return {
        finding.name: finding
        for finding in check_deployment(
            found, layout, drain_seconds=drain_seconds, state_directory=STATE_DIRECTORY
        )
    }


@pytest.mark.parametrize("document", [service(), deployment()], ids=["compose", "kubernetes"])
def test_a_sound_deployment_has_no_finding(tmp_path: Path, document: dict[str, Any]) -> None:
    """A Compose service and a Deployment, each as it should be."""
    seen = checked(tmp_path, document)
    assert {finding.severity for finding in seen.values()} == {Severity.OK}
    assert {finding.source for finding in seen.values()} == {only(tmp_path, document).source}


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({"restart": "on-failure", "image": "vllm/vllm-openai:v0.32.0", "command": "m"}, "warning"),
        ({"restart": "on-failure:3", "image": "vllm/vllm-openai"}, "warning"),
        ({"restart": "unless-stopped"}, "warning"),
        ({"restart": "on-failure"}, "warning"),
        ({"restart": "no"}, "warning"),
        ({"restart": "on-failure:3"}, "ok"),
    ],
)
def test_restart_policies(tmp_path: Path, changes: dict[str, Any], severity: str) -> None:
    """`on-failure` never restarts a stock image, and a policy without a bound loops for ever."""
    assert checked(tmp_path, service(**changes))["restart-policy"].severity == severity


def test_a_stock_image_exits_with_0(tmp_path: Path) -> None:
    """The finding says why `on-failure` does nothing there."""
    finding = checked(tmp_path, service(image="vllm/vllm-openai:v0.32.0", restart="on-failure:5"))
    assert "exits with 0" in finding["restart-policy"].seen


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({}, "ok"),
        ({"livenessProbe": {"tcpSocket": {"port": 8000}}}, "ok"),
        ({"livenessProbe": {"httpGet": {"path": "/health", "port": 8000}}}, "warning"),
        (
            {
                "livenessProbe": {"httpGet": {"path": "/health", "port": 8000}},
                "startupProbe": None,
            },
            "failure",
        ),
        (
            {
                "livenessProbe": {
                    "httpGet": {"path": "/health", "port": 8000},
                    "initialDelaySeconds": 1800,
                },
                "startupProbe": None,
            },
            "warning",
        ),
    ],
)
def test_liveness_probes(tmp_path: Path, changes: dict[str, Any], severity: str) -> None:
    """On `/health` they kill what would recover, and without a startup probe what starts."""
    assert checked(tmp_path, deployment(**changes))["liveness-probe"].severity == severity


@pytest.mark.parametrize(
    ("document", "drain_seconds", "severity"),
    [
        (service(), 45, "ok"),
        (service(), 46, "warning"),
        (service(), 75, "failure"),
        (service(stop_grace_period=None), 45, "failure"),
        (deployment(), 45, "ok"),
        (deployment(), 46, "warning"),
        (deployment(), 75, "failure"),
        (deployment(lifecycle=None), 60, "ok"),
        (deployment(terminationGracePeriodSeconds=None), 45, "failure"),
    ],
)
def test_stop_time_outs(
    tmp_path: Path, document: dict[str, Any], drain_seconds: float, severity: str
) -> None:
    """What passes before SIGTERM, the drain and the end of the engine have to fit."""
    assert checked(tmp_path, document, drain_seconds)["stop-time-out"].severity == severity


@pytest.mark.parametrize(
    ("document", "severity"),
    [
        (service(ipc=None, command=["serve", "m", "-tp", "2"]), "failure"),
        (service(ipc=None, image="holdfast:cpu", command=["serve", "--demo"]), "failure"),
        (service(ipc=None, shm_size="16gb", command=["serve", "m", "-tp", "2"]), "ok"),
        (service(ipc=None, shm_size="512m", command=["serve", "m", "-tp", "2"]), "warning"),
        (service(ipc=None), "ok"),
        (deployment(args=["serve", "m", "-tp", "2"], volumeMounts=[]), "failure"),
        (deployment(args=["serve", "m", "-tp", "2"], volumeMounts=[], hostIPC=True), "ok"),
        (deployment(args=["serve", "m", "-tp", "2"]), "ok"),
    ],
)
def test_shared_memory(tmp_path: Path, document: dict[str, Any], severity: str) -> None:
    """A container has 64 MiB unless it is given more."""
    assert checked(tmp_path, document)["shared-memory"].severity == severity


@pytest.mark.parametrize(
    ("document", "severity"),
    [
        (service(volumes=[]), "warning"),
        (service(volumes=["/home/holdfast/.local/state/holdfast"]), "warning"),
        (service(volumes=["home:/home/holdfast:rw"]), "ok"),
        (service(volumes=[{"type": "volume", "source": "s", "target": "/home"}]), "ok"),
        (service(volumes=[{"type": "tmpfs", "target": str(STATE_DIRECTORY)}]), "warning"),
        (deployment(volumes=[{"name": "state", "emptyDir": {}}]), "warning"),
        (deployment(volumeMounts=[]), "warning"),
    ],
)
def test_state_directories(tmp_path: Path, document: dict[str, Any], severity: str) -> None:
    """What is learned has to be on a volume that outlives the container."""
    assert checked(tmp_path, document)["state-directory"].severity == severity


@pytest.mark.parametrize(
    ("command", "is_warned"),
    [
        (["sh", "-c", "holdfast serve --demo"], True),
        (["/bin/bash", "-c", "sleep 1; exec holdfast serve --demo"], False),
        (["sh", "-c", "exec holdfast serve --demo"], False),
        ("holdfast serve --demo", False),
    ],
)
def test_shells_before_the_server(tmp_path: Path, command: Any, is_warned: bool) -> None:
    """A shell keeps SIGTERM to itself, unless it gives its process to the server."""
    seen = checked(tmp_path, service(entrypoint=command, command=None))
    assert ("entry-point" in seen) is is_warned


@pytest.mark.parametrize(
    ("document", "name"),
    [
        (service(environment={"VLLM_PLUGINS": "x"}), "plugins"),
        (service(environment=["VLLM_ENABLE_STARTUP_PLAN=1"]), "startup-plan"),
        (deployment(env=[{"name": "VLLM_PLUGINS", "value": "x"}]), "plugins"),
    ],
)
def test_variables_of_a_container(tmp_path: Path, document: dict[str, Any], name: str) -> None:
    """They are checked like those of this machine."""
    assert checked(tmp_path, document)[name].severity is Severity.FAILURE


def test_expandable_segments_of_a_container(tmp_path: Path) -> None:
    """Which GPUs a container will meet is not known, so it is a warning."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    document = service(environment=environment, command=["serve", "m", "-tp", "2"])
    assert checked(tmp_path, document)["expandable-segments"].severity is Severity.WARNING


@pytest.mark.parametrize(
    ("text", "image"),
    [
        ("${IMAGE:-holdfast:cpu}", "holdfast:cpu"),
        ("${IMAGE-holdfast:cpu}", "holdfast:cpu"),
        ("${TAG:-x}/holdfast", "given/holdfast"),
        ("holdfast:${NEEDED:?}", "holdfast:${NEEDED:?}"),
    ],
)
def test_variables_of_compose_are_filled_in(tmp_path: Path, text: str, image: str) -> None:
    """As Compose does it, but what is missing is left as it is."""
    path = written(tmp_path, service(image=text))
    (found,) = read_deployments(path, {"TAG": "given"})
    assert found.image == image


def test_other_containers_are_left_out(tmp_path: Path) -> None:
    """Only what runs Holdfast or vLLM is looked at, in every document and list of the file."""
    other = {"image": "prom/prometheus:v3.5.0"}
    both = {"services": {"server": SERVICE, "prometheus": other}}
    items = {"kind": "List", "items": [deployment(), {"kind": "ConfigMap", "data": {}}]}
    found = read_deployments(written(tmp_path, both, items, None), {})
    assert [one.source for one in found] == [
        "manifest.yaml: server",
        "manifest.yaml: holdfast/server",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "services: {server: [",
        "services: {server: 3}",
        "services: {prometheus: {image: prom/prometheus}}",
        "just text",
        "services: {server: {image: holdfast, stop_grace_period: soon}}",
        "services: {server: {image: holdfast, shm_size: lots}}",
        "kind: Deployment\nmetadata: {}\nspec: {template: {spec: {containers: [{image: vllm}]}}}",
    ],
)
def test_a_file_that_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    """With one line that names the file."""
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"file\.yaml"):
        read_deployments(path, {})


def test_a_key_in_a_broken_file_is_not_shown(tmp_path: Path) -> None:
    """The line is named by its number, for a key may stand there."""
    path = tmp_path / "file.yaml"
    path.write_text("services:\n  server:\n    environment: {VLLM_API_KEY: @sk-secret}\n")
    with pytest.raises(UsageError) as refused:
        read_deployments(path, {})
    assert "see line 3" in refused.value.cause
    assert "sk-secret" not in refused.value.line


def test_the_command_reads_the_drain_of_the_container(tmp_path: Path) -> None:
    """Its own flags and variables count, not those of this machine."""
    longer = service(command=["serve", "m", "--drain-timeout", "120"])
    done = doctor("--json", "--manifest", str(written(tmp_path, longer)))
    assert done.returncode == 2
    (failed,) = (one for one in findings(done) if one["severity"] == "failure")
    assert failed["name"] == "stop-time-out"
    assert failed["source"] == "manifest.yaml: server"
    by_variable = service(environment={"HOLDFAST_DRAIN_TIMEOUT": "120"})
    done = doctor("--json", "--manifest", str(written(tmp_path, by_variable)))
    assert done.returncode == 2


def test_the_command_refuses_what_the_container_would_refuse(tmp_path: Path) -> None:
    """A flag that `serve` does not take in the container is a failure of that container."""
    done = doctor("--json", "--manifest", str(written(tmp_path, service(command="serve --grpc"))))
    failed = [one for one in findings(done) if one["severity"] == "failure"]
    assert [(one["name"], one["source"]) for one in failed] == [
        ("command-line", "manifest.yaml: server")
    ]


def test_this_machine_is_left_out_unless_it_is_asked_about(tmp_path: Path) -> None:
    """A manifest alone is not about the machine where it is checked."""
    path = str(written(tmp_path, service()))
    (source,) = {one["source"] for one in findings(doctor("--json", "--manifest", path))}
    assert source == "manifest.yaml: server"
    both = findings(doctor("--json", "--demo", "--manifest", path))
    assert "this machine" in {one["source"] for one in both}


def test_a_model_of_the_container_need_not_be_here(tmp_path: Path) -> None:
    """A path in a container is not a path of this machine."""
    document = service(command=["serve", "/models/mine"])
    assert doctor("--manifest", str(written(tmp_path, document))).returncode == 0
