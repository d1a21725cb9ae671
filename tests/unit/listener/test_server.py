"""The address: taken at once or refused with the reason, reached by ourselves, and given back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.errors import AddressInUseError, UsageError
from holdfast.listener import server
from holdfast.listener.server import address, bound_socket, listening
from holdfast.settings import LimitSettings, ListenSettings
from holdfast.telemetry.counters import Refusals
from self_signed import certificate

LOCAL = ListenSettings(host="127.0.0.1", port=0, uvicorn_log_level="critical")


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 loopback."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


async def hello(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    """An application that tells the scheme it was reached by."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


def served(
    settings: ListenSettings,
    act: Callable[[socket.socket], Coroutine[Any, Any, Any]],
    app: Any = hello,
) -> Any:
    """What `act` returns while `app` listens."""

    async def run(sock: socket.socket) -> Any:
        async with listening(app, sock, settings, limits=LimitSettings(), refusals=Refusals()):
            return await act(sock)

    with bound_socket(settings) as sock:
        return asyncio.run(run(sock))


def asked(settings: ListenSettings) -> tuple[int, str]:
    """The answer that a client gets at the address that is logged."""

    async def ask(sock: socket.socket) -> tuple[int, str]:
        url = "http://localhost" if settings.uds else address(sock, settings)
        transport = httpx.AsyncHTTPTransport(uds=settings.uds, verify=False)
        async with httpx.AsyncClient(transport=transport) as client:
            response = await client.get(url)
            return response.status_code, response.text

    answer: tuple[int, str] = served(settings, ask)
    return answer


def test_a_client_reaches_a_tcp_port() -> None:
    """With `--port 0` the kernel chooses it."""
    assert asked(LOCAL) == (200, "http")


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "::"])
def test_a_client_reaches_an_ipv6_address(host: str) -> None:
    """Also where it listens on all of them."""
    assert asked(ListenSettings(host=host, port=0, uvicorn_log_level="critical")) == (200, "http")


def test_a_client_reaches_every_address() -> None:
    """Without `--host` it listens everywhere, and is reached by the loopback."""
    assert asked(ListenSettings(port=0, uvicorn_log_level="critical")) == (200, "http")


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("", "listening on every address, http://127.0.0.1:"),
        ("0.0.0.0", "listening on every address, http://127.0.0.1:"),  # noqa: S104 - what is tested
        ("127.0.0.1", "listening on http://127.0.0.1:"),
    ],
)
def test_the_log_says_who_can_reach_the_server(
    host: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The address alone would look like one for this machine only."""
    caplog.set_level("INFO")
    asked(ListenSettings(host=host, port=0))
    (line,) = (text for text in caplog.messages if "listening on" in text)
    assert line.startswith(told)
    assert line.endswith(" from this machine") is (host != "127.0.0.1")


def test_a_client_reaches_a_unix_socket(tmp_path: Path) -> None:
    """And nothing of it is left."""
    path = tmp_path / "s"
    assert asked(ListenSettings(uds=str(path), uvicorn_log_level="critical")) == (200, "http")
    assert not path.exists()


@pytest.mark.parametrize("holds_key", [False, True])
def test_a_client_reaches_a_tls_port(tmp_path: Path, holds_key: bool) -> None:
    """Whatever host the certificate names; the key may be in the same file."""
    cert, key = certificate(tmp_path, holds_key=holds_key)
    settings = ListenSettings(
        host="127.0.0.1",
        port=0,
        ssl_certfile=cert,
        ssl_keyfile=None if holds_key else key,
        uvicorn_log_level="critical",
    )
    assert asked(settings) == (200, "https")


@pytest.mark.parametrize(
    ("broken", "cause", "remedy"),
    [
        ("missing", "--ssl-certfile: {}/none: No such file", "a readable file with --ssl-certfile"),
        ("directory", "--ssl-certfile: {}: Is a directory", "a readable file with --ssl-certfile"),
        ("text", "{}/text contains no certificate", "with --ssl-certfile"),
        ("other key", "{}/other/key.pem does not belong", "--ssl-certfile and --ssl-keyfile"),
        ("no key", "{}/cert.pem contains no private key", "add --ssl-keyfile."),
        ("missing key", "--ssl-keyfile: {}/none: No such file", "with --ssl-keyfile"),
        ("no key in it", "{}/text contains no private key", "with --ssl-keyfile"),
    ],
)
def test_wrong_tls_files_are_bad_usage(
    tmp_path: Path, broken: str, cause: str, remedy: str
) -> None:
    """Before anything is served, and the address is free again; OpenSSL names no file."""
    cert, key = certificate(tmp_path)
    (tmp_path / "other").mkdir()
    _, other_key = certificate(tmp_path / "other")
    (tmp_path / "text").write_text("no certificate")
    given: dict[str, tuple[str, str | None]] = {
        "missing": (str(tmp_path / "none"), key),
        "directory": (str(tmp_path), key),
        "text": (str(tmp_path / "text"), key),
        "other key": (cert, other_key),
        "no key": (cert, None),
        "missing key": (cert, str(tmp_path / "none")),
        "no key in it": (cert, str(tmp_path / "text")),
    }
    path, key_path = given[broken]
    uds = tmp_path / "s"
    settings = ListenSettings(uds=str(uds), ssl_certfile=path, ssl_keyfile=key_path)

    async def nothing(_sock: socket.socket) -> None:
        pass

    with pytest.raises(UsageError, match="cannot set up TLS") as caught:
        served(settings, nothing)
    assert cause.format(tmp_path) in caught.value.cause
    assert remedy in caught.value.remedy
    assert "_ssl.c" not in caught.value.line
    assert not uds.exists()


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6"))],
)
def test_a_port_in_use_is_its_own_error(host: str) -> None:
    """Exit 6; the address is named."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(AddressInUseError, match=f"{host}:{port} is in use"),
            bound_socket(ListenSettings(host=host, port=port)),
        ):
            pass


