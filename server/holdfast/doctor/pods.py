"""Reads Kubernetes containers, wherever a manifest contains the specification of a pod."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from typing import Any

from holdfast.doctor.command_line import UNKNOWN
from holdfast.doctor.deployments import (
    DEFAULT_SHARED_BYTES,
    KEY_HEADER,
    SHARED_MEMORY,
    Deployment,
    Probe,
    ProbeRole,
    known_and_unknown,
    probe_of_command,
    read_if_served,
    whole_number,
)

POD_STOP_SECONDS = 30.0
GPU_RESOURCE = "nvidia.com/gpu"
_EPHEMERAL_VOLUMES = {
    "emptyDir",
    "secret",
    "configMap",
    "downwardAPI",
    "projected",
    "ephemeral",
    "image",
}
_SUFFIXES = {
    "m": Decimal("0.001"),
    "": Decimal(1),
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", start=1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", start=1)},
}
_ADDRESSES = {"status.podIP", "status.hostIP"}
_SOME_ADDRESS = "192.0.2.1"
"""Stands for an address that is known only once the pod runs: no machine has it (RFC 5737)."""
_ROLES: tuple[ProbeRole, ...] = ("startup", "readiness", "liveness")
_REFERENCE = re.compile(r"\$\$|\$\(([-._A-Za-z][-._A-Za-z0-9]*)\)")


def pod_deployments(file_name: str, document: Mapping[str, Any]) -> Iterator[Deployment]:
    """Yield every container of the document, whatever kind of resource contains its pod."""
    for name, pod in _pods(document, str(document.get("kind", ""))):
        for container in pod["containers"]:
            if isinstance(container, dict):
                source = f"{file_name}: {name}/{container.get('name', 'container')}"
                yield _deployment(source, pod, container)


def _pods(node: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, list):
        for item in node:
            yield from _pods(item, name)
    elif isinstance(node, dict):
        metadata = node.get("metadata")
        own_name = metadata.get("name") if isinstance(metadata, dict) else None
        if isinstance(node.get("containers"), list):
            yield str(own_name or name), node
        for value in node.values():
            yield from _pods(value, str(own_name or name))


def _deployment(source: str, pod: dict[str, Any], container: dict[str, Any]) -> Deployment:
    image = str(container.get("image", ""))
    words = (*_words(container.get("command")), *_words(container.get("args")))
    named = Deployment(source, is_pod=True, image=image, command=words)
    return read_if_served(named, lambda: _read(named, pod, container))


def _read(named: Deployment, pod: dict[str, Any], container: dict[str, Any]) -> Deployment:
    for key in ("command", "args"):
        if isinstance(container.get(key), str):
            raise ValueError(f"`{key}` is a string, not a list of words")  # noqa: TRY004 - of the file
    environment = _environment(container.get("env") or [])
    known, unknown = known_and_unknown(environment)
    volumes = {volume["name"]: volume for volume in pod.get("volumes") or []}
    mounts = [
        (_directory(mount["mountPath"]), volumes.get(mount["name"], {}), mount)
        for mount in container.get("volumeMounts") or []
    ]
    grace_seconds = pod.get("terminationGracePeriodSeconds")
    limits = (container.get("resources") or {}).get("limits") or {}
    return replace(
        named,
        command=tuple(_expanded(word, environment, container) for word in named.command),
        environment=known,
        unknown_variables=unknown,
        is_environment_complete=not container.get("envFrom"),
        restart=str(pod.get("restartPolicy", "")),
        stop_seconds=POD_STOP_SECONDS if grace_seconds is None else float(grace_seconds),
        pre_stop_seconds=_pre_stop_seconds(container),
        shared_bytes=_shared_bytes(pod, {path: volume for path, volume, _ in mounts}),
        mounts={path: _is_kept(volume, mount) for path, volume, mount in mounts},
        gpus=whole_number(quantity(limits[GPU_RESOURCE])) if GPU_RESOURCE in limits else None,
        probes=pod_probes(container),
    )


def pod_probes(container: Mapping[str, Any]) -> dict[ProbeRole, Probe]:
    """Return the probes of a container by role."""
    ports = {
        str(port["name"]): str(port["containerPort"])
        for port in container.get("ports") or []
        if "name" in port
    }
    return {
        role: _probe(given, ports) for role in _ROLES if (given := container.get(f"{role}Probe"))
    }


def _probe(given: Mapping[str, Any], ports: Mapping[str, str]) -> Probe:
    asked, connected = given.get("httpGet"), given.get("tcpSocket")
    if connected and not connected.get("host"):
        what = Probe(is_connection=True, port=_port(connected, ports))
    elif asked and not asked.get("host"):
        what = Probe(
            path=str(asked.get("path") or "/"),
            port=_port(asked, ports),
            scheme=str(asked.get("scheme") or "http").lower(),
            has_key=any(
                str(header.get("name")).lower() == KEY_HEADER
                for header in asked.get("httpHeaders") or []
            ),
        )
    else:
        what = probe_of_command((given.get("exec") or {}).get("command")) or Probe()
    return replace(
        what,
        delay_seconds=float(given.get("initialDelaySeconds") or 0),
        period_seconds=float(given.get("periodSeconds") or 10),
        timeout_seconds=float(given.get("timeoutSeconds") or 1),
        attempts=whole_number(given.get("failureThreshold") or 3),
    )


def _port(asked: Mapping[str, Any], ports: Mapping[str, str]) -> str:
    port = str(asked.get("port"))
    return port if port.isdigit() else ports.get(port, "")


def _environment(entries: list[dict[str, Any]]) -> dict[str, str]:
    """Return the variables, with references to earlier ones replaced."""
    known: dict[str, str] = {}
    for entry in entries:
        value = _value(entry)
        known[str(entry["name"])] = _REFERENCE.sub(
            lambda found: known.get(found[1], found[0]) if found[1] else "$", value
        )
    return known


def _value(entry: Mapping[str, Any]) -> str:
    if "valueFrom" not in entry:
        return str(entry.get("value") or "")
    field = (entry["valueFrom"].get("fieldRef") or {}).get("fieldPath")
    return _SOME_ADDRESS if field in _ADDRESSES else UNKNOWN


def _expanded(word: str, environment: Mapping[str, str], container: Mapping[str, Any]) -> str:
    def value(found: re.Match[str]) -> str:
        if not found[1]:
            return "$"
        return environment.get(found[1], UNKNOWN if container.get("envFrom") else found[0])

    return _REFERENCE.sub(value, word)


def _pre_stop_seconds(container: Mapping[str, Any]) -> float:
    pre_stop = (container.get("lifecycle") or {}).get("preStop") or {}
    words = " ".join(map(str, (pre_stop.get("exec") or {}).get("command") or ()))
    slept = re.search(r"\bsleep\s+(\d+(?:\.\d+)?)", words)
    return float((pre_stop.get("sleep") or {}).get("seconds") or (slept[1] if slept else 0))


def _shared_bytes(pod: Mapping[str, Any], volumes: Mapping[str, dict[str, Any]]) -> int | None:
    if pod.get("hostIPC"):
        return None
    if SHARED_MEMORY not in volumes:
        return DEFAULT_SHARED_BYTES
    limit = (volumes[SHARED_MEMORY].get("emptyDir") or {}).get("sizeLimit")
    return None if limit is None else whole_number(quantity(limit))


def _is_kept(volume: Mapping[str, Any], mount: Mapping[str, Any]) -> bool:
    claim = volume.get("persistentVolumeClaim") or {}
    is_read_only = mount.get("readOnly") or claim.get("readOnly")
    return not is_read_only and _EPHEMERAL_VOLUMES.isdisjoint(volume)


def _directory(path: object) -> str:
    return str(path).rstrip("/") or "/"


def quantity(given: object) -> Decimal:
    """Parse a Kubernetes quantity, in which `m` is a thousandth; ValueError for anything else.

    See https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/.
    """
    match = re.fullmatch(
        r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]{1,3})?)(m|[kMGTPE]|[KMGTPE]i)?", str(given)
    )
    if match is None:
        raise ValueError(f"{given!r} is not a quantity")
    try:
        return Decimal(match[1]) * _SUFFIXES[match[2] or ""]
    except InvalidOperation:
        raise ValueError(f"{given!r} is not a quantity") from None


def _words(given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        with suppress(ValueError):  # a quote that is not closed
            return tuple(shlex.split(given))
    return tuple(map(str, given)) if isinstance(given, list) else ()
