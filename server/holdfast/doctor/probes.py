"""What does a probe ask for? Read from Kubernetes' and Compose's ways to write one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from holdfast.doctor.deployments import Probe, ProbeRole

_URL = re.compile(r"https?://[^\s'\"\\]+")
_HERE = {"localhost", "127.0.0.1", "::1", "0.0.0.0"}  # noqa: S104 - compared, not bound
"""What another host answers is not known."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_ROLES: tuple[ProbeRole, ...] = ("startup", "readiness", "liveness")


def pod_probes(container: Mapping[str, Any]) -> dict[ProbeRole, Probe]:
    """Those of a container, by what Kubernetes asks them for."""
    ports = {
        str(port["name"]): str(port["containerPort"])
        for port in container.get("ports") or []
        if "name" in port
    }
    return {
        role: _pod_probe(given, ports)
        for role in _ROLES
        if (given := container.get(f"{role}Probe"))
    }


def compose_probe(health_check: Mapping[str, Any]) -> Probe | None:
    """That of a service; None if its test asks for no URL."""
    test = health_check.get("test") or ""
    words = [test] if isinstance(test, str) else [str(word) for word in test]
    return _of_words(words)


def _pod_probe(given: Mapping[str, Any], ports: Mapping[str, str]) -> Probe:
    asked = given.get("httpGet")
    what = (
        Probe(
            path=str(asked.get("path") or "/"),
            port=_port(asked.get("port"), ports),
            scheme=str(asked.get("scheme") or "http").lower(),
        )
        if asked and not asked.get("host")
        else _of_words((given.get("exec") or {}).get("command") or ()) or Probe()
    )
    return Probe(
        path=what.path,
        port=what.port,
        scheme=what.scheme,
        delay_seconds=float(given.get("initialDelaySeconds") or 0),
        period_seconds=float(given.get("periodSeconds") or 10),
        timeout_seconds=float(given.get("timeoutSeconds") or 1),
        attempts=int(given.get("failureThreshold") or 3),
    )


def _port(given: object, ports: Mapping[str, str]) -> str:
    text = str(given)
    return text if text.isdigit() else ports.get(text, "")


def _of_words(words: Any) -> Probe | None:
    found = _URL.search(" ".join(map(str, words)))
    url = urlsplit(found[0].rstrip(";)'\",") if found else "")
    if url.hostname not in _HERE:
        return None
    return Probe(
        path=f"{url.path or '/'}{'?' if url.query else ''}{url.query}",
        port=str(url.port or _DEFAULT_PORTS[url.scheme]),
        scheme=url.scheme,
    )
