"""Services of Compose, as `docker compose config` prints them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.doctor.deployments import DEFAULT_SHARED_BYTES, SHARED_MEMORY
from holdfast.errors import UsageError
from machines import GIB
from manifests import (
    only,
    service,
)


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
        ({"gpus": "all"}, "`gpus`"),
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
    """So it writes every dollar that does not begin one of its own variables."""
    document = service(command=["serve", "$$5"], environment={"HF_TOKEN": "a$$b"})
    assert only(tmp_path, document).arguments == ("$5",)
    assert only(tmp_path, document).environment == {"HF_TOKEN": "a$b"}


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


def test_a_variable_without_a_value_is_handed_on(tmp_path: Path) -> None:
    """The person who starts the container may set it."""
    document = service(environment={"VLLM_PLUGINS": None})
    assert only(tmp_path, document).unknown_variables == {"VLLM_PLUGINS"}


@pytest.mark.parametrize(
    ("entry", "size_bytes"),
    [
        (f"{SHARED_MEMORY}:size=8g", 8 * GIB),
        (f"{SHARED_MEMORY}/:mode=1777,size=1048576k,exec", GIB),
        (f"{SHARED_MEMORY}:size=1073741824", GIB),
        (f"{SHARED_MEMORY}:size=50%", None),
        (f"{SHARED_MEMORY}:size=0", None),
        (f"{SHARED_MEMORY}:size=64m,size=8g", 8 * GIB),
        (f"{SHARED_MEMORY}:size=8g,size=50%", None),
        (SHARED_MEMORY, None),
        ("/scratch:size=8g", DEFAULT_SHARED_BYTES),
    ],
)
def test_a_tmpfs_may_be_the_shared_memory(
    tmp_path: Path, entry: str, size_bytes: int | None
) -> None:
    """Its options give its size; without one it is a share of the host's memory."""
    found = only(tmp_path, service(ipc=None, tmpfs=[entry]))
    assert (found.problem, found.shared_bytes) == ("", size_bytes)


@pytest.mark.parametrize(
    ("devices", "gpus"),
    [
        ([{"count": 1}], 1),
        ([{"driver": "nvidia", "device_ids": ["0", "3"]}], 2),
        ([{"count": -1}], None),
        ([{"count": 1}, {"device_ids": ["3"]}], None),
        ([{"driver": "cdi", "device_ids": ["nvidia.com/gpu=all"]}], None),
        ([{"device_ids": ["all"]}], None),
        ([{"driver": "cdi", "device_ids": ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]}], 2),
    ],
)
def test_the_short_way_to_gpus_is_read(
    tmp_path: Path, devices: list[dict[str, Any]], gpus: int | None
) -> None:
    """Compose prints `all` as -1; several requests may name the same GPU, and one id all."""
    assert only(tmp_path, service(gpus=devices)).gpus == gpus


def test_a_size_without_an_end_is_a_problem(tmp_path: Path) -> None:
    """It is that of one service, and no error of the doctor."""
    document = service(ipc=None, shm_size=float("inf"))
    assert "not a whole number" in only(tmp_path, document).problem
