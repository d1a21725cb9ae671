"""Does each probe of a container check what it is for? Pure functions of records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from ssl import CERT_REQUIRED

from holdfast.api.auth import METRICS_PATHS, OPEN_PATHS
from holdfast.api.router import route_path
from holdfast.doctor.deployments import Deployment, Probe, ProbeRole
from holdfast.doctor.findings import Finding, HazardName, failure, ok, warning
from holdfast.settings import Settings

SHORTEST_START_SECONDS = 60.0
"""No engine with a real model has started faster."""
USUAL_START_SECONDS = 600.0
"""Large models take longer than this to load and to probe."""
LEAST_TIMEOUT_SECONDS = 5.0
"""A busy server answers late but is healthy: https://github.com/ray-project/ray/issues/54070."""
LIVENESS = "/livez"
OUR_PATHS = frozenset({"/livez", "/readyz", "/startupz", "/statusz"})
STARTED_PATHS = frozenset({"/readyz", "/health", "/ping", "/startupz"})
"""Paths that answer 503 until the first READY."""
READY_PATHS = frozenset({"/readyz", "/health", "/ping"})
_CONNECTION = "a TCP connection"
_NAMES: dict[ProbeRole, HazardName] = {
    "startup": "startup-probe",
    "readiness": "readiness-probe",
    "liveness": "liveness-probe",
    "health": "health-check",
}

JudgeProbe = Callable[[Deployment, Probe], Finding | None]


def check_probes(deployment: Deployment, settings: Settings) -> Iterator[Finding]:
    """Yield the worst finding of each probe, and whether the image's health check can succeed."""
    root_path = settings.listen.root_path
    routed = {role: _routed(probe, root_path) for role, probe in deployment.probes.items()}
    deployment = replace(deployment, probes=routed)
    for role, probe in routed.items():
        yield _worst_finding(deployment, role, probe, settings)
    is_image_asked = not (deployment.is_pod or deployment.has_own_health_check)
    if deployment.is_ours and is_image_asked and settings.listen.ssl_cert_reqs == CERT_REQUIRED:
        yield warning(
            "health-check",
            "the health check of the image has no certificate, which --ssl-cert-reqs requires: "
            "it never succeeds.",
            "give the service its own `healthcheck:`.",
        )


def _worst_finding(
    deployment: Deployment, role: ProbeRole, probe: Probe, settings: Settings
) -> Finding:
    name = _NAMES[role]
    if not probe.path or (probe.is_connection and not deployment.is_ours):
        return ok(name, "no HTTP request")
    return (
        _unreachable(deployment, role, probe, settings)
        or _without_certificate(role, probe, settings)
        or _refused_path(deployment, role, probe, settings)
        or _JUDGES[role](deployment, probe)
        or _short_timeout(deployment, name, probe)
        or ok(name, probe.path)
    )


def _routed(probe: Probe, root_path: str) -> Probe:
    """Return the probe with a route of the server as its path, which stays empty if unknown."""
    if probe.is_connection:
        return replace(probe, path=_CONNECTION)
    path = probe.path.partition("?")[0]
    return replace(probe, path=route_path(path, root_path) if path else "")


def _unreachable(
    deployment: Deployment, role: ProbeRole, probe: Probe, settings: Settings
) -> Finding | None:
    listen, name = settings.listen, _NAMES[role]
    if not deployment.is_ours or probe.is_own_check:
        return None
    served = "https" if listen.is_tls else "http"
    if listen.uds:
        seen = f"it checks a port, but the server listens on {listen.uds}."
        return _never_succeeds(role, seen, "leave out --uds.")
    if not probe.port:
        seen = "it checks a named port that the container does not have."
        return _never_succeeds(role, seen, "add the name to `ports`.")
    if probe.port != str(listen.port):
        return warning(
            name,
            f"it checks port {probe.port}, but the server listens on {listen.port}.",
            "check the server's own port.",
        )
    if probe.scheme != served and not probe.is_connection:
        seen = f"it uses {probe.scheme}, but the server uses {served}."
        return _never_succeeds(role, seen, f"scheme: {served.upper()}")
    return None


def _without_certificate(role: ProbeRole, probe: Probe, settings: Settings) -> Finding | None:
    if not probe.is_own_check or settings.listen.ssl_cert_reqs != CERT_REQUIRED:
        return None
    seen = "`holdfast health` has no certificate, which --ssl-cert-reqs requires."
    return _never_succeeds(role, seen, "use a command that presents one.")


