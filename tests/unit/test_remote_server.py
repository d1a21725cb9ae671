"""Which key a command sends to the server that it asks, and whose certificates it accepts."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.remote_server import base_url, check_proxies, read_key, server_verification


@pytest.mark.parametrize(
    "content",
    [
        b"the-key\n",
        b"\n# the clients\n  the-key  \nanother-key\n",
        b"alice: the-key\n",
        b"alice: the-key max_requests_per_minute=60 max_tokens_per_day=1000\nbob: another-key\n",
        b"the-key max_tokens_per_day=1000\r\n",
    ],
)
def test_the_first_key_is_read_as_the_server_reads_it(tmp_path: Path, content: bytes) -> None:
    """A command may be given the server's own key file, with names and limits."""
    path = tmp_path / "keys"
    path.write_bytes(content)
    assert read_key(path) == "the-key"


def test_without_a_file_there_is_no_key() -> None:
    """Not every server asks for one."""
    assert read_key(None) == ""


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"# none\n", "it contains no key"),
        (b"alice:\n", "line 1: expected a key after the name"),
        (b"secret-\xff-secret\n", "line 1: expected a key of visible ASCII characters"),
    ],
)
def test_a_wrong_file_is_refused_without_a_word_of_it(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    """The message names the flag, the file and the line."""
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        read_key(path, "--admin-api-key-file")
    assert refused.value.cause.startswith(f"--admin-api-key-file: {path}: {reason}")
    assert "secret" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """With the reason of the system."""
    with pytest.raises(UsageError) as refused:
        read_key(tmp_path / "none")
    assert refused.value.cause == f"--api-key-file: {tmp_path / 'none'}: No such file or directory."


@pytest.mark.parametrize("end", ["/#frag", "/v1?api-version=1", "?", "#"])
@pytest.mark.parametrize("start", ["http://host:8000", "host:8000", "http://host:99999"])
def test_an_address_with_a_query_or_a_fragment_is_refused(start: str, end: str) -> None:
    """The paths of requests would stand behind it; it is not shown, since it may have a key."""
    with pytest.raises(UsageError, match="query or a fragment") as refused:
        base_url(f"{start}{end}")
    assert "host" not in str(refused.value)


@pytest.mark.parametrize("start", ["", "ada:enigma@", "http://ada:enigma@", "ada:en@igma@"])
def test_what_is_not_an_address_is_shown_without_a_password(start: str) -> None:
    """The message may end in the log of a build."""
    with pytest.raises(UsageError, match="'spark:99999' is not the address of a server") as refused:
        base_url(f"{start}spark:99999")
    assert "igma" not in str(refused.value)


@pytest.mark.parametrize(("url", "is_anybody_trusted"), [("http://x", False), ("https://x", True)])
def test_every_certificate_is_verified(
    url: str, *, is_anybody_trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without TLS none is expected: all are refused, and no authority is loaded."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    found = server_verification(url)
    assert (found.verify_mode, found.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert bool(found.cert_store_stats()["x509"]) == is_anybody_trusted


@pytest.mark.parametrize("proxy", ["socks5://localhost:1080", "ftp://localhost", "localhost:a"])
def test_a_proxy_that_cannot_be_used_is_named_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    """Some shells set one for all programs, and the reader may not have known."""
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(UsageError, match="ALL_PROXY"):
        check_proxies()


def test_of_several_proxies_the_one_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others may be needed."""
    monkeypatch.setenv("HTTPS_PROXY", "http://localhost:3128")
    monkeypatch.setenv("all_proxy", "ftp://localhost")
    with pytest.raises(UsageError) as refused:
        check_proxies()
    assert refused.value.cause.startswith("all_proxy: httpx cannot use this proxy: ")


@pytest.mark.parametrize("hosts", ["fd00::/8,localhost", "[::1]", "localhost,::1/128"])
def test_an_exception_that_cannot_be_read_is_not_called_a_proxy(
    monkeypatch: pytest.MonkeyPatch, hosts: str
) -> None:
    """httpx takes IPv6 networks and brackets for ports."""
    monkeypatch.setenv("HTTPS_PROXY", "http://localhost:3128")
    monkeypatch.setenv("NO_PROXY", hosts)
    with pytest.raises(UsageError) as refused:
        check_proxies()
    assert refused.value.cause.startswith("NO_PROXY: httpx cannot read one of its hosts: ")
    assert "IPv6" in refused.value.remedy


def test_an_http_proxy_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the only way to the server."""
    monkeypatch.setenv("HTTPS_PROXY", "http://localhost:3128")
    check_proxies()
