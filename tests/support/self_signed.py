"""A certificate that nobody vouches for."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from holdfast.listener.tls import self_signed


def certificate(directory: Path, *, holds_key: bool = False) -> tuple[str, str]:
    """The paths of a self-signed certificate for another host, valid for a day, and of its key."""
    public, secret = self_signed("models.example", life=timedelta(days=1))
    (directory / "key.pem").write_bytes(secret)
    (directory / "cert.pem").write_bytes(secret + public if holds_key else public)
    return str(directory / "cert.pem"), str(directory / "key.pem")
