"""`holdfast doctor`: keys, certificate and address, tried as a start does."""

from __future__ import annotations

import socket
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast.doctor.findings import Finding, Severity
from holdfast.doctor.front_checks import check_front, check_media
from holdfast.settings import KeySettings, ListenSettings, NodeSettings, Settings
from machines import doctor, findings
from self_signed import certificate

LOCAL = Settings(listen=ListenSettings(host="127.0.0.1", port=0))
NOW = datetime.now(UTC)


def found(settings: Settings, now: datetime = NOW) -> dict[str, Finding]:
    return {finding.name: finding for finding in check_front(settings, now)}


def listening(**changes: Any) -> Settings:
    return replace(LOCAL, listen=replace(LOCAL.listen, **changes))


def test_a_sound_front_end_has_no_finding(tmp_path: Path) -> None:
    """With a key of its own, a certificate that is renewed, and a port that is free."""
    cert, key = certificate(tmp_path)
    settings = listening(
        api_keys=("secret",), ssl_certfile=cert, ssl_keyfile=key, is_tls_refreshed=True
    )
    seen = found(settings)
    assert set(seen) == {"keys", "tls", "address"}
    assert {finding.severity for finding in seen.values()} == {Severity.OK}


@pytest.mark.parametrize(
    "keys",
    [
        KeySettings(api_key_file=Path("/nope")),
        KeySettings(admin_api_key_file=Path("/nope")),
        KeySettings(admin_api_key="secret"),
    ],
)
def test_keys_that_serve_refuses(keys: KeySettings) -> None:
    """A file that is not there, and a key of admins that clients have."""
    settings = replace(listening(api_keys=("secret",)), keys=keys)
    assert found(settings)["keys"].severity is Severity.FAILURE


def test_metrics_without_a_key_to_ask_for() -> None:
    """Such flags contradict each other."""
    settings = replace(LOCAL, keys=KeySettings(metrics_auth="api-key"))
    assert found(settings)["keys"].severity is Severity.FAILURE


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({"host": ""}, "warning"),
        ({"host": "::"}, "warning"),
        ({"host": "192.0.2.7"}, "warning"),
        ({"host": "", "api_keys": ("secret",)}, "ok"),
        ({"host": "", "ssl_cert_reqs": 2}, "ok"),
    ],
)
def test_an_open_server(changes: dict[str, Any], severity: str) -> None:
    """Without a key it is open to every client that reaches an address of the machine."""
    assert found(listening(**changes))["keys"].severity == severity


def test_a_file_of_keys_that_every_user_can_read(tmp_path: Path) -> None:
    """They are as good as public on that machine."""
    path = tmp_path / "keys"
    path.write_text("secret\n")
    settings = replace(LOCAL, keys=KeySettings(api_key_file=path))
    path.chmod(0o640)
    assert found(settings)["keys"].severity is Severity.OK
    path.chmod(0o644)
    assert found(settings)["keys"].severity is Severity.WARNING


def test_files_of_tls_that_cannot_be_used(tmp_path: Path) -> None:
    """One that is missing, and a key of another certificate."""
    cert, _ = certificate(tmp_path)
    (tmp_path / "other").mkdir()
    _, other_key = certificate(tmp_path / "other")
    for given in ({"ssl_certfile": "/nope.pem"}, {"ssl_certfile": cert, "ssl_keyfile": other_key}):
        assert found(listening(**given))["tls"].severity is Severity.FAILURE


@pytest.mark.parametrize(
    ("days", "is_refreshed", "severity"),
    [(0, False, "warning"), (0, True, "ok"), (-31, False, "ok"), (2, True, "failure")],
)
def test_certificates_end(tmp_path: Path, days: int, is_refreshed: bool, severity: str) -> None:
    """Thirty days before, a renewal is to be expected; afterwards nobody connects."""
    cert, key = certificate(tmp_path)
    settings = listening(ssl_certfile=cert, ssl_keyfile=key, is_tls_refreshed=is_refreshed)
    assert found(settings, NOW + timedelta(days=days))["tls"].severity == severity


