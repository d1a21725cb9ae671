"""`holdfast doctor` as users run it, with manifests and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast import __version__
from holdfast.doctor.checks import check_machine
from holdfast.doctor.command import read_deployments
from holdfast.doctor.findings import as_lines
from holdfast.doctor.parallelism import Layout
from holdfast.errors import UsageError
from holdfast.settings.yaml_files import MAX_FILE_BYTES
from machines import (
    SIZED,
    SPARK,
    doctor,
    findings,
)
from manifests import (
    DRAIN_OF_A_SHELL,
    SERVICE,
    deployment,
    failures,
    only,
    service,
    text_of,
    written,
)
from peer_records import FOLLOWER
from peer_servers import closed_ports, peer_server, telling

HEAD = ("--master-addr", "10.0.0.1", "--node-key-file", "/key")


@pytest.mark.parametrize(
    ("flags", "seen"),
    [
        (("-dp", "4", "-dpl", "1"), "--data-parallel-size-local 1 of --data-parallel-size 4"),
        (("-n", "2", "-dp", "2", *HEAD), "--nnodes 2 is not supported with --data-parallel-size"),
        (("-n", "2"), "--nnodes 2 needs --node-key-file"),
    ],
)
def test_replicas_of_other_nodes_and_half_a_head_are_refused(
    flags: tuple[str, ...], seen: str
) -> None:
    """Once, as `serve` does, which understands the short forms too."""
    done = doctor("m", "--json", *SIZED, *flags)
    assert done.returncode == 2
    (refusal,) = [one for one in findings(done) if one["name"] == "command-line"]
    assert seen in refusal["seen"]


def test_the_lines_for_people_have_every_finding_and_remedy() -> None:
    """Each source once, each finding with its remedy, and the counts at the end."""
    seen = list(check_machine(SPARK, Layout()))
    lines = list(as_lines(seen))
    assert lines[0] == "this machine:"
    assert sum("Remedy: " in line for line in lines) == 1
    assert lines[-1] == f"ok: {len(seen) - 1}, warning: 1, failure: 0"


def test_what_a_terminal_cannot_show_is_replaced(tmp_path: Path) -> None:
    """YAML may hold half of a surrogate pair, which no output can encode, or escape sequences."""
    name = r'"p\ud800\e[2J"'
    text = f"metadata: {{name: {name}}}\nspec: {{containers: [{{image: holdfast, args: [serve]}}]}}"
    done = doctor("--manifest", str(text_of(tmp_path, text)))
    assert done.returncode in {0, 2}, done.stderr
    assert "file.yaml: p\ufffd\ufffd[2J/container:" in done.stdout


def test_what_the_output_cannot_encode_is_replaced(tmp_path: Path) -> None:
    """A locale may have neither a letter nor the replacement for what is not printable."""
    text = "metadata: {name: p\u4e2d}\nspec: {containers: [{image: holdfast, args: [serve]}]}"
    environment = {"PYTHONIOENCODING": "latin-1"}
    done = doctor("--manifest", str(text_of(tmp_path, text)), environment=environment)
    assert done.returncode in {0, 2}, done.stderr
    assert "file.yaml: p?/container:" in done.stdout


def test_the_command_is_content_with_this_machine() -> None:
    """A real run ends with 0, and says what it looked at."""
    done = doctor("--demo", "--json")
    assert done.returncode == 0, done.stdout
    assert {"vllm", "plugins", "shared-memory"} <= {one["name"] for one in findings(done)}


def test_the_command_ends_with_2_for_a_failure() -> None:
    """A plug-in list without ours is refused by `serve`, so the doctor's exit code says so."""
    done = doctor("--json", *SIZED, environment={"VLLM_PLUGINS": "other"})
    assert done.returncode == 2
    (failed,) = (one for one in findings(done) if one["severity"] == "failure")
    assert failed["name"] == "plugins"
    assert failed["remedy"]


def test_flags_that_serve_refuses_are_findings() -> None:
    """Each wrong thing is named, and the machine is looked at all the same."""
    done = doctor("./no-such-model", "--drain-timeout", "soon", "--json", *SIZED)
    assert done.returncode == 2
    names = {one["name"] for one in findings(done) if one["severity"] == "failure"}
    assert names == {"command-line", "model"}
    assert "vllm" in {one["name"] for one in findings(done)}


def test_a_wrong_flag_of_the_doctor_is_bad_usage() -> None:
    """It is one line on standard error, as everywhere."""
    done = doctor("--manifest")
    assert done.returncode == 2
    assert done.stderr.startswith("holdfast: error: ")


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


def test_files_that_would_not_end_are_refused(tmp_path: Path) -> None:
    """A few lines of aliases can stand for more than there is memory."""
    lines = [
        "a0: &a0 [x]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)),
    ]
    with pytest.raises(UsageError, match="is not YAML"):
        read_deployments([text_of(tmp_path, "\n".join(lines))])
    with pytest.raises(UsageError, match="is not YAML"):
        read_deployments([text_of(tmp_path, "x" * (MAX_FILE_BYTES + 1))])


