"""The files that prove who a node is: read, or one clear line."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from authorities import Authority
from holdfast.errors import UsageError
from holdfast.nodes.credentials import follower_credentials, head_credentials
from holdfast.settings import NodeSettings

KEY = "k" * 32


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """A key that only this user can read."""
    path = tmp_path / "node.key"
    path.write_text(KEY)
    path.chmod(0o600)
    return path


@pytest.fixture
def authority() -> Authority:
    return Authority.named("nodes")


def refused(nodes: NodeSettings) -> str:
    """The one line that a head with wrong files gets."""
    with pytest.raises(UsageError) as caught:
        head_credentials(nodes)
    assert caught.value.remedy
    return caught.value.line


def test_a_key_is_enough(key_file: Path) -> None:
    """There is no TLS then, on either side."""
    head = head_credentials(NodeSettings(key_file=key_file))
    follower = follower_credentials(key_file, None)
    assert (head.key, head.context) == (follower.key, follower.context) == (KEY.encode(), None)


@pytest.mark.parametrize(
    ("content", "named"),
    [("short", "fewer than 32 characters"), ("two words" * 9, "not one key"), ("x" * 5000, "key")],
)
def test_a_wrong_key_is_refused_on_both_sides(key_file: Path, content: str, named: str) -> None:
    """With the name of the flag and of the file, and without the key."""
    key_file.write_text(content)
    line = refused(NodeSettings(key_file=key_file))
    assert line.startswith(f"--node-key-file: {key_file}: ")
    assert named in line
    assert content not in line
    with pytest.raises(UsageError, match="--node-key-file"):
        follower_credentials(key_file, None)


def test_a_missing_key_is_refused(tmp_path: Path) -> None:
    """So is a head that names none."""
    assert "No such file" in refused(NodeSettings(key_file=tmp_path / "none"))
    assert "--node-key-file" in refused(NodeSettings())


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_a_key_that_every_user_can_read_is_warned_of(
    key_file: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not refused: a mounted secret is often readable so."""
    key_file.chmod(mode)
    with caplog.at_level(logging.WARNING):
        follower_credentials(key_file, None)
    assert ("every user of this machine" in caplog.text) == (mode == 0o644)


def test_a_certificate_makes_followers_use_tls(
    key_file: Path, authority: Authority, tmp_path: Path
) -> None:
    """Its key may stand in a file of its own or in the same."""
    certificate, key = authority.issue(tmp_path / "tls", "head", for_server=True)
    nodes = NodeSettings(key_file=key_file, certfile=certificate, keyfile=key)
    assert head_credentials(nodes).context is not None
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    assert head_credentials(NodeSettings(key_file=key_file, certfile=both)).context is not None
    ca = authority.write(tmp_path / "ca.pem")
    context = follower_credentials(key_file, ca).context
    assert context is not None
    assert context.check_hostname


def test_files_of_tls_that_do_not_load_are_named(
    key_file: Path, authority: Authority, tmp_path: Path
) -> None:
    """A missing one, one that is not PEM, and a key of another certificate."""
    certificate, key = authority.issue(tmp_path / "tls", "head", for_server=True)
    _, other = authority.issue(tmp_path / "other", "other", for_server=True)
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    for certfile, keyfile in (
        (tmp_path / "none.pem", key),
        (garbage, key),
        (certificate, garbage),
        (certificate, other),
        (certificate, None),
    ):
        line = refused(NodeSettings(key_file=key_file, certfile=certfile, keyfile=keyfile))
        assert line.startswith(f"--node-ssl-certfile: {certfile}")
        assert keyfile is None or str(keyfile) in line
    for authorities in (tmp_path / "none.pem", garbage):
        with pytest.raises(UsageError, match="--ssl-ca-certs") as caught:
            follower_credentials(key_file, authorities)
        assert str(authorities) in caught.value.line


def test_an_encrypted_key_does_not_ask_for_its_password(
    key_file: Path, authority: Authority, tmp_path: Path
) -> None:
    """Nobody sits at the terminal of a server."""
    from cryptography.hazmat.primitives import serialization

    certificate, _ = authority.issue(tmp_path / "tls", "head", for_server=True)
    encrypted = tmp_path / "encrypted.pem"
    encrypted.write_bytes(
        authority.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        )
    )
    nodes = NodeSettings(key_file=key_file, certfile=certificate, keyfile=encrypted)
    assert "without a password" in refused(nodes)
