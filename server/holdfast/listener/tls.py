"""The certificate of the server, which may be renewed while it runs."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

import uvicorn

from holdfast.errors import UsageError, reason_of
from holdfast.settings import ListenSettings

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
_NO_PASSWORD = ""
"""Without it, OpenSSL would ask the terminal for the password of an encrypted key and block."""

_CERTIFICATE = re.compile(rb"-----BEGIN [A-Z0-9 ]*CERTIFICATE-----")
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----")

Stamp = tuple[tuple[int, int, int], ...]


@asynccontextmanager
async def certificates_refreshed(
    config: uvicorn.Config, settings: ListenSettings
) -> AsyncIterator[None]:
    """Use replaced files for the next handshake while entered, if `--enable-ssl-refresh` is set.

    A new context replaces the last one in `config`, since a context never forgets its client
    authorities, nor the sessions of clients that it would not ask for their certificates again.
    Existing connections are not affected.

    The files are polled, not watched: a watch follows a file, which a renewal replaces, or a link
    to it, which Kubernetes replaces. Files that do not match are ignored with an error.
    """
    if config.ssl is None or not settings.is_tls_refreshed:
        yield
        return
    task = asyncio.create_task(_follow(config, settings), name="certificates")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def end_of_certificate(path: Path) -> datetime:
    """Return when the first certificate in the file, the server's, expires."""
    from cryptography import x509  # noqa: PLC0415 - only for the doctor

    return x509.load_pem_x509_certificates(path.read_bytes())[0].not_valid_after_utc


def tls_error(settings: ListenSettings, error: OSError) -> UsageError:
    """Return the error of a start: OpenSSL names no file, and few of the reasons."""
    cause, remedy = _wrong_file(settings) or _wrong_pair(settings, error)
    return UsageError(f"cannot set up TLS: {cause}.", remedy=remedy)


def _wrong_file(settings: ListenSettings) -> tuple[str, str] | None:
    """Return which file cannot be read, or lacks what its flag is for, and the remedy."""
    cert, key = settings.ssl_certfile, settings.ssl_keyfile
    for flag, path, kind, pattern in (
        ("--ssl-certfile", cert, "certificate", _CERTIFICATE),
        ("--ssl-keyfile", key, "private key", _PRIVATE_KEY),
        ("--ssl-ca-certs", settings.ssl_ca_certs, "certificate", _CERTIFICATE),
    ):
        if not path:
            continue
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            return f"{flag}: {path}: {reason_of(error)}", f"name a readable file with {flag}."
        if not pattern.search(content):
            return f"{path} contains no {kind}", f"name a PEM file of a {kind} with {flag}."
        if flag == "--ssl-certfile" and not key and not _PRIVATE_KEY.search(content):
            return f"{path} contains no private key", "add --ssl-keyfile."
    return None


def _wrong_pair(settings: ListenSettings, error: OSError) -> tuple[str, str]:
    cert, key = settings.ssl_certfile, settings.ssl_keyfile or settings.ssl_certfile
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return (
            f"the private key in {key} does not belong to the certificate in {cert}",
            "name the two that belong together with --ssl-certfile and --ssl-keyfile.",
        )
    return str(error), "check --ssl-keyfile, --ssl-certfile and --ssl-ca-certs."


async def _follow(config: uvicorn.Config, settings: ListenSettings) -> None:
    loaded = _stamp(settings)
    while True:
        await asyncio.sleep(POLL_SECONDS)
        found = _stamp(settings)
        if found is None or found == loaded:
            continue
        loaded = found
        try:
            renewed = _context(settings)
        except OSError as error:  # ssl.SSLError is one
            logger.error("kept the old certificate, because the renewed one is invalid: %s", error)  # noqa: TRY400 - the line says it all
        else:
            config.ssl = renewed
            logger.info("loaded the renewed certificate from %s", settings.ssl_certfile)


def _stamp(settings: ListenSettings) -> Stamp | None:
    """Return what changes when a file is written or replaced; None while one is missing."""
    paths = (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
    try:
        stats = [os.stat(path) for path in paths if path]  # noqa: PTH116 - text as it was given
    except OSError:
        return None
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


def _context(settings: ListenSettings) -> ssl.SSLContext:
    """Return a context as uvicorn makes it at the start."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if settings.ssl_certfile:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, _NO_PASSWORD)
    context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
    if settings.ssl_ca_certs:
        context.load_verify_locations(settings.ssl_ca_certs)
    if settings.ssl_ciphers:
        context.set_ciphers(settings.ssl_ciphers)
    return context
