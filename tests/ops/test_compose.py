"""The Compose files: valid, complete, and true to the server, the rules and the dashboards."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from holdfast.doctor.deployments import STATE_DIRECTORY
from holdfast.doctor.parallelism import read_layout
from ops.compose import BOUNDED_LOG, COMPOSE, compose_config, hazards
from ops.prometheus import tool
from ops.queries import ROOT, dashboards

FILES = {
    "demo": ("compose.yaml",),
    "GPU": ("compose.yaml", "gpu.yaml"),
}

pytestmark = pytest.mark.tools
every_set = pytest.mark.parametrize("name", FILES)


def compose(name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`docker compose config` of one set of files."""
    return compose_config(*FILES[name], environment=environment)


def config(name: str) -> dict[str, Any]:
    """What Compose makes of one set of files."""
    done = compose(name, MODEL="Qwen/Qwen3-8B")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """The source of each mount, by its target."""
    return {mount["target"]: mount["source"] for mount in service["volumes"]}


@every_set
def test_compose_accepts_them(name: str) -> None:
    """Every key is one of Compose, and every service of the promise is there."""
    assert set(config(name)["services"]) == {"holdfast", "prometheus", "alertmanager", "grafana"}


def test_a_model_has_to_be_named_for_the_gpus() -> None:
    """Without one nothing is started, and the message says what to set."""
    done = compose("GPU")
    assert done.returncode != 0
    assert "MODEL=Qwen/Qwen3-8B" in done.stderr


@pytest.mark.parametrize(
    ("given", "opened"),
    [
        ({}, ("127.0.0.1", "127.0.0.1")),
        ({"BIND": "192.0.2.1"}, ("192.0.2.1", "127.0.0.1")),
        ({"GRAFANA_BIND": "192.0.2.1"}, ("127.0.0.1", "192.0.2.1")),
    ],
)
def test_what_is_opened_is_opened_by_name(given: dict[str, str], opened: tuple[str, str]) -> None:
    """Who opens the server does not open Grafana with it, and by default neither is open."""
    services = json.loads(compose("demo", **given).stdout)["services"]
    assert opened == tuple(
        services[name]["ports"][0]["host_ip"] for name in ("holdfast", "grafana")
    )


def test_every_variable_is_explained() -> None:
    """In the table of the docs, with its default."""
    page = (ROOT / "docs" / "deploying.md").read_text()
    text = "".join((COMPOSE / name).read_text() for name in FILES["GPU"])
    used = re.findall(r"\$\{(\w+):[-?]([^}]*)\}", text)
    assert {name for name, _ in used} > {"MODEL", "BIND"}
    for name, default in used:
        (row,) = re.findall(rf"^\|.*`{name}`.*\|(.*)\|.*\|$", page, re.MULTILINE)
        shown = "none" if not default or name == "MODEL" else default
        assert row.strip().strip("`") == shown


@pytest.mark.parametrize(("given", "size"), [({}, 1), ({"TENSOR_PARALLEL_SIZE": "4"}, 4)])
def test_a_model_is_split_over_the_gpus_that_are_named(given: dict[str, str], size: int) -> None:
    """One, if nothing is said: vLLM takes no more of itself."""
    done = compose("GPU", MODEL="Qwen/Qwen3-8B", **given)
    command = json.loads(done.stdout)["services"]["holdfast"]["command"]
    assert read_layout(command[1:]).tensor_parallel_size == size


@pytest.mark.parametrize(
    ("given", "share"), [({}, 0.92), ({"GPU_MEMORY_UTILIZATION": "0.85"}, 0.85)]
)
def test_a_gpu_is_used_up_to_the_share_that_is_given(given: dict[str, str], share: float) -> None:
    """vLLM's own, if nothing is said; a GPU that shares the host's memory needs less."""
    done = compose("GPU", MODEL="Qwen/Qwen3-8B", **given)
    command = json.loads(done.stdout)["services"]["holdfast"]["command"]
    assert read_layout(command[1:]).gpu_memory_utilization == share
    assert read_layout([]).gpu_memory_utilization == 0.92


@every_set
def test_the_doctor_is_content(name: str, tmp_path: Path) -> None:
    """No hazard that `holdfast doctor --manifest` knows is in what Compose would start."""
    assert hazards(tmp_path, compose(name, MODEL="Qwen/Qwen3-8B").stdout) == []


@every_set
def test_no_service_may_do_more_than_it_needs(name: str) -> None:
    """Each writes to its volumes and to /tmp alone, without capabilities, and can gain none."""
    services = config(name)["services"]
    assert services
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert [path.partition(":")[0] for path in service["tmpfs"]] == ["/tmp"]  # noqa: S108 - of a container
        assert not service.get("privileged")


def test_no_constant_opens_grafana() -> None:
    """Its administrator has the password that was given, else one that is new at each start."""

    def password(**given: str) -> str:
        service = json.loads(compose("demo", **given).stdout)["services"]["grafana"]
        *shell, script = service["entrypoint"]
        assert script.endswith("exec /run.sh")
        done = subprocess.run(
            [*shell, script.replace("$$", "$").replace("/run.sh", "env")],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={"PATH": os.environ["PATH"], **service["environment"]},
        )
        (found,) = re.findall(r"^GF_SECURITY_ADMIN_PASSWORD=(.*)$", done.stdout, re.MULTILINE)
        return str(found)

    assert password(GRAFANA_PASSWORD="of mine") == "of mine"  # noqa: S106 - of nothing
    made = {password(), password()}
    assert len(made) == 2
    assert min(map(len, made)) == 32


