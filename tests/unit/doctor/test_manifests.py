"""`holdfast doctor --manifest`: hazards in what Compose resolved, and in Kubernetes manifests."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli import parse_serve
from holdfast.doctor.deployments import HOME, SHARED_MEMORY, STATE_DIRECTORY, Deployment
from holdfast.doctor.findings import Finding, Severity
from holdfast.doctor.manifest_checks import check_deployment
from holdfast.doctor.manifests import read_deployments
from holdfast.doctor.parallelism import read_layout
from holdfast.doctor.pods import quantity
from holdfast.errors import UsageError
from holdfast.settings.yaml_file import MOST_FILE_BYTES
from machines import GIB, doctor, findings


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


@pytest.mark.parametrize("document", [service(), deployment()], ids=["compose", "kubernetes"])
def test_a_sound_deployment_has_no_finding(tmp_path: Path, document: dict[str, Any]) -> None:
    """A Compose service and a Deployment, each as it should be."""
    seen = checked(tmp_path, document)
    assert {finding.severity for finding in seen.values()} == {Severity.OK}
    assert {finding.source for finding in seen.values()} == {only(tmp_path, document).source}


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({"restart": "on-failure", "image": "vllm/vllm-openai", "command": ["m"]}, "warning"),
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
        (service(ipc=None, shm_size=f"{GIB}", command=["serve", "m", "-tp", "2"]), "ok"),
        (service(ipc=None, shm_size=f"{GIB // 2}", command=["serve", "m", "-tp", "2"]), "warning"),
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
        (service(volumes=[{"type": "volume", "target": STATE_DIRECTORY}]), "warning"),
        (service(volumes=[volume("/home")]), "ok"),
        (service(volumes=[volume("/home/holdfast/", type="bind", source="/srv")]), "ok"),
        (service(volumes=[{"type": "tmpfs", "target": STATE_DIRECTORY}]), "warning"),
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
        (["bash", "-lc", "holdfast serve --demo"], True),
        (["bash", "-ec", "# start\nset -e\nexec holdfast serve \\\n  --demo"], False),
        (["sh", "-c", 'exec "$$@"', "--", "holdfast", "serve", "--demo"], False),
        (["holdfast", "serve", "--demo"], False),
    ],
)
def test_shells_before_the_server(tmp_path: Path, command: list[str], is_warned: bool) -> None:
    """A shell keeps SIGTERM to itself, unless it gives its process to the server."""
    seen = checked(tmp_path, service(entrypoint=command, command=None))
    assert ("entry-point" in seen) is is_warned


@pytest.mark.parametrize(
    ("document", "name"),
    [
        (service(environment={"VLLM_PLUGINS": "x"}), "plugins"),
        (service(environment={"VLLM_ENABLE_STARTUP_PLAN": "1"}), "startup-plan"),
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
    ("changes", "named"),
    [
        ({"image": "holdfast:${TAG:-cuda}"}, "`image`"),
        ({"environment": {"HF_TOKEN": "$HF_TOKEN"}}, "`environment`"),
        ({"environment": ["HF_TOKEN"]}, "`environment`"),
        ({"env_file": "server.env"}, "`env_file`"),
        ({"extends": {"service": "base"}}, "`extends`"),
        ({"command": "serve m"}, "`command`"),
        ({"tmpfs": "/scratch"}, "`tmpfs`"),
        ({"volumes": ["state:/state"]}, "`volumes`"),
        ({"restart": False}, "`restart`"),
    ],
)
def test_a_file_that_compose_has_not_resolved_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    """The line says what is left to resolve, and the command that does it."""
    with pytest.raises(UsageError, match=rf"manifest\.yaml: .*{named}") as refused:
        only(tmp_path, service(**changes))
    assert "docker compose config | holdfast doctor --manifest -" in refused.value.remedy


@pytest.mark.parametrize("document", [{}, service()])
def test_a_file_that_includes_others_is_refused(tmp_path: Path, document: dict[str, Any]) -> None:
    """With services of its own and without."""
    with pytest.raises(UsageError, match="`include`"):
        only(tmp_path, {**document, "include": ["other.yaml"]})


def test_a_dollar_that_compose_wrote_twice_is_one(tmp_path: Path) -> None:
    """It writes so every dollar that is no variable of its own."""
    document = service(command=["serve", "$$5"], environment={"HF_TOKEN": "a$$b"})
    assert only(tmp_path, document).arguments == ("$5",)
    assert only(tmp_path, document).environment == {"HF_TOKEN": "a$b"}


def test_other_containers_are_left_out(tmp_path: Path) -> None:
    """Only what runs Holdfast or vLLM is looked at, in every document and list of the file."""
    other = {"image": "prom/prometheus:v3.5.0"}
    both = {"services": {"server": SERVICE, "prometheus": other}}
    items = {"kind": "List", "items": [deployment(), {"kind": "ConfigMap", "data": {}}]}
    found = read_deployments([written(tmp_path, both, items, None)])
    assert [one.source for one in found] == [
        "manifest.yaml: server",
        "manifest.yaml: holdfast/server",
    ]


def test_a_container_that_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    """The others are looked at all the same, and what is not ours may be as it likes."""
    services = {
        "soon": {**SERVICE, "stop_grace_period": "soon"},
        "lots": {**SERVICE, "shm_size": "lots", "ipc": None},
        "server": SERVICE,
        "database": {"image": "postgres", "shm_size": "lots"},
    }
    document = {"services": services}
    done = doctor("--json", "--manifest", str(written(tmp_path, document)))
    unread = {one["source"] for one in findings(done) if one["name"] == "manifest"}
    assert unread == {f"manifest.yaml: {name}" for name in ("soon", "lots")}
    assert "manifest.yaml: server" in {one["source"] for one in findings(done)}


@pytest.mark.parametrize(
    "document",
    [
        {"kind": "CronJob", "spec": {"jobTemplate": {"spec": {"template": {"spec": ONE}}}}},
        {"kind": "PodList", "items": [{"metadata": {"labels": {}}, "spec": ONE}]},
        {"kind": "LeaderWorkerSet", "spec": {"leaderWorkerTemplate": {"leaderTemplate": ONE}}},
        {"kind": "InferenceService", "spec": {"predictor": ONE}},
    ],
)
def test_a_pod_is_found_wherever_it_is(tmp_path: Path, document: dict[str, Any]) -> None:
    """Whatever kind of resource holds it."""
    document = {**document, "metadata": {"name": "it"}}
    assert only(tmp_path, document).source == "manifest.yaml: it/server"


@pytest.mark.parametrize(
    "server",
    [
        {"image": "vllm/vllm-router:1", "command": ["--port", "80"]},
        {"image": "curl", "command": ["vllm", "bench", "serve"]},
        {"image": "holdfast:cpu", "command": ["doctor"]},
    ],
)
def test_what_is_no_server_is_left_out(tmp_path: Path, server: dict[str, Any]) -> None:
    """Although its image or its words are named alike."""
    document = {"services": {"other": server, "server": SERVICE}}
    assert only(tmp_path, document).source == "manifest.yaml: server"


def test_a_name_that_is_served_makes_no_holdfast(tmp_path: Path) -> None:
    """The word of the program counts alone, and the flags of the image's own are read."""
    words = ["--model", "m", "--served-model-name", "holdfast", "-tp", "2"]
    found = only(tmp_path, service(image="vllm/vllm-openai:v0.32.0", command=words))
    assert found.is_stock
    assert read_layout(found.arguments).tensor_parallel_size == 2


