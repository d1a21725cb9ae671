"""Authorities that sign certificates for 127.0.0.1."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates for 127.0.0.1, each good for one purpose."""

    name: str
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def named(cls, name: str) -> Authority:
        """A new one."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _signed(_builder(name, name, key).add_extension(_IS_CA, critical=True), key)
        return cls(name, key, certificate)

    def write(self, path: Path) -> Path:
        """Its own certificate, which clients or the server trust."""
        path.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))
        return path

    def issue(self, directory: Path, name: str, *, for_server: bool) -> tuple[Path, Path]:
        """The files of a certificate and its key, put in the place of any older ones."""
        key = ec.generate_private_key(ec.SECP256R1())
        usages = ExtendedKeyUsageOID
        usage = usages.SERVER_AUTH if for_server else usages.CLIENT_AUTH
        address = x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))])
        builder = _builder(name, self.name, key).add_extension(address, critical=False)
        certificate = _signed(
            builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False), self.key
        )
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        paths = directory / "cert.pem", directory / "key.pem"
        directory.mkdir(exist_ok=True)
        contents = certificate.public_bytes(serialization.Encoding.PEM), secret
        for path, content in zip(paths, contents, strict=True):
            new = path.with_suffix(".new")
            new.write_bytes(content)
            new.replace(path)
        return paths


_IS_CA = x509.BasicConstraints(ca=True, path_length=None)


def _builder(name: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
    )


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    return builder.sign(key, hashes.SHA256())


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
