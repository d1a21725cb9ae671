"""Certificates that no authority signed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

LIFE = timedelta(days=1)


def certificate(directory: Path, *, holds_key: bool = False) -> tuple[str, str]:
    """The paths of a self-signed certificate for another host, valid for a day, and of its key."""
    public, secret = _self_signed(_builder(datetime.now(UTC)))
    (directory / "key.pem").write_bytes(secret)
    (directory / "cert.pem").write_bytes(secret + public if holds_key else public)
    return str(directory / "cert.pem"), str(directory / "key.pem")


def certificate_of(directory: Path, time: datetime) -> tuple[str, str]:
    """The paths of one for 127.0.0.1, valid a day before and after a time, and of its key."""
    address = x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))])
    public, secret = _self_signed(_builder(time).add_extension(address, critical=False))
    (directory / "key.pem").write_bytes(secret)
    (directory / "cert.pem").write_bytes(public)
    return str(directory / "cert.pem"), str(directory / "key.pem")


def _builder(time: datetime) -> x509.CertificateBuilder:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "models.example")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .serial_number(x509.random_serial_number())
        .not_valid_before(time - LIFE)
        .not_valid_after(time + LIFE)
    )


def _self_signed(builder: x509.CertificateBuilder) -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    made = builder.public_key(key.public_key()).sign(key, hashes.SHA256())
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return made.public_bytes(serialization.Encoding.PEM), secret
