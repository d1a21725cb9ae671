"""Manifests as files: what `docker compose config` prints, and those of Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.doctor.compose import compose_deployments
from holdfast.doctor.deployments import Deployment
from holdfast.doctor.pods import pod_deployments
from holdfast.errors import UsageError
from holdfast.settings.yaml_file import read_yaml


def read_deployments(paths: Sequence[Path]) -> list[Deployment]:
    """Every container in the files that runs vLLM or Holdfast, init containers left out.

    A container of which something cannot be read has that as its problem.

    Raises:
        UsageError: a file cannot be read, Compose has not resolved it, or none holds such a
            container.
    """
    found = (deployment for path in paths for deployment in _deployments(path))
    served = [deployment for deployment in found if deployment.is_ours or deployment.is_stock]
    if not served:
        raise UsageError(
            f"--manifest: {', '.join(map(str, paths))}: no container in it runs Holdfast or vLLM.",
            remedy="name what `docker compose config` or `helm template` prints.",
        )
    return served


def _deployments(path: Path) -> Iterator[Deployment]:
    for document in read_yaml("--manifest", path):
        match document:
            case {"services": dict()} | {"include": _}:
                yield from compose_deployments(path, document)
            case dict():
                yield from pod_deployments(path.name, document)
