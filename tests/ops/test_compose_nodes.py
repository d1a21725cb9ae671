"""The Compose files for two machines: valid, confined, and true to head and follower."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast import cli
from holdfast.doctor.parallelism import read_layout
from holdfast.nodes.command_line import read_follow
from ops.compose import BOUNDED_LOG, COMPOSE, compose_config, hazards
from ops.queries import ROOT

SERVICES = {"head.yaml": "holdfast", "follower.yaml": "follower"}
GIVEN = {"HEAD": "192.0.2.1", "MODEL": "Qwen/Qwen3-8B"}
SECRET = "/run/secrets/node-key"  # noqa: S105 - a path in a container

pytestmark = pytest.mark.tools
every_file = pytest.mark.parametrize("name", SERVICES)


def compose(name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`docker compose config` of one file."""
    return compose_config(name, environment=environment)


def config(name: str, **environment: str) -> dict[str, Any]:
    """What Compose makes of one file."""
    done = compose(name, **GIVEN, **environment)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def service(name: str, **environment: str) -> dict[str, Any]:
    """The only service of a file."""
    (found,) = config(name, **environment)["services"].items()
    assert found[0] == SERVICES[name]
    return dict(found[1])


@every_file
def test_the_log_has_a_bound(name: str) -> None:
    """As that of a server on one machine."""
    assert service(name)["logging"] == BOUNDED_LOG


@every_file
def test_the_head_has_to_be_named(name: str) -> None:
    """Without it nothing is started, and the message says what to set."""
    done = compose(name, MODEL="m")
    assert done.returncode != 0
    assert "HEAD=192.168.100.10" in done.stderr


def test_head_and_follower_find_each_other() -> None:
    """The follower connects to the address and the port where the head waits for one follower."""
    head = cli.parse_serve(service("head.yaml")["command"][1:], {})
    command, *arguments = service("follower.yaml")["command"]
    follower = read_follow(arguments, {})
    assert (head.node_count, command) == (2, "follow")
    assert (head.master_address, head.nodes.port) == (follower.head_host, follower.head_port)
    assert follower.head_host == GIVEN["HEAD"]


@pytest.mark.parametrize(
    ("given", "share"), [({}, 0.92), ({"GPU_MEMORY_UTILIZATION": "0.85"}, 0.85)]
)
def test_the_gpus_are_used_up_to_the_share_that_is_given(
    given: dict[str, str], share: float
) -> None:
    """That of the head, which counts on all nodes; vLLM's own, if nothing is said."""
    command = service("head.yaml", **given)["command"]
    assert read_layout(command[1:]).gpu_memory_utilization == share


@every_file
def test_the_key_is_a_file_of_the_machine(name: str) -> None:
    """Each container reads the file that is named, and it is in no variable."""
    found = config(name, NODE_KEY_FILE="/somewhere/key")
    (only,) = found["services"].values()
    assert found["secrets"]["node-key"]["file"] == "/somewhere/key"
    assert [one["source"] for one in only["secrets"]] == ["node-key"]
    assert f"--node-key-file={SECRET}" in only["command"]
    assert config(name)["secrets"]["node-key"]["file"] == str(COMPOSE / "node-key")


@every_file
def test_nothing_is_opened_unless_it_is_named(name: str) -> None:
    """The port of clients, and that of health, are those of this machine alone by default."""
    assert service(name)["network_mode"] == "host"
    for given, host in (({}, "127.0.0.1"), ({"BIND": "0.0.0.0"}, "0.0.0.0")):  # noqa: S104 - not bound
        command, *arguments = service(name, **given)["command"]
        settings = (
            cli.parse_serve(arguments, {}).listen
            if command == "serve"
            else read_follow(arguments, {}).listen
        )
        assert settings.host == host


@every_file
def test_the_container_may_do_no_more_than_it_needs(name: str) -> None:
    """It has no capabilities and no writable file system, but may register memory for RDMA."""
    found = service(name)
    assert found["read_only"] is True
    assert found["cap_drop"] == ["ALL"]
    assert found["security_opt"] == ["no-new-privileges:true"]
    assert "cap_add" not in found
    assert not found.get("privileged")
    assert [one["source"] for one in found["devices"]] == ["/dev/infiniband"]
    assert found["ulimits"]["memlock"] == -1


@every_file
@pytest.mark.parametrize("variable", ["NCCL_IB_HCA", "NCCL_CUMEM_ENABLE", "NCCL_DEBUG"])
def test_what_is_not_set_is_left_to_nccl(name: str, variable: str) -> None:
    """A variable of NCCL that is not set where Compose runs has no value in the container."""
    assert service(name)["environment"][variable] is None
    assert service(name, **{variable: "0"})["environment"][variable] == "0"


def test_both_share_what_is_downloaded_and_compiled() -> None:
    """Their volumes have the same names at the same places, so a machine may change its role."""

    def mounts(name: str) -> set[tuple[str, str]]:
        return {(one["source"], one["target"]) for one in service(name)["volumes"]}

    assert mounts("follower.yaml") <= mounts("head.yaml")
    assert config("head.yaml")["name"] == config("follower.yaml")["name"]


@every_file
def test_the_doctor_is_content(tmp_path: Path, name: str) -> None:
    """No hazard that `holdfast doctor --manifest` knows is in what starts head or follower."""
    assert hazards(tmp_path, compose(name, **GIVEN).stdout) == []


@every_file
def test_every_variable_is_explained(name: str) -> None:
    """In the table of the guide, with its default."""
    page = (ROOT / "docs" / "several-nodes.md").read_text()
    used = re.findall(r"\$\{(\w+):[-?]([^}]*)\}", (COMPOSE / name).read_text())
    assert "HEAD" in dict(used)
    for variable, default in used:
        (row,) = re.findall(rf"^\|.*`{variable}`.*\|(.*)\|.*\|$", page, re.MULTILINE)
        is_named = variable in GIVEN
        assert row.strip() == ("none" if is_named or not default else default)


@every_file
def test_the_command_in_its_comment_names_a_file_that_exists(name: str) -> None:
    """What a reader copies from the head of the file works from the root of the tree."""
    lines = (COMPOSE / name).read_text().splitlines()
    (command,) = (shlex.split(line.lstrip("# ")) for line in lines if "docker compose" in line)
    assert ROOT / command[command.index("-f") + 1] == COMPOSE / name
