"""Manifests as files: Compose files, which are put over each other, and those of Kubernetes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.doctor.compose import compose_deployments
from holdfast.doctor.deployments import Deployment
from holdfast.doctor.pods import pod_deployments
from holdfast.errors import UsageError

STANDARD_INPUT = Path("-")
MOST_FILE_BYTES = 4 * 1024 * 1024
MOST_NODES = 1_000_000
"""More are made by a few lines of aliases that name aliases."""


def read_deployments(paths: Sequence[Path], environment: Mapping[str, str]) -> list[Deployment]:
    """Every container in the files that runs vLLM or Holdfast, init containers left out.

    Compose files are put over each other as `docker compose -f A -f B` does, with the variables of
    `environment`. A container of which something cannot be read has that as its problem.

    Raises:
        UsageError: a file cannot be read, or none holds such a container.
    """
    in_pods: list[Deployment] = []
    compose_files: list[tuple[Path, dict[str, Any]]] = []
    for path in paths:
        for document in _documents(path):
            if isinstance(document.get("services"), dict):
                compose_files.append((path, document))
            else:
                in_pods += pod_deployments(path.name, document)
    found = [*compose_deployments(compose_files, environment, _documents), *in_pods]
    served = [deployment for deployment in found if deployment.is_ours or deployment.is_stock]
    if not served:
        raise UsageError(
            f"--manifest: {', '.join(map(str, paths))}: no container there runs Holdfast or vLLM.",
            remedy="name a Compose file or Kubernetes manifests, as `helm template` prints them.",
        )
    return served


def _documents(path: Path) -> list[dict[str, Any]]:
    import yaml  # noqa: PLC0415 - only with --manifest

    try:
        documents = list(yaml.safe_load_all(_text(path)))
        _refuse_bombs(documents)
    except OSError as error:
        raise UsageError(
            f"--manifest: {path}: {error.strerror}.", remedy="name a readable YAML file."
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # Not its message, which quotes the file: a key may stand there.
        mark = getattr(error, "problem_mark", None)
        raise UsageError(
            f"--manifest: {path} is not YAML{f', see line {mark.line + 1}' if mark else ''}.",
            remedy="name a readable YAML file of less than 4 MiB.",
        ) from None
    return [document for document in documents if isinstance(document, dict)]


def _text(path: Path) -> str:
    """ValueError for what is too large, or no text."""
    if path == STANDARD_INPUT:
        content = sys.stdin.buffer.read(MOST_FILE_BYTES + 1)
    else:
        with path.open("rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
    if len(content) > MOST_FILE_BYTES:
        raise ValueError("it is too large")
    return content.decode("utf-8")


def _refuse_bombs(documents: Iterable[Any]) -> None:
    """ValueError for more nodes than a manifest has, those of aliases counted each time."""
    for count, _ in enumerate(_nodes(documents)):
        if count > MOST_NODES:
            raise ValueError("it is too large")


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in inner:
        yield from _nodes(child)
