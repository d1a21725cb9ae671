"""Would the front end listen? Tried with the functions of a start, and let go at once."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from holdfast import hide_keys
from holdfast.api.auth import Keys
from holdfast.doctor.findings import Finding, failure, ok, warning
from holdfast.errors import AddressInUseError, UsageError
from holdfast.listener.server import address, bound, check_tls
from holdfast.listener.tls import end_of_certificate
from holdfast.settings import ListenSettings, Settings

RENEWED_BEFORE_END = timedelta(days=30)


def check_front(settings: Settings, now: datetime) -> Iterator[Finding]:
    """Every finding about keys, certificate and address."""
    yield from _check_keys(settings)
    if settings.listen.is_tls:
        yield from _check_tls(settings.listen, now)
    yield _check_address(settings.listen)


def _check_keys(settings: Settings) -> Iterator[Finding]:
    if refusal := refused_keys(settings):
        yield refusal
        return
    readable = [path for path in key_files(settings) if path.stat().st_mode & stat.S_IROTH]
    if access := hide_keys.open_access(settings):
        yield warning("keys", *access)
    for path in readable:
        yield warning("keys", f"every user can read {path}.", f"chmod o-r {path}")
    if not settings.is_open and not readable:
        yield ok("keys", "clients need a certificate or an API key")


def refused_keys(settings: Settings) -> Finding | None:
    """Why a start would not take the keys; None if it would."""
    try:
        Keys.read(settings.listen.api_keys, settings.keys)
    except UsageError as error:
        return failure("keys", error.cause, error.remedy)
    return None


def key_files(settings: Settings) -> list[Path]:
    """The files of keys that are named."""
    given = (settings.keys.api_key_file, settings.keys.admin_api_key_file)
    return [path for path in given if path is not None]


def _check_tls(listen: ListenSettings, now: datetime) -> Iterator[Finding]:
    try:
        check_tls(listen)
    except UsageError as error:
        yield failure("tls", error.cause, error.remedy)
        return
    end = end_of_certificate(Path(str(listen.ssl_certfile)))
    seen = f"the certificate expires on {end:%Y-%m-%d}"
    if end <= now:
        yield failure("tls", f"{seen}: clients reject it.", "renew it.")
    elif end - now < RENEWED_BEFORE_END and not listen.is_tls_refreshed:
        yield warning(
            "tls",
            f"{seen}, and the server will not load a renewed one.",
            "add --enable-ssl-refresh.",
        )
    else:
        yield ok("tls", seen)


def _check_address(listen: ListenSettings) -> Finding:
    try:
        with bound(listen) as sock:
            return ok("address", f"{address(sock, listen)} is free")
    except AddressInUseError as error:  # perhaps by the server that is asked about
        return warning("address", error.cause, error.remedy)
    except UsageError as error:
        return failure("address", error.cause, error.remedy)
