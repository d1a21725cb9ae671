"""`holdfast doctor --manifest`: what the probes of a container ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.doctor.deployments import Deployment, Probe, ProbeRole, probe_of_command
from holdfast.doctor.findings import Finding
from holdfast.doctor.pods import pod_probes
from holdfast.doctor.probe_checks import check_probes
from holdfast.settings import KeySettings, ListenSettings, Settings

OURS = Deployment("m: c", is_pod=True, image="holdfast:cuda", command=("serve", "m"))
STOCK = Deployment("m: c", is_pod=True, image="vllm/vllm-openai:v0.32.0", command=("m",))
TLS = Settings(listen=ListenSettings(ssl_certfile="cert.pem"))
WITH_KEY = Settings(listen=ListenSettings(api_keys=("secret",)))
OWN_CHECK: dict[str, Any] = {"exec": {"command": ["holdfast", "health"]}}
CONNECTION: dict[str, Any] = {"tcpSocket": {"port": 8000}}
LONG: dict[str, Any] = {"timeoutSeconds": 5, "failureThreshold": 180}


def probe(path: str, **changes: Any) -> Probe:
    return Probe(
        **{"path": path, "port": "8000", "timeout_seconds": 5.0, "attempts": 180, **changes}
    )


def found(
    role: ProbeRole,
    asked: Probe,
    deployment: Deployment = OURS,
    settings: Settings = Settings(),  # noqa: B008 - frozen
) -> Finding:
    probes = {**deployment.probes, role: asked}
    (finding, *_) = reversed(list(check_probes(replace(deployment, probes=probes), settings)))
    return finding


@pytest.mark.parametrize(
    ("role", "path", "severity"),
    [
        ("liveness", "/livez", "ok"),
        ("liveness", "/livez/?verbose=1", "ok"),
        ("liveness", "", "ok"),
        ("liveness", "/health", "warning"),
        ("liveness", "/startupz", "warning"),
        ("liveness", "/metrics", "warning"),
        ("readiness", "/readyz", "ok"),
        ("readiness", "/health", "ok"),
        ("readiness", "/livez", "warning"),
        ("readiness", "/v1/models", "warning"),
        ("startup", "/startupz", "ok"),
        ("startup", "/livez", "warning"),
        ("health", "/readyz", "ok"),
    ],
)
def test_what_a_probe_asks(role: ProbeRole, path: str, severity: str) -> None:
    """Each has a route that tells what it means to learn."""
    assert found(role, probe(path)).severity == severity


@pytest.mark.parametrize(
    ("asked", "startup", "severity"),
    [
        (probe("/health", attempts=3), {}, "failure"),
        (probe("/health", attempts=3), {"startup": probe("/livez")}, "failure"),
        (probe("/health", attempts=3), {"startup": probe("/startupz")}, "warning"),
        (probe("/health", attempts=3, delay_seconds=1800.0), {}, "warning"),
    ],
)
def test_liveness_on_health(asked: Probe, startup: dict[ProbeRole, Probe], severity: str) -> None:
    """It kills what would recover, and without a startup probe that waits what starts."""
    deployment = replace(OURS, probes=startup)
    assert found("liveness", asked, deployment).severity == severity


@pytest.mark.parametrize("path", ["/livez", "/", "/metrics", "/statusz"])
def test_only_a_start_that_is_over_holds_liveness_back(path: str) -> None:
    """Another route answers at once, so liveness kills a server that starts."""
    deployment = replace(OURS, probes={"startup": probe(path)})
    assert found("liveness", probe("/health", attempts=3), deployment).severity == "failure"


def test_a_startup_probe_below_the_root_path_holds_liveness_back() -> None:
    """As below none."""
    settings = Settings(listen=ListenSettings(root_path="/api"))
    deployment = replace(OURS, probes={"startup": probe("/api/startupz")})
    liveness = found("liveness", probe("/health", attempts=3), deployment, settings)
    assert liveness.severity == "warning"


def of_pod(deployment: Deployment = OURS, **given: dict[str, Any]) -> dict[str, str]:
    """The severities of the probes of a container, by name."""
    asked = replace(deployment, probes=pod_probes(given))
    return {one.name: one.severity for one in check_probes(asked, Settings())}


@pytest.mark.parametrize(
    ("given", "severities"),
    [
        ({"livenessProbe": OWN_CHECK}, {"liveness-probe": "failure"}),
        ({"startupProbe": OWN_CHECK}, {"startup-probe": "failure"}),
        ({"startupProbe": {**OWN_CHECK, **LONG}}, {"startup-probe": "ok"}),
        ({"readinessProbe": {**OWN_CHECK, **LONG}}, {"readiness-probe": "ok"}),
        ({"readinessProbe": CONNECTION}, {"readiness-probe": "warning"}),
        ({"livenessProbe": CONNECTION}, {"liveness-probe": "warning"}),
        (
            {
                "startupProbe": {**CONNECTION, **LONG},
                "livenessProbe": {"httpGet": {"path": "/health", "port": 8000}},
            },
            {"startup-probe": "warning", "liveness-probe": "failure"},
        ),
        (
            {
                "startupProbe": {"exec": {"command": ["ask"]}, **LONG},
                "livenessProbe": {"httpGet": {"path": "/health", "port": 8000}},
            },
            {"startup-probe": "ok", "liveness-probe": "warning"},
        ),
    ],
)
def test_probes_that_make_no_http_request_themselves(
    given: dict[str, Any], severities: dict[str, str]
) -> None:
    """`holdfast health` asks for /readyz; a connection succeeds as soon as the server listens."""
    assert of_pod(**given) == severities


def test_vllms_own_server_listens_when_it_has_started() -> None:
    """So a connection tells that, unlike with Holdfast."""
    liveness = {"httpGet": {"path": "/health", "port": 8000}}
    given = {"startupProbe": {**CONNECTION, **LONG}, "livenessProbe": liveness}
    assert of_pod(STOCK, **given) == {"startup-probe": "ok", "liveness-probe": "warning"}


@pytest.mark.parametrize(("role", "severity"), [("liveness", "failure"), ("health", "warning")])
def test_our_own_check_has_no_certificate(role: ProbeRole, severity: str) -> None:
    """It uses TLS by itself, and fails where a certificate is required."""
    asked = Probe(path="/readyz", is_own_check=True, timeout_seconds=5.0, attempts=180)
    required = replace(TLS, listen=replace(TLS.listen, ssl_cert_reqs=2))
    assert found("health", asked, settings=TLS).severity == "ok"
    assert found(role, asked, settings=required).severity == severity


@pytest.mark.parametrize(
    ("changes", "settings", "severity"),
    [
        ({}, TLS, "failure"),
        ({"scheme": "https"}, TLS, "ok"),
        ({"scheme": "https"}, Settings(), "failure"),
        ({"port": "9000"}, Settings(), "warning"),
        ({"port": ""}, Settings(), "failure"),
        ({}, Settings(listen=ListenSettings(uds="/s")), "failure"),
        ({"timeout_seconds": 1.0}, Settings(), "warning"),
    ],
)
def test_where_a_probe_asks(changes: dict[str, Any], settings: Settings, severity: str) -> None:
    """It has to reach the server, and to wait for it."""
    assert found("liveness", probe("/livez", **changes), settings=settings).severity == severity


@pytest.mark.parametrize(
    ("path", "settings", "severity"),
    [
        ("/statusz", WITH_KEY, "failure"),
        ("/livez", WITH_KEY, "ok"),
        ("/metrics", WITH_KEY, "warning"),
    ],
)
def test_probes_have_no_key(path: str, settings: Settings, severity: str) -> None:
    """A route that asks for one answers them with 401."""
    assert found("liveness", probe(path), settings=settings).severity == severity


def test_a_probe_may_have_a_key() -> None:
    """Then the route that asks for one does not answer it with 401."""
    asked = probe("/v1/models", has_key=True)
    assert found("readiness", asked, settings=WITH_KEY).severity == "warning"
    assert "401" not in found("readiness", asked, settings=WITH_KEY).seen


@pytest.mark.parametrize(
    ("given", "has_key"),
    [
        ({"httpGet": {"port": 1, "httpHeaders": [{"name": "Authorization", "value": "x"}]}}, True),
        ({"httpGet": {"port": 1, "httpHeaders": [{"name": "Accept", "value": "x"}]}}, False),
        (
            {"exec": {"command": ["curl", "-H", "authorization: Bearer x", "http://localhost/"]}},
            True,
        ),
        (
            {
                "exec": {
                    "command": [
                        *("python", "-c"),
                        "urlopen(Request('http://localhost/', headers={'Authorization': 'B'}))",
                    ]
                }
            },
            True,
        ),
        ({"exec": {"command": ["curl", "http://localhost/authorization"]}}, False),
    ],
)
def test_the_key_of_a_probe_is_in_a_header(given: dict[str, Any], has_key: bool) -> None:
    """In that of an HTTP request of Kubernetes, or in the words of a command."""
    assert pod_probes({"livenessProbe": given})["liveness"].has_key is has_key


def test_metrics_may_ask_for_a_key() -> None:
    """Then no probe gets them."""
    settings = Settings(
        listen=ListenSettings(api_keys=("secret",)), keys=KeySettings(metrics_auth="api-key")
    )
    assert found("liveness", probe("/metrics"), settings=settings).severity == "failure"


@pytest.mark.parametrize(
    ("role", "path", "severity"),
    [
        ("liveness", "/livez", "failure"),
        ("readiness", "/readyz", "failure"),
        ("readiness", "/v1/models", "ok"),
        ("liveness", "/health", "warning"),
    ],
)
def test_routes_that_vllm_does_not_have(role: ProbeRole, path: str, severity: str) -> None:
    """Its own server answers them with 404."""
    assert found(role, probe(path), STOCK).severity == severity


@pytest.mark.parametrize(("attempts", "severity"), [(3, "failure"), (30, "warning"), (180, "ok")])
def test_how_long_a_start_may_take(attempts: int, severity: str) -> None:
    """A large model takes its time."""
    assert found("startup", probe("/startupz", attempts=attempts)).severity == severity


@pytest.mark.parametrize(
    ("path", "severity"),
    [("/api/livez/", "ok"), ("/livez", "ok"), ("/apis/livez", "warning")],
)
def test_a_probe_may_ask_below_the_root_path(path: str, severity: str) -> None:
    """With the prefix of a proxy or without it; another prefix is not part of a route."""
    settings = Settings(listen=ListenSettings(root_path="/api"))
    assert found("liveness", probe(path), settings=settings).severity == severity


def test_the_health_check_of_the_image() -> None:
    """It finds the server wherever that listens, but has no certificate to show."""
    service = Deployment("m: s", is_pod=False, image="holdfast:cpu")
    assert list(check_probes(service, Settings())) == []
    assert list(check_probes(service, TLS)) == []
    asking = replace(TLS, listen=replace(TLS.listen, ssl_cert_reqs=2))
    (finding,) = check_probes(service, asking)
    assert finding.name == "health-check"
    assert finding.severity == "warning"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"httpGet": {"path": "/livez", "port": "http"}}, ("/livez", "8080", "http")),
        ({"httpGet": {"port": 1, "scheme": "HTTPS"}}, ("/", "1", "https")),
        ({"httpGet": {"path": "/livez", "port": "nope"}}, ("/livez", "", "http")),
        (
            {"exec": {"command": ["curl", "-f", "http://127.0.0.1:8000/health"]}},
            ("/health", "8000", "http"),
        ),
        (
            {"exec": {"command": ["sh", "-c", "wget -q 'https://localhost/livez'"]}},
            ("/livez", "443", "https"),
        ),
        ({"exec": {"command": ["true"]}}, ("", "", "http")),
        ({"exec": {"command": ["curl", "http://other:8000/health"]}}, ("", "", "http")),
        ({"httpGet": {"path": "/health", "port": 1, "host": "other"}}, ("", "", "http")),
        ({"tcpSocket": {"port": 8000}}, ("", "8000", "http")),
        ({"tcpSocket": {"port": "http"}}, ("", "8080", "http")),
        ({"tcpSocket": {"port": 1, "host": "other"}}, ("", "", "http")),
        ({"exec": {"command": ["holdfast", "health"]}}, ("/readyz", "", "http")),
        (
            {"exec": {"command": ["sh", "-c", "exec /opt/holdfast/bin/holdfast health"]}},
            ("/readyz", "", "http"),
        ),
    ],
)
def test_probes_of_kubernetes(given: dict[str, Any], expected: tuple[str, str, str]) -> None:
    """A URL in a command is asked too, and a port may have a name."""
    container = {"livenessProbe": given, "ports": [{"name": "http", "containerPort": 8080}]}
    read = pod_probes(container)["liveness"]
    assert (read.path, read.port, read.scheme) == expected
    assert (read.timeout_seconds, read.budget_seconds) == (1, 30)


def test_health_checks_of_compose() -> None:
    """One that is switched off asks for nothing."""
    read = probe_of_command(["CMD-SHELL", "curl -f http://localhost:8000/readyz || exit 1"])
    assert read is not None
    assert read.path == "/readyz"
    assert probe_of_command(None) is None