def _never_succeeds(role: ProbeRole, seen: str, remedy: str) -> Finding:
    """Return a failure, or a warning for a health check, which never ends a container."""
    return failure(_NAMES[role], seen, remedy, is_sure=role != "health")


def _refused_path(
    deployment: Deployment, role: ProbeRole, probe: Probe, settings: Settings
) -> Finding | None:
    if probe.is_connection:
        return None
    path = probe.path
    if deployment.is_stock and path in OUR_PATHS:
        seen = f"{path} is not a route of vLLM's own server, which answers 404."
        return _never_succeeds(role, seen, "check /health, or run it with Holdfast.")
    is_metrics = path in METRICS_PATHS
    is_open = path in OPEN_PATHS or (is_metrics and settings.keys.metrics_auth == "none")
    needs_key = settings.listen.api_keys or settings.keys.api_key_file
    if deployment.is_ours and needs_key and not (is_open or probe.has_key):
        return _never_succeeds(
            role,
            f"{path} needs an API key, so the server answers 401.",
            f"check {_recommended_path(role)}.",
        )
    return None


def _recommended_path(role: ProbeRole) -> str:
    return {"startup": "/startupz", "liveness": LIVENESS}.get(role, "/readyz")


def _judge_liveness(deployment: Deployment, probe: Probe) -> Finding | None:
    name: HazardName = "liveness-probe"
    if probe.path == LIVENESS:
        return None
    remedy = f"check {LIVENESS}, and add a startupProbe on /startupz."
    if probe.path not in STARTED_PATHS:
        return warning(
            name,
            f"liveness checks {probe.path}, which does not report whether the process lives.",
            remedy,
        )
    seen = f"liveness checks {probe.path}, which is 503 while an engine starts, recovers or drains"
    if not _is_held_back(deployment) and probe.budget_seconds < SHORTEST_START_SECONDS:
        return failure(
            name,
            f"{seen}; without a startupProbe on /startupz, the container is killed after "
            f"{probe.budget_seconds:g} s, before it was ever ready.",
            remedy,
        )
    return warning(
        name, f"{seen}: the container is killed although it would have recovered.", remedy
    )


def _is_held_back(deployment: Deployment) -> bool:
    """Return whether a startup probe may delay the liveness probe until the first READY."""
    startup = deployment.probes.get("startup")
    if startup is None:
        return False
    # vLLM's own server answers nothing before its start is over.
    return not deployment.is_ours or startup.path in {"", *STARTED_PATHS}


def _judge_readiness(deployment: Deployment, probe: Probe) -> Finding | None:
    if probe.path in READY_PATHS or deployment.is_stock:
        return None
    return warning(
        "readiness-probe",
        f"{probe.path} does not report whether requests are admitted.",
        "check /readyz.",
    )


def _judge_startup(deployment: Deployment, probe: Probe) -> Finding | None:
    name: HazardName = "startup-probe"
    if deployment.is_ours and probe.path not in STARTED_PATHS:
        return warning(
            name,
            f"{probe.path} succeeds before the start is over, so the probe protects nothing.",
            "check /startupz.",
        )
    if "--demo" in deployment.arguments or probe.budget_seconds >= USUAL_START_SECONDS:
        return None
    return failure(
        name,
        f"the container is killed {probe.budget_seconds:g} s after its start.",
        "failureThreshold: 180 with periodSeconds: 10",
        is_sure=probe.budget_seconds < SHORTEST_START_SECONDS,
    )


def _judge_health(_deployment: Deployment, _probe: Probe) -> Finding | None:
    return None


_JUDGES: dict[ProbeRole, JudgeProbe] = {
    "startup": _judge_startup,
    "readiness": _judge_readiness,
    "liveness": _judge_liveness,
    "health": _judge_health,
}


def _short_timeout(deployment: Deployment, name: HazardName, probe: Probe) -> Finding | None:
    if not deployment.is_pod or probe.timeout_seconds >= LEAST_TIMEOUT_SECONDS:
        return None
    return warning(
        name,
        f"an answer that takes longer than {probe.timeout_seconds:g} s counts as a failure.",
        f"timeoutSeconds: {LEAST_TIMEOUT_SECONDS:g}",
    )