def test_files_that_would_not_end_are_refused(tmp_path: Path) -> None:
    """A few lines of aliases can stand for more than there is memory."""
    lines = [
        "a0: &a0 [x]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)),
    ]
    with pytest.raises(UsageError, match="is not YAML"):
        read_deployments([text_of(tmp_path, "\n".join(lines))])
    with pytest.raises(UsageError, match="is not YAML"):
        read_deployments([text_of(tmp_path, "x" * (MOST_FILE_BYTES + 1))])


def test_the_manifest_may_come_from_standard_input() -> None:
    """As `docker compose config` and `helm template` print it."""
    done = doctor("--json", "--manifest", "-", given=yaml.safe_dump(service()))
    assert done.returncode == 0
    assert {one["source"] for one in findings(done)} == {"-: server"}


def test_a_variable_without_a_value_is_handed_on(tmp_path: Path) -> None:
    """Whoever starts the container may set it."""
    document = service(environment={"VLLM_PLUGINS": None})
    assert only(tmp_path, document).unseen_variables == {"VLLM_PLUGINS"}


def test_what_comes_from_elsewhere_is_not_called_unset(tmp_path: Path) -> None:
    """A secret or another file may set it."""
    env = [{"name": "VLLM_PLUGINS", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
    assert "cannot be checked from here" in checked(tmp_path, deployment(env=env))["plugins"].seen
    assert "is not set" in checked(tmp_path, deployment())["plugins"].seen


def test_references_of_kubernetes_are_expanded(tmp_path: Path) -> None:
    """From the variables of the container; `$$(NAME)` is none."""
    env = [{"name": "DRAIN", "value": "120"}, {"name": "ALSO", "value": "$(DRAIN)"}]
    args = ["serve", "m", "--drain-timeout=$(ALSO)", "--api-key=$$(DRAIN)", "$(NOPE)"]
    found = only(tmp_path, deployment(env=env, args=args))
    assert found.arguments[1:] == ("--drain-timeout=120", "--api-key=$(DRAIN)", "$(NOPE)")


DRAIN_OF_A_SHELL = ["sh", "-c", "exec holdfast serve m --drain-timeout $${D:-45} > /tmp/log"]


@pytest.mark.parametrize(
    "command",
    [DRAIN_OF_A_SHELL, ["sh", "-c", "exec holdfast serve m --drain-timeout `cat x` 2>&1"]],
)
def test_a_value_that_is_not_known_is_no_failure(tmp_path: Path, command: list[str]) -> None:
    """Whoever starts the container may give the right one."""
    assert failures(tmp_path, service(command=command)) == []


@pytest.mark.parametrize(
    ("document", "severity"),
    [
        (service(stop_grace_period="10s"), "failure"),
        (service(stop_grace_period="10s", environment={"HF_TOKEN": None}), "failure"),
        (service(stop_grace_period="10s", command=DRAIN_OF_A_SHELL), "warning"),
        (service(stop_grace_period="10s", command=["serve", "m", "--config=x.yaml"]), "warning"),
        (service(stop_grace_period="10s", environment={"HOLDFAST_DRAIN_TIMEOUT": None}), "warning"),
        (deployment(terminationGracePeriodSeconds=10), "failure"),
        (deployment(terminationGracePeriodSeconds=10, envFrom=[{"secretRef": {}}]), "warning"),
    ],
)
def test_what_is_not_seen_may_be_right(
    tmp_path: Path, document: dict[str, Any], severity: str
) -> None:
    """A default that may not be in use is no reason for a failure."""
    path = written(tmp_path, document)
    found = {one["name"]: one for one in findings(doctor("--json", "--manifest", str(path)))}
    assert found["stop-time-out"]["severity"] == severity


def test_a_file_of_flags_is_not_looked_for_here(tmp_path: Path) -> None:
    """It is in the container."""
    path = written(tmp_path, service(command=["serve", "--config", "/etc/holdfast.yaml"]))
    done = doctor("--json", "--manifest", str(path))
    assert done.returncode == 0
    assert "manifest" in {one["name"] for one in findings(done)}


def test_underscores_in_flags_of_a_container(tmp_path: Path) -> None:
    """They are dashes, as for `serve`."""
    document = service(command=["serve", "m", "--drain_timeout=120"])
    assert failures(tmp_path, document) == ["stop-time-out"]


@pytest.mark.parametrize(
    "document",
    [
        deployment(resources={"limits": {"nvidia.com/gpu": 1}}, args=["serve", "m", "-tp", "2"]),
        service(
            command=["serve", "m", "-tp", "2"],
            deploy={
                "resources": {"reservations": {"devices": [{"count": 1, "capabilities": ["gpu"]}]}}
            },
        ),
    ],
)
def test_more_ranks_than_gpus_of_the_container(tmp_path: Path, document: dict[str, Any]) -> None:
    """vLLM would find too few."""
    assert checked(tmp_path, document)["gpu"].severity is Severity.FAILURE


@pytest.mark.parametrize(
    ("limit", "size_bytes"),
    [
        ("64m", Decimal("0.064")),
        ("1Pi", 1024**5),
        ("1e9", 10**9),
        (5, 5),
        ("1.5Gi", 3 * 512**3 * 4),
    ],
)
def test_quantities_of_kubernetes(limit: object, size_bytes: float) -> None:
    """A small m is a thousandth, and there are exponents."""
    assert quantity(limit) == size_bytes


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({"environment": {"XDG_STATE_HOME": "/data"}, "volumes": [volume("/data/")]}, "ok"),
        ({"environment": {"HOME": "/data"}, "volumes": [volume("/data")]}, "ok"),
        (
            {
                "command": ["serve", "m", "--learned-dir", "~/kept"],
                "volumes": [volume("/home/holdfast/kept")],
            },
            "ok",
        ),
        ({"environment": {"HOLDFAST_LEARNED_DIR": "~"}, "volumes": [volume(HOME)]}, "ok"),
        ({"volumes": [volume(STATE_DIRECTORY, read_only=True)]}, "warning"),
        ({"tmpfs": [STATE_DIRECTORY]}, "warning"),
    ],
)
def test_the_home_of_the_container(tmp_path: Path, changes: dict[str, Any], severity: str) -> None:
    """What is learned is kept there, and has to be written there."""
    assert checked(tmp_path, service(**changes))["state-directory"].severity == severity


