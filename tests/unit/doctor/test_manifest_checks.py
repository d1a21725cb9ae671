"""`holdfast doctor --manifest`: hazards of a container."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.doctor.deployments import HOME, STATE_DIRECTORY
from holdfast.doctor.findings import Severity
from holdfast.doctor.manifest_checks import check_follower
from holdfast.doctor.parallelism import read_layout
from machines import GIB, doctor, findings
from manifests import (
    checked,
    deployment,
    only,
    service,
    volume,
    written,
)

ROOT = Path(__file__).parents[3]


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
    """`on-failure` never restarts a stock image, and a policy without a limit loops forever."""
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


@pytest.mark.parametrize("before", ["", "export A='1\n2'\n", "# It's\n"])
def test_a_quoted_argument_may_have_several_lines(tmp_path: Path, before: str) -> None:
    """As JSON often does."""
    script = f"{before}exec vllm serve m \\\n --x '{{\n  \"a\": 1\n}}' -tp 2\necho done"
    document = deployment(command=["sh", "-c", script], args=[])
    assert only(tmp_path, document).arguments == ("m", "--x", '{\n  "a": 1\n}', "-tp", "2")


def test_an_apostrophe_in_a_here_document_begins_no_quote(tmp_path: Path) -> None:
    """It would hide the server up to the next apostrophe."""
    script = "cat <<END\nIt's\nEND\nexec vllm serve m\ncat <<END\nThat's it\nEND"
    assert only(tmp_path, deployment(command=["sh", "-c", script], args=[])).arguments == ("m",)


def test_the_first_server_of_a_script_counts(tmp_path: Path) -> None:
    """Also if it has a quoted argument of several lines, and the follower after it has none."""
    script = (
        "if [ $RANK = 0 ]; then\n  exec holdfast serve m --x '{\n  \"a\": 1\n}'\n"
        "else\n  exec holdfast follow head\nfi"
    )
    found = only(tmp_path, deployment(command=["sh", "-c", script], args=[]))
    assert (found.is_follower, found.arguments) == (False, ("m", "--x", '{\n  "a": 1\n}'))


@pytest.mark.parametrize(
    ("document", "name"),
    [
        (service(environment={"VLLM_PLUGINS": "x"}), "plugins"),
        (service(environment={"VLLM_ENABLE_STARTUP_PLAN": "1"}), "startup-plan"),
        (deployment(env=[{"name": "VLLM_PLUGINS", "value": "x"}]), "plugins"),
        (
            deployment(
                env=[{"name": "HOLDFAST_API_KEY", "valueFrom": {"secretKeyRef": {"name": "s"}}}]
            ),
            "variables",
        ),
    ],
)
def test_variables_of_a_container(tmp_path: Path, document: dict[str, Any], name: str) -> None:
    """They are checked like those of this machine."""
    assert checked(tmp_path, document)[name].severity is Severity.FAILURE


def test_a_mistyped_variable_of_a_container_is_told_once(tmp_path: Path) -> None:
    """As the finding about variables, and the others are read."""
    path = written(tmp_path, service(environment={"HOLDFAST_API_KEY": "x"}))
    done = doctor("--manifest", str(path), "--json")
    assert [one["name"] for one in findings(done) if one["severity"] != "ok"] == ["variables"]
    assert done.returncode == 2


def test_an_empty_variable_of_vllm_is_not_set(tmp_path: Path) -> None:
    """So Compose prints one without a value, and `serve` drops it; only VLLM_PLUGINS counts."""
    environment = {"VLLM_WORKER_MULTIPROC_METHOD": "", "VLLM_PLUGINS": ""}
    seen = checked(tmp_path, service(environment=environment))
    assert {name for name, one in seen.items() if one.severity is Severity.FAILURE} == {"plugins"}


def test_expandable_segments_of_a_container(tmp_path: Path) -> None:
    """Which GPUs a container will meet is not known, so it is a warning."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    document = service(environment=environment, command=["serve", "m", "-tp", "2"])
    assert checked(tmp_path, document)["expandable-segments"].severity is Severity.WARNING


def test_a_name_that_is_served_makes_no_holdfast(tmp_path: Path) -> None:
    """The word of the program counts alone, and the flags of the image's own are read."""
    words = ["--model", "m", "--served-model-name", "holdfast", "-tp", "2"]
    found = only(tmp_path, service(image="vllm/vllm-openai:v0.32.0", command=words))
    assert found.is_stock
    assert read_layout(found.arguments).tensor_parallel_size == 2


