"""Reads Compose services as `docker compose config` prints them: merged and in long form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

from holdfast.doctor.command_line import UNKNOWN
from holdfast.doctor.deployments import (
    DEFAULT_SHARED_BYTES,
    SHARED_MEMORY,
    Deployment,
    known_and_unknown,
    probe_of_command,
    read_if_served,
    whole_number,
)
from holdfast.errors import UsageError
from holdfast.settings.flag import size_bytes
from holdfast.settings.yaml_files import nodes

COMPOSE_STOP_SECONDS = 10.0
_PRINTED: Mapping[str, type] = {
    "command": list,
    "entrypoint": list,
    "environment": dict,
    "tmpfs": list,
    "gpus": list,
    "volumes": list,
    "restart": str,
    "extends": NoneType,
    "env_file": NoneType,
}
"""The type that `docker compose config` prints for keys that can be written in several ways."""
_RESTARTS = {"none": "no", "any": "always", "on-failure": "on-failure"}
"""The conditions of `deploy.restart_policy`, in the words of `restart`."""
_SECONDS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def compose_deployments(path: Path, document: Mapping[str, Any]) -> Iterator[Deployment]:
    """Yield every service of the document.

    Raises:
        UsageError: this is not what `docker compose config` prints.
    """
    services = document.get("services", {})
    if unresolved := "`include`" if "include" in document else next(_unresolved(services), ""):
        raise UsageError(
            f"--manifest: {path}: Compose has to resolve {unresolved} first.",
            remedy="run `docker compose config | holdfast doctor --manifest -`, with the -f and "
            "--env-file of `docker compose up`.",
        )
    for name, service in services.items():
        yield _deployment(f"{path.name}: {name}", service)


def _unresolved(services: Mapping[str, Any]) -> Iterator[str]:
    for name, service in services.items():
        if not isinstance(service, dict):
            yield f"`{name}`"
        for key, value in service.items():
            if not isinstance(value, (_PRINTED.get(key, object), NoneType)):
                yield f"`{key}` of `{name}`"
            if key == "volumes" and any(isinstance(volume, str) for volume in value or ()):
                yield f"`{key}` of `{name}`"
            texts = (node for node in nodes(value) if isinstance(node, str))
            if any("$" in text.replace("$$", "") for text in texts):
                yield f"a variable in `{key}` of `{name}`"


def _deployment(source: str, service: dict[str, Any]) -> Deployment:
    words = [*(service.get("entrypoint") or []), *(service.get("command") or [])]
    image = str(service.get("image", ""))
    named = Deployment(source, is_pod=False, image=image, command=tuple(map(_text, words)))
    return read_if_served(named, lambda: _read(named, service))


def _read(named: Deployment, service: dict[str, Any]) -> Deployment:
    health_check: Mapping[str, Any] = service.get("healthcheck") or {}
    probe = probe_of_command(_text(health_check.get("test")))
    known, unknown = known_and_unknown(
        {
            # Without a value, Compose passes on the variable of its own environment.
            name: UNKNOWN if value is None else _text(value)
            for name, value in (service.get("environment") or {}).items()
        }
    )
    return replace(
        named,
        environment=known,
        unknown_variables=unknown,
        restart=_restart(service),
        stop_seconds=_seconds(service.get("stop_grace_period")),
        shared_bytes=_shared_bytes(service),
        mounts=_mounts(service),
        gpus=_gpus(service),
        probes={"health": probe} if probe else {},
        has_own_health_check=bool(health_check.get("test") or health_check.get("disable")),
    )


def _text(value: object) -> str:
    return str(value).replace("$$", "$")


def _restart(service: Mapping[str, Any]) -> str:
    if given := service.get("restart"):
        return str(given)
    policy = (service.get("deploy") or {}).get("restart_policy")
    if policy is None:
        return ""
    word = _RESTARTS.get(str(policy.get("condition", "any")), "")
    attempts = policy.get("max_attempts")
    return f"{word}:{attempts}" if attempts and word != "no" else word


def _seconds(given: str | None) -> float:
    """Return how long Compose waits before it kills; ValueError if this is not a duration."""
    if given is None:
        return COMPOSE_STOP_SECONDS
    parts = re.findall(r"(\d+(?:\.\d+)?)(ns|µs|ms|s|m|h)", given)
    if not parts or "".join(map("".join, parts)) != given:
        raise ValueError(f"{given!r} is not a duration")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def _shared_bytes(service: Mapping[str, Any]) -> int | None:
    if str(service.get("ipc", "")).startswith(("host", "service:", "container:")):
        return None
    for volume in service.get("volumes") or []:
        if str(volume.get("target")).rstrip("/") == SHARED_MEMORY:
            limit = (volume.get("tmpfs") or {}).get("size")
            return None if limit is None else whole_number(limit)
    for entry in service.get("tmpfs") or []:
        path, _, options = str(entry).partition(":")
        if path.rstrip("/") == SHARED_MEMORY:
            return _tmpfs_bytes(options)
    return whole_number(service.get("shm_size") or DEFAULT_SHARED_BYTES)


def _tmpfs_bytes(options: str) -> int | None:
    """Return the size that mount options give a tmpfs; None for none, or a share.

    Of several sizes, the last one counts.
    """
    sizes = re.findall(r"(?:^|,)size=([^,]*)", options.lower())
    given = re.fullmatch(r"([0-9]+)([kmgt]?)", sizes[-1]) if sizes else None
    if given is None:
        return None
    return size_bytes(f"{given[1]}{given[2]}{'ib' if given[2] else ''}") or None


def _mounts(service: Mapping[str, Any]) -> dict[str, bool]:
    mounts = {
        # A volume without a source does not outlive the container.
        volume["target"]: volume["type"] != "tmpfs"
        and "source" in volume
        and not volume.get("read_only")
        for volume in service.get("volumes") or []
    }
    mounts |= {str(entry).partition(":")[0]: False for entry in service.get("tmpfs") or []}
    return {path.rstrip("/") or "/": is_kept for path, is_kept in mounts.items()}


def _gpus(service: Mapping[str, Any]) -> int | None:
    reservations = ((service.get("deploy") or {}).get("resources") or {}).get("reservations") or {}
    reserved = [
        device
        for device in reservations.get("devices") or []
        if "gpu" in (device.get("capabilities") or [])
    ]
    counts = [_count(device) for device in (*reserved, *(service.get("gpus") or []))]
    # Compose writes `all` as -1.
    is_counted = len(counts) == 1 and isinstance(counts[0], int) and counts[0] >= 0
    return counts[0] if is_counted else None


def _count(device: Mapping[str, Any]) -> Any:
    names = [str(name) for name in device.get("device_ids") or []]
    if any(name == "all" or name.endswith("=all") for name in names):  # the latter in CDI
        return None
    return len(names) or device.get("count")
