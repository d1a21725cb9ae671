"""Does each probe of a container check what it is for? Pure functions of records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
_NAMES: dict[ProbeRole, HazardName] = {
    "startup": "startup-probe",
    "readiness": "readiness-probe",
    "liveness": "liveness-probe",
    "health": "health-check",
}

Judge = Callable[[Deployment, Probe, str], Finding | None]


def check_probes(deployment: Deployment, settings: Settings) -> Iterator[Finding]:
    """Yield the worst finding of each probe, and whether the image's health check can succeed."""
    for role, probe in deployment.probes.items():
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
    if not probe.path:
        return ok(name, "no HTTP request")
    path = _route(probe, settings.listen.root_path)
    return (
        _unreachable(deployment, role, probe, settings)
        or _refused_path(deployment, role, probe, settings)
        or _JUDGES[role](deployment, probe, path)
        or _short_timeout(deployment, name, probe)
        or ok(name, path)
    )


def _route(probe: Probe, root_path: str = "") -> str:
    return route_path(probe.path.partition("?")[0], root_path)


def _unreachable(
    deployment: Deployment, role: ProbeRole, probe: Probe, settings: Settings
) -> Finding | None:
    listen, name = settings.listen, _NAMES[role]
    if not deployment.is_ours:
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
    if probe.scheme != served:
        seen = f"it uses {probe.scheme}, but the server uses {served}."
        return _never_succeeds(role, seen, f"scheme: {served.upper()}")
    return None


def _never_succeeds(role: ProbeRole, seen: str, remedy: str) -> Finding:
    """Return a failure, or a warning for a health check, which never ends a container."""
    return failure(_NAMES[role], seen, remedy, is_sure=role != "health")


def _refused_path(
    deployment: Deployment, role: ProbeRole, probe: Probe, settings: Settings
) -> Finding | None:
    path = _route(probe, settings.listen.root_path)
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


def _judge_liveness(deployment: Deployment, probe: Probe, path: str) -> Finding | None:
    name: HazardName = "liveness-probe"
    if path == LIVENESS:
        return None
    remedy = f"check {LIVENESS}, and add a startupProbe on /startupz."
    if path not in STARTED_PATHS:
        return warning(
            name,
            f"liveness checks {path}, which does not report whether the process lives.",
            remedy,
        )
    seen = f"liveness checks {path}, which answers 503 while an engine starts, recovers or drains"
    startup = deployment.probes.get("startup")
    # A startup probe that succeeds at once does not delay the liveness probe.
    is_held_back = startup is not None and _route(startup) != LIVENESS
    if not is_held_back and probe.budget_seconds < SHORTEST_START_SECONDS:
        return failure(
            name,
            f"{seen}; without a startupProbe on /startupz, the container is killed after "
            f"{probe.budget_seconds:g} s, before it was ever ready.",
            remedy,
        )
    return warning(
        name, f"{seen}: the container is killed although it would have recovered.", remedy
    )


def _judge_readiness(deployment: Deployment, _probe: Probe, path: str) -> Finding | None:
    if path in READY_PATHS or deployment.is_stock:
        return None
    return warning(
        "readiness-probe",
        f"{path} does not report whether requests are admitted.",
        "check /readyz.",
    )


def _judge_startup(deployment: Deployment, probe: Probe, path: str) -> Finding | None:
    name: HazardName = "startup-probe"
    if deployment.is_ours and path not in STARTED_PATHS:
        return warning(
            name,
            f"{path} answers before the start is over, so the probe protects nothing.",
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


def _judge_health(_deployment: Deployment, _probe: Probe, _path: str) -> Finding | None:
    return None


_JUDGES: dict[ProbeRole, Judge] = {
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