def test_what_comes_from_elsewhere_is_not_called_unset(tmp_path: Path) -> None:
    """A secret or another file may set it."""
    env = [{"name": "VLLM_PLUGINS", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
    assert "cannot be checked from here" in checked(tmp_path, deployment(env=env))["plugins"].seen
    assert "is not set" in checked(tmp_path, deployment())["plugins"].seen


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
    finding = checked(tmp_path, document)["gpu"]
    assert finding.severity is Severity.FAILURE
    assert finding.seen == "2 GPUs needed, 1 given to the container."
    assert finding.remedy == "give the container more, or lower --tensor-parallel-size."


def test_one_needed_gpu_is_singular(tmp_path: Path) -> None:
    """Compose may give a container none."""
    finding = checked(tmp_path, service(gpus=[{"count": 0}]))["gpu"]
    assert finding.seen == "1 GPU needed, 0 given to the container."


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
    """They are new for each pod, or cannot be written."""
    document = deployment(volumes=[{"name": "state", kind: {}}])
    assert checked(tmp_path, document)["state-directory"].severity is Severity.WARNING


def test_a_stock_server_that_outlives_its_engine(tmp_path: Path) -> None:
    """Nothing restarts it then, whatever the policy."""
    environment = {"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}
    document = service(image="vllm/vllm-openai", command=["m"], environment=environment)
    assert checked(tmp_path, document)["restart-policy"].severity is Severity.WARNING


DRAIN = "--head-drain-timeout=60"


def follower() -> dict[str, Any]:
    """What Compose makes of our file for a follower."""
    text = (ROOT / "deploy" / "compose" / "follower.yaml").read_text()
    document: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+[^}]*\}", "192.0.2.1", text))
    (only_one,) = document["services"].values()
    volumes = (text.split(":") for text in only_one["volumes"])
    only_one["volumes"] = [volume(target, source=source) for source, target in volumes]
    return document


def test_our_follower_has_no_finding(tmp_path: Path) -> None:
    """It is checked without the flags that its head has."""
    done = doctor("--json", "--manifest", str(written(tmp_path, follower())))
    assert done.returncode == 0, done.stdout
    assert {(one["name"], one["severity"]) for one in findings(done)} == {
        ("manifest", "ok"),
        ("stop-time-out", "ok"),
        ("shared-memory", "ok"),
    }
    assert {one["source"] for one in findings(done)} == {"manifest.yaml: follower"}


@pytest.mark.parametrize(
    ("document", "warned"),
    [
        (service(command=["follow", "h"], stop_grace_period="10s"), {"stop-time-out"}),
        (service(command=["follow", "h"], ipc=None), {"shared-memory"}),
        (deployment(args=["follow", "h"], terminationGracePeriodSeconds=44), {"stop-time-out"}),
        (deployment(args=["follow", "h"], terminationGracePeriodSeconds=45), set()),
        (service(command=["follow", "h", DRAIN], stop_grace_period="89s"), {"stop-time-out"}),
        (service(command=["follow", "h", DRAIN], stop_grace_period="90s"), set()),
        (service(command=["follow", "h", "--head-drain-timeout=x"]), set()),
    ],
)
def test_what_ends_a_follower(tmp_path: Path, document: dict[str, Any], warned: set[str]) -> None:
    """The drain is that of its head; and none of it is certain, since its head has its flags."""
    seen = list(check_follower(only(tmp_path, document)))
    assert {one.name for one in seen if one.severity is Severity.WARNING} == warned
    assert Severity.FAILURE not in {one.severity for one in seen}


@pytest.mark.parametrize(
    ("document", "is_cut_off"),
    [
        (service(command=["follow", "h"], stop_grace_period="0s"), False),
        (service(command=["follow", "h", DRAIN], stop_grace_period="60s"), True),
        (service(command=["follow", "h", DRAIN], stop_grace_period="61s"), False),
        (deployment(args=["follow", "h", DRAIN], terminationGracePeriodSeconds=75), True),
    ],
)
def test_a_follower_that_cannot_outlive_the_drain_of_its_head(
    tmp_path: Path, document: dict[str, Any], *, is_cut_off: bool
) -> None:
    """The warning says what happens to answers, not only to an engine that stops slowly."""
    seen = {one.name: one.seen for one in check_follower(only(tmp_path, document))}
    assert ("killed while the head drains" in seen["stop-time-out"]) == is_cut_off


@pytest.mark.parametrize(
    "command",
    [
        ["holdfast", "follow", "h"],
        ["python", "-m", "holdfast", "follow", "h"],
        ["sh", "-c", "exec holdfast follow h --node-key-file /k"],
    ],
)
def test_a_follower_is_recognised(tmp_path: Path, command: list[str]) -> None:
    """However its command is written, and whatever its image is called."""
    found = only(tmp_path, service(image="x", entrypoint=command, command=None))
    assert (found.is_follower, found.is_ours) == (True, False)