@pytest.mark.parametrize("kind", ["secret", "configMap", "ephemeral", "projected"])
def test_volumes_that_do_not_keep(tmp_path: Path, kind: str) -> None:
    """They are made anew for each pod, or cannot be written."""
    document = deployment(volumes=[{"name": "state", kind: {}}])
    assert checked(tmp_path, document)["state-directory"].severity is Severity.WARNING


@pytest.mark.parametrize(
    "pre_stop",
    [{"sleep": {"seconds": 60}}, {"exec": {"command": ["/bin/sh", "-c", "sleep 60"]}}],
)
def test_what_passes_before_the_stop(tmp_path: Path, pre_stop: dict[str, Any]) -> None:
    """However the container sleeps."""
    found = only(tmp_path, deployment(lifecycle={"preStop": pre_stop}))
    assert found.pre_stop_seconds == 60


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"restart": "no"}, "no"),
        ({"restart": None, "deploy": {"restart_policy": {"condition": "none"}}}, "no"),
        (
            {
                "restart": None,
                "deploy": {"restart_policy": {"condition": "on-failure", "max_attempts": 5}},
            },
            "on-failure:5",
        ),
    ],
)
def test_restart_policies_are_read(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    """A policy of `deploy` counts where there is no other."""
    assert only(tmp_path, service(**changes)).restart == word


def test_a_stock_server_that_outlives_its_engine(tmp_path: Path) -> None:
    """Nothing restarts it then, whatever the policy."""
    environment = {"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}
    document = service(image="vllm/vllm-openai", command=["m"], environment=environment)
    assert checked(tmp_path, document)["restart-policy"].severity is Severity.WARNING


@pytest.mark.parametrize(
    "text",
    [
        "services: {server: [",
        "services: {server: 3}",
        "services: {prometheus: {image: prom/prometheus}}",
        "just text",
    ],
)
def test_a_file_that_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    """With one line that names the file."""
    with pytest.raises(UsageError, match=r"file\.yaml"):
        read_deployments([text_of(tmp_path, text)])


@pytest.mark.parametrize(
    "changes",
    [
        {"command": ["serve", "m", "--drain-timeout", "120"]},
        {"environment": {"HOLDFAST_DRAIN_TIMEOUT": "120"}},
    ],
)
def test_the_command_reads_the_drain_of_the_container(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Its own flags and variables count, not those of this machine."""
    assert failures(tmp_path, service(**changes)) == ["stop-time-out"]


def test_the_command_refuses_what_the_container_would_refuse(tmp_path: Path) -> None:
    """A flag that `serve` does not take in the container is a failure of that container."""
    assert failures(tmp_path, service(command=["serve", "--grpc"])) == ["command-line"]


@pytest.mark.parametrize(
    ("image", "severity"),
    [("holdfast", "failure"), ("vllm/vllm-openai:v0.32.0", "warning")],
)
def test_a_container_of_several_nodes(tmp_path: Path, image: str, severity: str) -> None:
    """It is refused where it runs Holdfast; of vLLM's own one rank is looked at, which is said."""
    words = ["m", "-tp", "2", "-n", "2"]
    command = words if image.startswith("vllm") else ["serve", *words]
    path = str(written(tmp_path, service(image=image, command=command)))
    done = doctor("--json", "--manifest", path)
    (found,) = [one for one in findings(done) if one["name"] == "command-line"]
    assert (found["severity"], found["source"]) == (severity, "manifest.yaml: server")
    assert "--nnodes 2" in found["seen"]


def test_this_machine_is_left_out_unless_it_is_asked_about(tmp_path: Path) -> None:
    """A manifest alone is not about the machine where it is checked."""
    path = str(written(tmp_path, service()))
    (source,) = {one["source"] for one in findings(doctor("--json", "--manifest", path))}
    assert source == "manifest.yaml: server"
    both = findings(doctor("--json", "--demo", "--manifest", path))
    assert "this machine" in {one["source"] for one in both}


@pytest.mark.parametrize(
    ("environment", "is_refused"),
    [({}, True), ({"VLLM_API_KEY": "secret"}, False), ({"VLLM_API_KEY": None}, False)],
)
def test_keys_that_the_container_would_refuse(
    tmp_path: Path, environment: dict[str, str | None], is_refused: bool
) -> None:
    """Metrics cannot ask for a key that there is not; one from elsewhere may be there."""
    command = ["serve", "m", "--metrics-auth=api-key"]
    found = failures(tmp_path, service(command=command, environment=environment))
    assert found == (["keys"] if is_refused else [])


def test_a_model_of_the_container_need_not_be_here(tmp_path: Path) -> None:
    """A path in a container is not a path of this machine."""
    assert failures(tmp_path, service(command=["serve", "/models/mine"])) == []
