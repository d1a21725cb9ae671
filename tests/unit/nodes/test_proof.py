"""The shared key: what is derived from it, and the file that holds it."""

from __future__ import annotations

import os
from dataclasses import astuple
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.nodes.proof import MIN_KEY_CHARACTERS, read_key, secrets_of

KEY = b"k" * MIN_KEY_CHARACTERS


def test_both_ends_derive_the_same_secrets() -> None:
    """All four of them are different."""
    secrets = secrets_of(KEY, b"hello", b"challenge")
    assert secrets == secrets_of(KEY, b"hello", b"challenge")
    assert len(set(astuple(secrets))) == 4


@pytest.mark.parametrize(
    ("key", "hello", "challenge"),
    [
        (b"x" * 32, b"hello", b"challenge"),
        (KEY, b"hellO", b"challenge"),
        (KEY, b"hello", b"challengE"),
        (KEY, b"helloc", b"hallenge"),
        (KEY, b"challenge", b"hello"),
    ],
)
def test_any_change_makes_all_secrets_different(key: bytes, hello: bytes, challenge: bytes) -> None:
    """Also where one message ends and the next begins."""
    secrets = astuple(secrets_of(KEY, b"hello", b"challenge"))
    others = astuple(secrets_of(key, hello, challenge))
    assert not set(secrets) & set(others)


def test_no_secret_is_shown() -> None:
    """Logs and tracebacks show the repr of what they find."""
    secrets = secrets_of(KEY, b"hello", b"challenge")
    assert secrets.head_frames.hex() not in repr(secrets)
    assert "head_frames=" not in repr(secrets)


def test_a_key_is_read_without_the_space_around_it(tmp_path: Path) -> None:
    """An editor adds a line break."""
    path = tmp_path / "key"
    path.write_bytes(b"\n" + KEY + b"\n")
    assert read_key(path) == KEY


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "fewer than 32 characters"),
        (b"k" * 31, "fewer than 32 characters"),
        (b"k" * 32 + b"\n" + b"k" * 32, "not one key"),
        (b"k" * 31 + b" k", "not one key"),
        (b"\xff" * 32, "not one key"),
        (b"k" * 5000, "not one key"),
    ],
)
def test_what_is_not_a_long_key_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    """With a remedy, and without the key."""
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=reason) as error:
        read_key(path)
    assert "openssl rand" in error.value.remedy
    assert "kkk" not in error.value.line


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """It may be missing, a directory, or a pipe, which would block."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path / "missing", tmp_path, pipe):
        with pytest.raises(UsageError, match=f"--node-key-file: {path}: "):
            read_key(path)
