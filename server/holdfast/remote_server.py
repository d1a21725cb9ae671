"""Which server does a command talk to? Its address, its key, and its certificate."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx

from holdfast.api.key_lines import key_file_error, key_lines
from holdfast.errors import UsageError

_PROXIED = ("http", "https", "all")


def base_url(given: str) -> str:
    """Return the address without the `/v1` that clients of OpenAI have behind it.

    Raises:
        UsageError: it is not the address of a server, or more than that.
    """
    if "?" in given or "#" in given:  # without a quotation: a query may have a key
        raise UsageError(
            "URL: it has a query or a fragment, which would not be sent with each request.",
            remedy="give it without `?` or `#` and what follows, for example http://spark:8000.",
        )
    if not _is_address(given):
        shown = given.rpartition("@")[2]  # not a password
        raise UsageError(
            f"URL: {shown!r} is not the address of a server.",
            remedy="give it with http:// or https://, for example http://spark:8000.",
        )
    return given.rstrip("/").removesuffix("/v1")


def server_verification(url: str) -> ssl.SSLContext:
    """Return how TLS verifies the server at an address; for http:// it trusts no authority."""
    if httpx.URL(url).scheme == "http":  # loading the authorities takes longer than many requests
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return httpx.create_ssl_context()


def check_proxies() -> None:
    """Check the proxies that the environment names.

    Raises:
        UsageError: httpx cannot use one of them, or read the hosts that need none.
    """
    try:
        httpx.AsyncClient(verify=False)  # noqa: S501 - it sends nothing, and reads no certificates
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        proxies = getproxies()
        for scheme in filter(proxies.get, _PROXIED):
            _check_proxy(_variable(scheme), proxies[scheme])
        raise UsageError(
            f"{_variable('no')}: httpx cannot read one of its hosts: {error}",
            remedy="unset the variable for this command, or write IPv6 addresses in it without "
            "brackets and networks.",
        ) from error


def _check_proxy(variable: str, proxy: str) -> None:
    """Check one proxy as httpx reads it; without a scheme it is http.

    Raises:
        UsageError: httpx cannot use it.
    """
    url = proxy if "://" in proxy else f"http://{proxy}"
    try:
        httpx.AsyncHTTPTransport(proxy=url, verify=False)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise UsageError(
            f"{variable}: httpx cannot use this proxy: {error}",
            remedy="unset the variable for this command, or name an HTTP proxy.",
        ) from error


def _variable(scheme: str) -> str:
    """Return the name under which the environment has a proxy: in any case, as urllib reads it."""
    wanted = f"{scheme}_proxy"
    return " or ".join(sorted(name for name in os.environ if name.lower() == wanted))


def _is_address(given: str) -> bool:
    try:
        parts = urlsplit(given)
        httpx.URL(given)
        # Reading the port is what finds that it is not a number.
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        return False


def read_key(path: Path | None, flag: str = "--api-key-file") -> str:
    """Return the first key of the file that a flag names; empty without a file.

    It may be the key file of the server itself, with names and limits.

    Raises:
        UsageError: the file cannot be read, or is not a list of keys.
    """
    if path is None:
        return ""
    try:
        return key_lines(path.read_bytes())[0].key
    except (OSError, ValueError) as error:
        raise key_file_error(flag, path, error) from None
