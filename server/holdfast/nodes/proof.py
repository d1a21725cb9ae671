"""How head and follower prove the shared key to each other, without sending it.

From the key and a digest of the first two messages, which contain a nonce of each side and the
version of the protocol, both derive one secret, as HKDF does (RFC 5869). From it come two proofs
and two keys for MACs, one for each direction. So a proof fits one connection and one direction:
it can be neither replayed nor reflected, and a change of the first two messages makes it wrong.
"""

from __future__ import annotations

import hashlib
import hmac
import stat
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import UsageError, reason_of

MIN_KEY_CHARACTERS = 32
"""A follower's proof allows its receiver to try keys, so the key must not be guessable."""
_MAX_FILE_BYTES = 4096
_REMEDY = "make one with `openssl rand -hex 32`, and copy it to every node."


@dataclass(frozen=True, slots=True, repr=False)
class Secrets:
    """What both ends of one connection derive from the key and their first two messages."""

    follower_proof: bytes
    head_proof: bytes
    follower_frames: bytes
    """The key of the MACs in frames of the follower."""
    head_frames: bytes
    """The key of the MACs in frames of the head."""


def secrets_of(key: bytes, hello: bytes, challenge: bytes) -> Secrets:
    """Derive the secrets of a connection from the payloads of its first two frames."""
    transcript = hashlib.sha256(len(hello).to_bytes(4, "big") + hello + challenge).digest()
    secret = hmac.digest(key, b"holdfast nodes" + transcript, hashlib.sha256)

    def expanded(label: bytes) -> bytes:
        return hmac.digest(secret, label, hashlib.sha256)

    return Secrets(
        follower_proof=expanded(b"follower proof"),
        head_proof=expanded(b"head proof"),
        follower_frames=expanded(b"follower frames"),
        head_frames=expanded(b"head frames"),
    )


def read_key(path: Path) -> bytes:
    """Return the shared key in the file of `--node-key-file`, without space around it.

    Raises:
        UsageError: it cannot be read, or is not one key of at least `MIN_KEY_CHARACTERS`.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
            raise ValueError("it is not a regular file")  # noqa: TRY301 - one exit for all
        with path.open("rb") as file:
            key = file.read(_MAX_FILE_BYTES + 1).strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"--node-key-file: {path}: {reason_of(error)}.", remedy=_REMEDY) from None
    if len(key) > _MAX_FILE_BYTES or not all(0x21 <= byte <= 0x7E for byte in key):
        raise UsageError(
            f"--node-key-file: {path}: it is not one key of visible ASCII characters.",
            remedy=_REMEDY,
        )
    if len(key) < MIN_KEY_CHARACTERS:
        raise UsageError(
            f"--node-key-file: {path}: the key has fewer than {MIN_KEY_CHARACTERS} characters.",
            remedy=_REMEDY,
        )
    return key