def test_merges_that_would_not_end_are_refused(tmp_path: Path) -> None:
    """Each level of `<<` copies the entries of the level below as often as it names it."""
    lines = [
        f"a0: &a0 {{{', '.join(f'k{n}: 0' for n in range(101))}}}",
        *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 101)}]}}" for n in (1, 2)),
    ]
    with pytest.raises(UsageError, match="is not YAML"):
        read_deployments([text_of(tmp_path, "\n".join(lines))])


def test_the_manifest_may_come_from_standard_input() -> None:
    """As `docker compose config` and `helm template` print it."""
    done = doctor("--json", "--manifest", "-", given=yaml.safe_dump(service()))
    assert done.returncode == 0
    assert {one["source"] for one in findings(done)} == {"-: server"}


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
def test_a_container_of_other_nodes_replicas(tmp_path: Path, image: str, severity: str) -> None:
    """It is refused where it runs Holdfast; of vLLM's own one rank is looked at, which is said."""
    words = ["m", "-dp", "2", "-dpl", "1"]
    command = words if image.startswith("vllm") else ["serve", *words]
    path = str(written(tmp_path, service(image=image, command=command)))
    done = doctor("--json", "--manifest", path)
    (found,) = [one for one in findings(done) if one["name"] == "command-line"]
    assert (found["severity"], found["source"]) == (severity, "manifest.yaml: server")
    assert "--data-parallel-size-local 1" in found["seen"]


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


@pytest.mark.parametrize(
    "command",
    [DRAIN_OF_A_SHELL, ["sh", "-c", "exec holdfast serve m --drain-timeout `cat x` 2>&1"]],
)
def test_a_value_that_is_not_known_is_no_failure(tmp_path: Path, command: list[str]) -> None:
    """The person who starts the container may give the right one."""
    assert failures(tmp_path, service(command=command)) == []


@pytest.mark.parametrize(
    "document",
    [
        service(
            command=[
                *("sh", "-c"),
                "exec holdfast serve m --nnodes $$N --master-addr $$A --node-key-file /k",
            ]
        ),
        service(command=["sh", "-c", "exec holdfast serve m --nnodes 2 $$FLAGS"]),
        service(command=["serve", "m", "--config=x.yaml", "--node-key-file", "/k"]),
        deployment(
            args=["serve", "m", "--ssl-keyfile=/k", "--ssl-certfile=$(CERT)"],
            env=[{"name": "CERT", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "c"}}}],
        ),
    ],
    ids=["shell", "more flags", "file", "reference"],
)
def test_a_refusal_that_an_unknown_value_may_avert_is_no_failure(
    tmp_path: Path, document: dict[str, Any]
) -> None:
    """The command line is whole only in the container, where `serve` may accept it."""
    done = doctor("--json", "--manifest", str(written(tmp_path, document)))
    assert done.returncode == 0, done.stdout
    (refusal,) = [one for one in findings(done) if one["name"] == "command-line"]
    assert refusal["severity"] == "warning"


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
    """A default that may not be in use does not fail a check."""
    path = written(tmp_path, document)
    found = {one["name"]: one for one in findings(doctor("--json", "--manifest", str(path)))}
    assert found["stop-time-out"]["severity"] == severity


def test_a_peer_is_checked_beside_this_machine() -> None:
    """With what it says of itself; the ports are those that are given."""
    follower = telling({**FOLLOWER, "facts": {"holdfast_version": __version__}})
    with closed_ports(1) as (node,), peer_server(follower) as health:
        peer = ("--peer", f"127.0.0.1:{node}", "--peer-port", str(health))
        done = doctor("--json", "--demo", *peer)
    assert done.returncode == 0, done.stdout
    assert {one["source"] for one in findings(done)} == {"this machine", "peer 127.0.0.1"}
    seen = {one["name"]: one for one in findings(done) if one["source"] != "this machine"}
    assert {"ports", "round-trip", "clock", "peer-memory"} <= set(seen)
    assert seen["peer"]["seen"] == "127.0.0.1 is a follower spark2 in state waiting"
    assert seen["peer-versions"]["seen"] == "equal: Holdfast"


def test_a_peer_that_does_not_exist_is_a_failure(tmp_path: Path) -> None:
    """The others are checked all the same, and this machine is not unless it is asked about."""
    path = str(written(tmp_path, service()))
    with closed_ports(1) as (node,):
        peers = ("--peer", "host.invalid", "--peer", f"127.0.0.1:{node}", "--peer-port", str(node))
        done = doctor("--json", "--manifest", path, *peers)
    assert done.returncode == 2
    failed = [one for one in findings(done) if one["severity"] == "failure"]
    assert [(one["source"], one["name"]) for one in failed] == [("peer host.invalid", "peer")]
    assert {"manifest.yaml: server", "peer 127.0.0.1"} <= {one["source"] for one in findings(done)}


@pytest.mark.parametrize("flags", [("--peer", "::1:"), ("--peer", "a", "--peer-port", "0")])
def test_a_wrong_peer_is_bad_usage(flags: tuple[str, ...]) -> None:
    """It is one line that says how to write it."""
    done = doctor(*flags)
    assert done.returncode == 2
    assert done.stderr.startswith("holdfast: error: argument --peer")
    assert "expected" in done.stderr
