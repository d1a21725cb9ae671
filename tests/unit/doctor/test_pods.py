"""Containers of Kubernetes, wherever a manifest has them."""

from __future__ import annotations

from decimal import Decimal
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from holdfast.doctor.pods import quantity
from manifests import (
    ONE,
    deployment,
    only,
)


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


def test_references_of_kubernetes_are_expanded(tmp_path: Path) -> None:
    """From the variables of the container; `$$(NAME)` is none."""
    env = [{"name": "DRAIN", "value": "120"}, {"name": "ALSO", "value": "$(DRAIN)"}]
    args = ["serve", "m", "--drain-timeout=$(ALSO)", "--api-key=$$(DRAIN)", "$(NOPE)"]
    found = only(tmp_path, deployment(env=env, args=args))
    assert found.arguments[1:] == ("--drain-timeout=120", "--api-key=$(DRAIN)", "$(NOPE)")


def test_the_address_of_a_pod_is_some_address(tmp_path: Path) -> None:
    """It is known only once the pod runs, unlike what comes from a secret, which is never known."""
    env = [
        {"name": "OWN", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]
    found = only(tmp_path, deployment(env=env, args=["serve", "m", "--host=$(OWN)"]))
    ip_address(found.arguments[1].removeprefix("--host="))  # ValueError if it is none
    assert found.unknown_variables == {"NODE"}
    assert found.is_fully_known


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
    "pre_stop",
    [{"sleep": {"seconds": 60}}, {"exec": {"command": ["/bin/sh", "-c", "sleep 60"]}}],
)
def test_what_passes_before_the_stop(tmp_path: Path, pre_stop: dict[str, Any]) -> None:
    """However the container sleeps."""
    found = only(tmp_path, deployment(lifecycle={"preStop": pre_stop}))
    assert found.pre_stop_seconds == 60


@pytest.mark.parametrize(
    "changes",
    [
        {"args": "serve m"},
        {"args": "serve 'm"},
        {"image": "registry.example/llm", "command": "sh -c 'exec holdfast serve m'", "args": None},
    ],
)
def test_a_command_that_is_a_string_is_a_problem(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Kubernetes takes lists alone; the container is recognised all the same."""
    assert "is a string" in only(tmp_path, deployment(**changes)).problem


@pytest.mark.parametrize(
    "changes",
    [
        {"startupProbe": {"failureThreshold": float("inf")}},
        {"startupProbe": {"failureThreshold": 10**400}},
        {"startupProbe": {"periodSeconds": 10**400}},
        {"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "9e999"}}]},
    ],
)
def test_a_number_without_an_end_is_a_problem(tmp_path: Path, changes: dict[str, Any]) -> None:
    """It is that of one container, and no error of the doctor."""
    assert only(tmp_path, deployment(**changes)).problem
