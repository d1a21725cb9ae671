"""TLS as clients meet it: real handshakes with a real process, with a stand-in for the engine."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

import stand_in_engine
from authorities import Authority
from holdfast.errors import ExitCode
from servers import Server, running, wait_until

COMMAND = (sys.executable, str(Path(stand_in_engine.__file__)), "serve")
UNPROBED = ("model", "--probe=off", "--learned-dir=none")
DEADLINE_SECONDS = 60.0
ALLOWED_CIPHER = "ECDHE-ECDSA-AES256-GCM-SHA384"
OTHER_CIPHER = "ECDHE-ECDSA-AES128-GCM-SHA256"


@dataclass(frozen=True, slots=True)
class Client:
    """Trusts one authority; shows a certificate if it has one."""

    context: ssl.SSLContext
    address: tuple[str, int]

    def sees(self) -> str:
        """The name on the certificate of the server, after a verified handshake."""
        with (
            socket.create_connection(self.address, DEADLINE_SECONDS) as sock,
            self.context.wrap_socket(sock, server_hostname=self.address[0]) as wrapped,
        ):
            found = wrapped.getpeercert() or {}
        subject: tuple[tuple[tuple[str, str], ...], ...] = found["subject"]  # type: ignore[assignment]
        return subject[0][0][1]

    def resumed(self, earlier: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool]:
        """The session of a new connection, and whether it is the earlier one."""
        with (
            socket.create_connection(self.address, DEADLINE_SECONDS) as sock,
            self.context.wrap_socket(
                sock, server_hostname=self.address[0], session=earlier
            ) as wrapped,
        ):
            found = wrapped.session, bool(wrapped.session_reused)
            wrapped.unwrap()  # else the server forgets the session
            return found

    def gets(self, path: str) -> int:
        """The status of a path."""
        url = f"https://{self.address[0]}:{self.address[1]}{path}"
        with httpx.Client(verify=self.context, trust_env=False) as client:
            return client.get(url, timeout=DEADLINE_SECONDS).status_code


@pytest.fixture
def authority() -> Authority:
    """The one that vouches for the server."""
    return Authority.named("servers")


@pytest.fixture
def server(tmp_path: Path, authority: Authority) -> Iterator[Server]:
    """Serves with a certificate that is renewed when its files are."""
    cert, key = authority.issue(tmp_path / "tls", "first", for_server=True)
    arguments = (f"--ssl-certfile={cert}", f"--ssl-keyfile={key}", "--enable-ssl-refresh")
    with running(tmp_path, *UNPROBED, *arguments, command=COMMAND) as found:
        yield found


def client_of(server: Server, trusted: Path, shown: tuple[Path, Path] | None = None) -> Client:
    """A client, once the server listens."""
    context = ssl.create_default_context(cafile=str(trusted))
    if shown:
        context.load_cert_chain(*shown)
    host, port = re.fullmatch(r"https://(.+):(\d+)", server.url).groups()  # type: ignore[union-attr]
    return Client(context, (host, int(port)))


def test_a_client_verifies_the_server(server: Server, authority: Authority, tmp_path: Path) -> None:
    """A client verifies name and authority; one that trusts another authority stops."""
    client = client_of(server, authority.write(tmp_path / "ca.pem"))
    assert client.sees() == "first"
    assert client.gets("/livez") == 200
    stranger = client_of(server, Authority.named("others").write(tmp_path / "others.pem"))
    with pytest.raises(ssl.SSLCertVerificationError):
        stranger.sees()


def test_a_renewed_certificate_is_shown(
    server: Server, authority: Authority, tmp_path: Path
) -> None:
    """Each time it is renewed, and a pair that does not fit leaves the last one in place."""
    client = client_of(server, authority.write(tmp_path / "ca.pem"))
    for name in ("second", "third"):
        authority.issue(tmp_path / "tls", name, for_server=True)
        _until_shown(client, name)
    (tmp_path / "tls" / "cert.pem").write_text("no certificate")
    wait_until(
        lambda: "kept the old certificate" in server.log,
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: server.log,
    )
    assert client.sees() == "third"
    authority.issue(tmp_path / "tls", "fourth", for_server=True)
    _until_shown(client, "fourth")


def test_a_renewed_certificate_has_the_same_ciphers(tmp_path: Path, authority: Authority) -> None:
    """A client that knows none of them stays out."""
    cert, key = authority.issue(tmp_path / "tls", "first", for_server=True)
    files = (f"--ssl-certfile={cert}", f"--ssl-keyfile={key}", "--enable-ssl-refresh")
    ciphers = f"--ssl-ciphers={ALLOWED_CIPHER}"
    with running(tmp_path, *UNPROBED, *files, ciphers, command=COMMAND) as server:
        ca = authority.write(tmp_path / "ca.pem")
        client, stranger = client_of(server, ca), client_of(server, ca)
        for one, cipher in ((client, ALLOWED_CIPHER), (stranger, OTHER_CIPHER)):
            one.context.maximum_version = ssl.TLSVersion.TLSv1_2
            one.context.set_ciphers(cipher)
        authority.issue(tmp_path / "tls", "second", for_server=True)
        _until_shown(client, "second")
        with pytest.raises(ssl.SSLError):
            stranger.sees()


def test_the_health_check_asks_by_tls(server: Server) -> None:
    """It takes any certificate, because that names the public host and the check asks this one."""
    port = server.url.rpartition(":")[2]
    check = [sys.executable, "-m", "holdfast", "health", f"--port={port}", "--ssl-certfile=any"]
    wait_until(
        lambda: subprocess.run(check, timeout=60, check=False).returncode == 0,
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: server.log,
    )


@pytest.fixture
def clients() -> Authority:
    """The one that vouches for clients, unknown to the one for servers."""
    return Authority.named("clients")


@pytest.fixture
def mutual(tmp_path: Path, authority: Authority, clients: Authority) -> tuple[str, ...]:
    """The flags of a server that only talks to clients with a certificate."""
    cert, key = authority.issue(tmp_path / "tls", "server", for_server=True)
    trusted = clients.write(tmp_path / "clients.pem")
    files = (f"--ssl-certfile={cert}", f"--ssl-keyfile={key}", f"--ssl-ca-certs={trusted}")
    return (*files, "--ssl-cert-reqs=2")


def test_clients_need_a_certificate_where_it_is_asked_for(
    mutual: tuple[str, ...], authority: Authority, clients: Authority, tmp_path: Path
) -> None:
    """Only a certificate of the right authority passes the handshake."""
    shown = clients.issue(tmp_path / "client", "client", for_server=False)
    others = Authority.named("others").issue(tmp_path / "other", "other", for_server=False)
    ca = authority.write(tmp_path / "ca.pem")
    with running(tmp_path, *UNPROBED, *mutual, command=COMMAND) as server:
        assert client_of(server, ca, shown).gets("/livez") == 200
        for wrong in (None, others):
            with pytest.raises(httpx.TransportError):
                client_of(server, ca, wrong).gets("/livez")


def test_an_authority_that_is_taken_out_is_trusted_no_more(
    mutual: tuple[str, ...], authority: Authority, clients: Authority, tmp_path: Path
) -> None:
    """When the file of authorities is renewed, only certificates of the new ones pass."""
    others = Authority.named("others")
    old = clients.issue(tmp_path / "client", "client", for_server=False)
    new = others.issue(tmp_path / "other", "other", for_server=False)
    ca = authority.write(tmp_path / "ca.pem")
    arguments = (*UNPROBED, *mutual, "--enable-ssl-refresh")
    with running(tmp_path, *arguments, command=COMMAND) as server:
        assert client_of(server, ca, old).gets("/livez") == 200
        others.write(tmp_path / "clients.pem")
        _until_renewed(server)
        assert client_of(server, ca, new).gets("/livez") == 200
        with pytest.raises(httpx.TransportError):
            client_of(server, ca, old).gets("/livez")


def test_a_session_of_an_authority_that_is_taken_out_is_not_resumed(
    mutual: tuple[str, ...], authority: Authority, clients: Authority, tmp_path: Path
) -> None:
    """With TLS 1.2 too, whose sessions the server keeps itself."""
    shown = clients.issue(tmp_path / "client", "client", for_server=False)
    arguments = (*UNPROBED, *mutual, "--enable-ssl-refresh")
    with running(tmp_path, *arguments, command=COMMAND) as server:
        client = client_of(server, authority.write(tmp_path / "ca.pem"), shown)
        client.context.maximum_version = ssl.TLSVersion.TLSv1_2
        session, _ = client.resumed(None)
        assert client.resumed(session)[1]
        Authority.named("others").write(tmp_path / "clients.pem")
        _until_renewed(server)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            client.resumed(session)


def test_the_probe_needs_no_certificate_of_yours(mutual: tuple[str, ...], tmp_path: Path) -> None:
    """It comes through, and fails at the stand-in's answer, which is not a chat."""
    arguments = ("model", "--probe=quick", "--learned-dir=none", *mutual)
    with running(tmp_path, *arguments, command=COMMAND) as server:
        assert server.wait() == ExitCode.PROBE_FAILED
        assert "closed its stream without [DONE]" in server.last_line


def _until_shown(client: Client, name: str) -> None:
    wait_until(
        lambda: client.sees() == name,
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: f"{name} is not shown",
    )


def _until_renewed(server: Server) -> None:
    wait_until(
        lambda: "loaded the renewed certificate" in server.log,
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: server.log,
    )
