"""Services of Compose, after its files were put over each other and its variables filled in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.doctor.deployments import (
    DEFAULT_SHARED_BYTES,
    SHARED_MEMORY,
    Deployment,
    problem_of,
    read_served,
    seen_and_unseen,
)
from holdfast.doctor.interpolation import filled_in, read_variables
from holdfast.doctor.probes import compose_probe
from holdfast.doctor.words import UNSEEN
from holdfast.errors import UsageError
from holdfast.settings.values import size_bytes

COMPOSE_STOP_SECONDS = 10.0
_REPLACED = {"command", "entrypoint", "test"}
"""Lists that the later file does not add to
(https://docs.docker.com/reference/compose-file/merge/)."""
_SECONDS = {
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 604800.0,
}
_RESTARTS = {"none": "no", "any": "always", "on-failure": "on-failure"}
"""Words of `deploy.restart_policy`, as `restart` has them."""

ReadDocuments = Callable[[Path], list[dict[str, Any]]]


def compose_deployments(
    files: Sequence[tuple[Path, dict[str, Any]]],
    environment: Mapping[str, str],
    read_documents: ReadDocuments,
) -> Iterator[Deployment]:
    """Every service of the files, the later ones put over the first, which names the project."""
    if not files:
        return
    path = files[0][0]
    known = {**_variables(path.parent / ".env"), **environment}
    whole: dict[str, Any] = {}
    for _, document in files:
        whole = _merged(whole, filled_in(document, known))
    for name, service in whole["services"].items():
        if isinstance(service, dict):
            extended = _extended(service, whole["services"], path.parent, read_documents, known)
            yield _of_service(f"{path.name}: {name}", extended, path.parent, known)


def _variables(path: Path) -> dict[str, str]:
    try:
        return read_variables(path)
    except OSError:
        return {}


def _merged(below: Any, above: Any, key: str = "") -> Any:
    if key == "environment" and isinstance(below, dict | list) and isinstance(above, dict | list):
        below, above = _pairs(below), _pairs(above)
    if isinstance(below, dict) and isinstance(above, dict):
        both = {name: _merged(below[name], above[name], name) for name in below if name in above}
        return {**below, **above, **both}
    if isinstance(below, list) and isinstance(above, list) and key not in _REPLACED:
        return [*below, *above]
    return above


def _extended(
    service: dict[str, Any],
    services: Mapping[str, Any],
    directory: Path,
    read_documents: ReadDocuments,
    known: Mapping[str, str],
) -> dict[str, Any]:
    """The service over the one that it extends; where that is not found, an environment to find."""
    given = service.get("extends")
    if not given:
        return service
    wanted = given if isinstance(given, dict) else {"service": given}
    if "file" in wanted:
        services = _services(directory / str(wanted["file"]), read_documents, known)
    base = services.get(str(wanted.get("service")))
    if not isinstance(base, dict):
        return {**service, "env_file": [UNSEEN]}
    whole: dict[str, Any] = _merged(base, service)
    return whole


def _services(
    path: Path, read_documents: ReadDocuments, known: Mapping[str, str]
) -> Mapping[str, Any]:
    try:
        return {
            name: filled_in(service, known)
            for document in read_documents(path)
            for name, service in (document.get("services") or {}).items()
        }
    except (UsageError, AttributeError):
        return {}


def _of_service(
    source: str, service: dict[str, Any], directory: Path, known: Mapping[str, str]
) -> Deployment:
    image = str(service.get("image", ""))
    try:
        command = (*_words(service.get("entrypoint")), *_words(service.get("command")))
    except (TypeError, ValueError) as error:
        return Deployment(source, is_pod=False, image=image, problem=problem_of(error))
    named = Deployment(source, is_pod=False, image=image, command=command)
    return read_served(
        named, lambda: _read(named, service, _environment(service, directory, known))
    )


def _read(
    named: Deployment, service: dict[str, Any], environment: tuple[dict[str, str], bool]
) -> Deployment:
    is_shared = str(service.get("ipc", "")).startswith(("host", "service:", "container:"))
    volumes = [*map(_mount, service.get("volumes") or []), *_scratch(service)]
    health_check: Mapping[str, Any] = service.get("healthcheck") or {}
    probe = compose_probe(health_check)
    variables, is_whole = environment
    seen, unseen = seen_and_unseen(variables)
    return replace(
        named,
        environment=seen,
        unseen_variables=unseen,
        is_environment_whole=is_whole,
        restart=_restart(service),
        stop_seconds=_duration(service.get("stop_grace_period"), COMPOSE_STOP_SECONDS),
        shared_bytes=None if is_shared else _shared_bytes(service),
        mounts={target.rstrip("/") or "/": is_kept for target, is_kept in volumes if target},
        gpus=_gpus(service),
        probes={"health": probe} if probe else {},
        has_own_health_check=bool(health_check.get("test") or health_check.get("disable")),
    )


def _restart(service: Mapping[str, Any]) -> str:
    given = service.get("restart")
    if given is not None:
        # YAML reads `no` as false.
        return "no" if given is False else str(given)
    policy = (service.get("deploy") or {}).get("restart_policy")
    if policy is None:
        return ""
    word = _RESTARTS.get(str(policy.get("condition", "any")), "")
    attempts = policy.get("max_attempts")
    return f"{word}:{attempts}" if attempts and word != "no" else word


def _shared_bytes(service: Mapping[str, Any]) -> int | None:
    for volume in service.get("volumes") or []:
        if isinstance(volume, dict) and str(volume.get("target")).rstrip("/") == SHARED_MEMORY:
            limit = (volume.get("tmpfs") or {}).get("size")
            return None if limit is None else size_bytes(_binary(limit))
    given = service.get("shm_size")
    if UNSEEN in str(given):
        return None
    return DEFAULT_SHARED_BYTES if given is None else size_bytes(_binary(given))


def _binary(size: object) -> str:
    # Docker's `64m` is 64 MiB, whether or not a `b` follows.
    text = str(size).strip().lower().removesuffix("b")
    return f"{text}ib" if text[-1:].isalpha() and not text.endswith("i") else text


def _environment(
    service: Mapping[str, Any], directory: Path, known: Mapping[str, str]
) -> tuple[dict[str, str], bool]:
    """The variables, and whether every file of them was found."""
    found: dict[str, str] = {}
    is_whole = True
    given = service.get("env_file") or []
    for entry in given if isinstance(given, list) else [given]:
        try:
            found |= read_variables(
                directory / str(entry["path"] if isinstance(entry, dict) else entry)
            )
        except OSError:
            is_whole = False
    for name, value in _pairs(service.get("environment") or {}).items():
        # Without a value it is that of whoever runs Compose.
        found[name] = known.get(name, UNSEEN) if value is None else str(value)
    return found, is_whole


def _pairs(given: Any) -> dict[str, Any]:
    if isinstance(given, dict):
        return {str(name): _scalar(value) for name, value in given.items()}
    parts = (str(entry).partition("=") for entry in given)
    return {name: value if equals else None for name, equals, value in parts}


def _scalar(value: Any) -> Any:
    # A boolean of YAML has a capital letter in Python.
    return str(value).lower() if isinstance(value, bool) else value


def _mount(volume: Any) -> tuple[str, bool]:
    if isinstance(volume, dict):
        is_kept = volume.get("type") in {"volume", "bind"} and not volume.get("read_only")
        return str(volume.get("target", "")), is_kept
    source, _, rest = str(volume).partition(":")
    target, _, options = rest.partition(":")
    return (target, "ro" not in options.split(",")) if rest else (source, False)


def _scratch(service: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    given = service.get("tmpfs") or []
    for entry in given if isinstance(given, list) else [given]:
        yield str(entry).partition(":")[0], False


def _gpus(service: Mapping[str, Any]) -> int | None:
    reservations = ((service.get("deploy") or {}).get("resources") or {}).get("reservations") or {}
    counts = [
        len(device["device_ids"]) if device.get("device_ids") else device.get("count")
        for device in reservations.get("devices") or []
        if "gpu" in (device.get("capabilities") or [])
    ]
    # Compose writes `all` as -1.
    is_counted = len(counts) == 1 and isinstance(counts[0], int) and counts[0] >= 0
    return counts[0] if is_counted else None


def _words(given: Any) -> Sequence[str]:
    if given is None:
        return ()
    return shlex.split(given) if isinstance(given, str) else [str(word) for word in given]


def _duration(given: object, default_seconds: float) -> float:
    """Seconds of what Compose writes as `1m15s`; ValueError for anything else."""
    if given is None:
        return default_seconds
    text = str(given)
    if UNSEEN in text:
        return float("inf")
    parts = re.findall(r"(\d+(?:\.\d+)?)(ns|us|ms|s|m|h|d|w)", text)
    if not parts or "".join(f"{number}{unit}" for number, unit in parts) != text:
        raise ValueError(f"{text!r} is no duration")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)