@pytest.mark.parametrize("changes", [{"host": "192.0.2.1"}, {"uds": "/nope/s.sock"}])
def test_addresses_that_are_not_of_this_machine(changes: dict[str, Any]) -> None:
    """Nobody could listen there."""
    assert found(listening(**changes))["address"].severity is Severity.FAILURE


def test_an_address_in_use_may_be_that_of_the_server() -> None:
    """So it is a warning."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = listening(port=taken.getsockname()[1])
        assert found(settings)["address"].severity is Severity.WARNING


def a_head(tmp_path: Path, **changes: Any) -> Settings:
    """The settings of a head on this machine, with a key."""
    key_file = tmp_path / "node.key"
    key_file.write_text("0123456789abcdef" * 4)
    nodes = replace(NodeSettings(port=0, key_file=key_file), **changes)
    return replace(LOCAL, node_count=2, master_address="127.0.0.1", nodes=nodes)


def of_nodes(settings: Settings) -> list[Finding]:
    """What a head has beyond a server on one node."""
    alone = list(check_front(replace(settings, node_count=1), NOW))
    return list(check_front(settings, NOW))[len(alone) :]


def test_a_head_can_listen_for_followers(tmp_path: Path) -> None:
    """At its address; with the same flags, another machine has nothing to try."""
    (finding,) = of_nodes(a_head(tmp_path))
    assert (finding.name, finding.severity) == ("address", Severity.OK)
    assert finding.seen.startswith("127.0.0.1:")
    elsewhere = replace(a_head(tmp_path), master_address="192.0.2.1")
    assert of_nodes(elsewhere) == []
    assert of_nodes(replace(a_head(tmp_path), node_rank=1)) == []


def test_a_node_port_in_use_may_be_that_of_the_head(tmp_path: Path) -> None:
    """So it is a warning."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (finding,) = of_nodes(a_head(tmp_path, port=taken.getsockname()[1]))
    assert (finding.name, finding.severity) == ("address", Severity.WARNING)
    assert "--node-port" in finding.remedy


@pytest.mark.parametrize(
    "changes",
    [{"key_file": Path("/nope")}, {"certfile": Path("/nope")}],
    ids=["key", "certificate"],
)
def test_files_that_a_head_refuses(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A start would end with exit 2."""
    (finding,) = of_nodes(a_head(tmp_path, **changes))
    assert (finding.name, finding.severity) == ("keys", Severity.FAILURE)
    assert "/nope" in finding.seen


@pytest.mark.parametrize(
    ("environment", "name"),
    [({"VLLM_API_KEY": "a b"}, "VLLM_API_KEY"), ({"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "x"}, "VLLM_")],
)
def test_variables_that_serve_refuses(environment: dict[str, str], name: str) -> None:
    """The command reads vLLM's variables too, and repeats no key."""
    done = doctor("--demo", "--json", environment=environment)
    (failed,) = (one for one in findings(done) if one["severity"] == "failure")
    assert failed["name"] == "command-line"
    assert name in failed["seen"]
    assert "a b" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "environment", "severities"),
    [
        (["{images}"], {}, {Severity.WARNING}),
        (["{images}", "--allowed-media-domains", "example.org"], {}, {Severity.OK}),
        (["{text}"], {}, set()),
        (["nowhere/to-be-found"], {}, set()),
        ([], {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "1"}, {Severity.WARNING}),
        ([], {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}, set()),
        ([], {"VLLM_MEDIA_CONNECTOR": "mine"}, {Severity.WARNING}),
    ],
)
def test_what_clients_may_have_fetched_is_named(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], severities: set[Severity]
) -> None:
    """Where the model takes media, or something else than our guard fetches them."""
    for name, config in (("images", '{"vision_config": {}}'), ("text", "{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    named = {name: str(tmp_path / name) for name in ("images", "text")}
    found = list(check_media([one.format(**named) for one in arguments], environment))
    assert {finding.severity for finding in found} == severities
    assert all(finding.remedy for finding in found if finding.severity is Severity.WARNING)