@every_set
def test_the_server_keeps_what_it_learns_and_compiles(name: str) -> None:
    """State, models and kernels are named volumes; the rest of its file system is read-only."""
    service = config(name)["services"]["holdfast"]
    assert service["read_only"] is True
    assert mounts(service) == {
        STATE_DIRECTORY: "state",
        "/home/holdfast/.cache": "kernels",
        "/home/holdfast/.cache/huggingface": "models",
    }


@every_set
def test_the_log_of_the_server_has_a_bound(name: str) -> None:
    """Whatever clients have it write; by default Docker keeps all of it."""
    assert config(name)["services"]["holdfast"]["logging"] == BOUNDED_LOG


def test_the_health_check_is_that_of_the_image() -> None:
    """It is the command of the Dockerfile, and gives the start as long as that and the chart."""
    service = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]["holdfast"]
    check = service["healthcheck"]
    dockerfile = (ROOT / "Dockerfile").read_text()
    stated = re.findall(r"^HEALTHCHECK (.*) \\\n    CMD (\[.*\])$", dockerfile, re.MULTILINE)
    assert len(stated) == 2
    for options, command in stated:
        assert ["CMD", *json.loads(command)] == check["test"]
        assert set(options.split()) == {
            f"--{name.replace('_', '-')}={check[name]}"
            for name in ("interval", "timeout", "retries", "start_period")
        }
    assert check["test"] == ["CMD", "holdfast", "health"]
    values = yaml.safe_load((ROOT / "deploy/helm/holdfast/values.yaml").read_text())
    assert check["start_period"] == f"{values['start']['seconds'] // 60}m"


def test_prometheus_and_alertmanager_find_each_other() -> None:
    """Each address that one of them is given is a service and the port that it listens on."""
    services = config("demo")["services"]
    ports = {"holdfast": 8000, "alertmanager": 9093, "prometheus": 9090}
    text = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    source = (COMPOSE / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    addresses = re.findall(r"([a-z]+):(\d+)", re.sub(r"#.*", "", text))
    addresses += [
        (httpx.URL(one["url"]).host, str(httpx.URL(one["url"]).port))
        for one in yaml.safe_load(source)["datasources"]
    ]
    assert {name for name, _ in addresses} == set(ports) <= set(services)
    assert all(ports[name] == int(port) for name, port in addresses)


def test_prometheus_has_our_rules() -> None:
    """The directory that it mounts has its configuration and every file of rules it names."""
    source = Path(mounts(config("demo")["services"]["prometheus"])["/etc/prometheus"])
    assert source.resolve() == ROOT / "deploy" / "prometheus"
    named = yaml.safe_load((source / "prometheus.yml").read_text())["rule_files"]
    assert named
    assert all((source / name).exists() for name in named)


def test_grafana_is_provisioned() -> None:
    """Its data source and its dashboards are there when it starts, and one is its home."""
    service = config("demo")["services"]["grafana"]
    found = mounts(service)
    assert Path(found["/dashboards"]).resolve() == ROOT / "dashboards" / "generated"
    assert Path(found["/etc/grafana/provisioning"]).resolve() == COMPOSE / "grafana/provisioning"
    provider = (COMPOSE / "grafana/provisioning/dashboards/holdfast.yaml").read_text()
    (only,) = yaml.safe_load(provider)["providers"]
    assert only["options"]["path"] == "/dashboards"
    home = Path(service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert home.parent == Path("/dashboards")
    assert home.stem in dashboards()


def test_alertmanager_accepts_its_configuration() -> None:
    """By the word of amtool; the path is the one that the service is told."""
    path = COMPOSE / "alertmanager.yml"
    done = subprocess.run(
        [tool("amtool"), "check-config", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    service = config("demo")["services"]["alertmanager"]
    (target,) = (target for target, source in mounts(service).items() if source == str(path))
    assert f"--config.file={target}" in service["command"]


def test_the_alert_that_silences_others_exists() -> None:
    """The rule of inhibition names an alert of ours."""
    content = yaml.safe_load((COMPOSE / "alertmanager.yml").read_text())
    (rule,) = content["inhibit_rules"]
    names = {word.split("=")[1].strip('"') for word in rule["source_matchers"]}
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    known = {one["alert"] for group in rules["groups"] for one in group["rules"]}
    assert names <= known


def test_the_commands_in_the_comments_name_files_that_exist() -> None:
    """What a reader copies from the head of the file works from the root of the tree."""
    lines = (COMPOSE / "compose.yaml").read_text().splitlines()
    commands = [shlex.split(line.lstrip("# ")) for line in lines if "docker compose" in line]
    assert commands
    for words in commands:
        named = [words[index + 1] for index, word in enumerate(words) if word == "-f"]
        assert named
        assert all((ROOT / name).exists() for name in named)
