"""What is wrong with keys, certificate and addresses, and with the URLs that clients may name?

Keys, certificate and addresses are tried with the functions that a start uses, then released.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from holdfast import hide_keys
from holdfast.api.auth import Keys
from holdfast.doctor.findings import Finding, HazardName, failure, ok, warning
from holdfast.engine.unsupported import is_on
from holdfast.errors import AddressInUseError, UsageError
from holdfast.listener.server import bound_socket, check_tls, place
from holdfast.listener.tls import end_of_certificate
from holdfast.nodes.addresses import HeadAddress, own_address
from holdfast.nodes.credentials import head_credentials
from holdfast.nodes.listener import bound_node_port
from holdfast.settings import ListenSettings, Settings

RENEWED_BEFORE_END = timedelta(days=30)
MAX_CONFIG_BYTES = 4 * 1024 * 1024
_DOMAINS = "--allowed-media-domains"
_OWN_CONNECTOR = "http"


def check_front(settings: Settings, now: datetime) -> Iterator[Finding]:
    """Yield every finding about keys, certificate and addresses, that of a head's followers too."""
    yield from _check_keys(settings)
    if settings.listen.is_tls:
        yield from _check_tls(settings.listen, now)
    yield _check_address(settings.listen)
    if settings.node_count > 1 and not settings.node_rank:
        yield from _check_head(settings)


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
    """Return why a start would refuse the keys; None if it would accept them."""
    try:
        Keys.read(settings.listen.api_keys, settings.keys)
    except UsageError as error:
        return failure("keys", error.cause, error.remedy)
    return None


def key_files(settings: Settings) -> list[Path]:
    """Return the key files that the settings name."""
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
    if os.path.lexists(listen.uds or ""):  # to bind it would replace what a killed server left
        remedy = "stop the server that has it; `serve` replaces what a killed one has left."
        return warning("address", f"there is something at unix:{listen.uds}", remedy)
    try:
        with bound_socket(listen) as sock:
            return ok("address", f"free: {place(sock, listen)}")
    except AddressInUseError as error:  # perhaps by the very server that is to be checked
        return warning("address", error.cause, error.remedy)
    except UsageError as error:
        return failure("address", error.cause, error.remedy)


def _check_head(settings: Settings) -> Iterator[Finding]:
    """Yield what keeps followers from this node, if it has the address of the head."""
    try:
        credentials = head_credentials(settings.nodes)
    except UsageError as error:
        yield failure("keys", error.cause, error.remedy)
        return
    name: HazardName = "address"
    try:
        own = own_address(settings.master_address)
    except UsageError:  # of the other machine, with the flags of the head
        return
    key, context = credentials.key, credentials.context
    try:
        with bound_node_port(own, settings.nodes.port, key=key, context=context) as port:
            node_address = HeadAddress(own, port.sock.getsockname()[1])
            yield ok(name, f"{node_address} is free for followers")
    except AddressInUseError as error:  # as above
        yield warning(name, error.cause, error.remedy)
    except UsageError as error:
        yield failure(name, error.cause, error.remedy)


def check_media(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield every finding about media that a client names by URL."""
    name: HazardName = "media-urls"
    connector = environment.get("VLLM_MEDIA_CONNECTOR", _OWN_CONNECTOR)
    is_listed = any(one.partition("=")[0] == _DOMAINS for one in arguments)
    if connector != _OWN_CONNECTOR:
        yield warning(
            name,
            f"VLLM_MEDIA_CONNECTOR={connector} fetches what clients name, and nothing checks the "
            "addresses.",
            "unset it, or make sure that it connects only to public addresses.",
        )
    if is_on("VLLM_MEDIA_URL_ALLOW_REDIRECTS", environment):
        yield warning(
            name,
            "VLLM_MEDIA_URL_ALLOW_REDIRECTS lets a host redirect the server to another one.",
            "unset it.",
        )
    if arguments and not is_listed and (part := _media_part(Path(arguments[0]))):
        yield warning(
            name,
            f"the model accepts media ({part}), and clients may have the server fetch them from "
            "any public address.",
            f"add {_DOMAINS} with the hosts that serve them.",
        )
    elif is_listed:
        yield ok(name, f"{_DOMAINS} is given")


def _media_part(model: Path) -> str:
    """Return the part of the model's configuration that is for media; empty if there is none."""
    try:
        with (model / "config.json").open("rb") as file:
            config = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return ""
    parts = ("vision_config", "audio_config", "video_config", "thinker_config")
    return next((part for part in parts if isinstance(config, dict) and part in config), "")
