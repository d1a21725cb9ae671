"""A certificate that no authority signed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

LIFE = timedelta(days=1)


def certificate(directory: Path, *, holds_key: bool = False) -> tuple[str, str]:
    """The paths of a self-signed certificate for another host, valid for a day, and of its key."""
    public, secret = _self_signed("models.example")
    (directory / "key.pem").write_bytes(secret)
    (directory / "cert.pem").write_bytes(secret + public if holds_key else public)
    return str(directory / "cert.pem"), str(directory / "key.pem")


def _self_signed(common_name: str) -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LIFE)
        .not_valid_after(now + LIFE)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return made.public_bytes(serialization.Encoding.PEM), secret