def test_a_port_that_one_of_ours_has_bound_is_in_use() -> None:
    """From the moment it is bound, so that two starts never both go on."""
    with bound_socket(LOCAL) as first:
        port = first.getsockname()[1]
        with (
            pytest.raises(AddressInUseError),
            bound_socket(ListenSettings(host="127.0.0.1", port=port)),
        ):
            pass


@pytest.mark.parametrize("kind", ["socket", "file"])
def test_an_existing_path_is_in_use_and_stays(tmp_path: Path, kind: str) -> None:
    """It may be another server's, or a file of a user: it is not removed."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        if kind == "socket":
            other.bind(str(path))
            other.listen()
        else:
            path.touch()
        with (
            pytest.raises(AddressInUseError, match=f"unix:{path} is in use") as caught,
            bound_socket(ListenSettings(uds=str(path))),
        ):
            pass
    assert "remove the socket file" in caught.value.remedy
    assert path.exists()


def test_a_path_that_cannot_be_is_bad_usage(tmp_path: Path) -> None:
    """Too long for a Unix socket, in no directory, below a file."""
    (tmp_path / "file").touch()
    for path, remedy in (
        (tmp_path / ("s" * 120), "choose another path with --uds."),
        (tmp_path / "none" / "s", "create the directory, or choose another path with --uds."),
        (tmp_path / "file" / "s", "choose another path with --uds."),
    ):
        with (
            pytest.raises(UsageError, match="cannot listen on unix:") as caught,
            bound_socket(ListenSettings(uds=str(path))),
        ):
            pass
        assert caught.value.remedy == remedy


@pytest.mark.parametrize("host", ["192.0.2.1", "no host", "a" * 80 + ".example", "[::1]", "ä." * 9])
def test_a_host_of_another_machine_is_bad_usage(host: str) -> None:
    """It cannot be bound, or is none."""
    with (
        pytest.raises(UsageError, match="cannot listen on") as caught,
        bound_socket(ListenSettings(host=host, port=0)),
    ):
        pass
    assert "--host" in caught.value.remedy


def test_a_request_that_is_cut_at_the_end_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer that never ends neither holds up the stop nor leaves a traceback."""
    monkeypatch.setattr(server, "STOP_DEADLINE_SECONDS", 0.1)
    settings = ListenSettings(host="127.0.0.1", port=0, uvicorn_log_level="error")
    entered = asyncio.Event()

    async def endless(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await hello(scope, receive, send)
            return
        entered.set()
        await asyncio.Event().wait()

    async def run(sock: socket.socket) -> None:
        async with listening(endless, sock, settings, limits=LimitSettings(), refusals=Refusals()):
            _, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
            await entered.wait()
        writer.close()

    with bound_socket(settings) as sock:
        asyncio.run(run(sock))
    printed = capsys.readouterr().err
    assert "ASGI callable returned without" in printed
    assert "Traceback" not in printed


def test_the_socket_file_is_gone_after_a_failure(tmp_path: Path) -> None:
    """While bound it is a socket."""
    path = tmp_path / "s"

    def fail() -> None:
        with bound_socket(ListenSettings(uds=str(path))):
            assert path.is_socket()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not path.exists()
