"""Certificates: those of the server, renewed while it runs, and that of its own client."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from holdfast.settings import ListenSettings

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
_NO_PASSWORD = ""
"""Else OpenSSL would ask the terminal for that of an encrypted key, and everybody would wait."""
_LIFE = timedelta(days=3650)

Stamp = tuple[tuple[int, int, int], ...]


@asynccontextmanager
async def refreshed(
    context: ssl.SSLContext | None, settings: ListenSettings, identity: Path | None = None
) -> AsyncIterator[None]:
    """While entered, files that are replaced are what the next handshake shows, if asked for.

    A new context takes the place of the last one, since one that has authorities for clients keeps
    them. Connections that are there stay as they are; `identity` is let in as before.

    The files are looked at and not watched: a watch follows a file, which a renewal replaces, or a
    link to it, as Kubernetes does. Files that do not fit together are left out with an error.
    """
    if context is None or not settings.is_tls_refreshed:
        yield
        return
    if settings.ssl_cert_reqs:
        # Who resumes a session is not asked for a certificate again.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    task = asyncio.create_task(_follow(context, settings, identity), name="certificates")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def own_identity(directory: Path) -> Path:
    """A file with a new certificate and its key, for our own client where clients need one.

    That of the server cannot serve: other authorities may vouch for clients than for the server,
    and many certificates of servers are for nothing else.
    """
    from cryptography import x509  # noqa: PLC0415 - only where clients need certificates
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415 - as above
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415 - as above

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "holdfast probe")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + _LIFE)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = directory / "probe.pem"
    path.touch(mode=0o600)
    path.write_bytes(secret + certificate.public_bytes(serialization.Encoding.PEM))
    return path


def end_of_certificate(path: Path) -> datetime:
    """When the first certificate in the file, which is that of the server, ends."""
    from cryptography import x509  # noqa: PLC0415 - only for the doctor

    return x509.load_pem_x509_certificates(path.read_bytes())[0].not_valid_after_utc


def admit(context: ssl.SSLContext | None, identity: Path | None) -> None:
    """Let who shows `identity` through the next handshakes, beside those who were let before."""
    if context is not None and identity is not None:
        context.load_verify_locations(identity)


async def _follow(context: ssl.SSLContext, settings: ListenSettings, identity: Path | None) -> None:
    loaded = _stamp(settings)
    while True:
        await asyncio.sleep(POLL_SECONDS)
        found = _stamp(settings)
        if found is None or found == loaded:
            continue
        loaded = found
        try:
            fresh = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            _load(fresh, settings)
            admit(fresh, identity)
        except OSError as error:  # ssl.SSLError is one
            logger.error("kept the old certificate, as the renewed one is invalid: %s", error)  # noqa: TRY400 - the line says it all
        else:
            # The listener's own context cannot be replaced; each handshake asks it for another.
            context.sni_callback = partial(_hand_over, fresh)
            logger.info("loaded the renewed certificate from %s", settings.ssl_certfile)


def _hand_over(
    fresh: ssl.SSLContext, handshake: ssl.SSLObject, _name: str | None, _asked: ssl.SSLContext
) -> None:
    handshake.context = fresh


def _stamp(settings: ListenSettings) -> Stamp | None:
    """What changes when a file is written or replaced; None while one is missing."""
    paths = (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
    try:
        stats = [os.stat(path) for path in paths if path]  # noqa: PTH116 - text as it was given
    except OSError:
        return None
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


def _load(context: ssl.SSLContext, settings: ListenSettings) -> None:
    if settings.ssl_certfile:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, _NO_PASSWORD)
    if settings.ssl_ca_certs:
        context.load_verify_locations(settings.ssl_ca_certs)
