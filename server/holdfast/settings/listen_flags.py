"""vLLM's flags and variables that the listener needs before vLLM is imported."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping

from holdfast.errors import UsageError
from holdfast.settings import ListenSettings
from holdfast.settings.flag import key, seconds
from holdfast.settings.node_flags import FOLLOWER_PORT

_MAX_PORT = 65535
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
ALIASES = {
    "drain_timeout": "shutdown_timeout",
    "max_headers": "h11_max_header_count",
    "max_header_size": "h11_max_incomplete_event_size",
}
"""Our flags, and vLLM's flags that set the same. vLLM applies those of h11 to h11 only."""


def add_listener_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags, in vLLM's spelling."""
    listener = parser.add_argument_group(
        "listener", "vLLM's flags that are needed before vLLM is loaded."
    )
    listener.add_argument("--host", type=no_nul, default="")
    listener.add_argument("--port", type=_port)
    for name in ("uds", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs"):
        listener.add_argument(f"--{name}", type=no_nul)
    listener.add_argument("--ssl-ciphers")
    listener.add_argument("--ssl-cert-reqs", type=int, choices=(0, 1, 2), default=0)
    listener.add_argument("--enable-ssl-refresh", action=argparse.BooleanOptionalAction)
    listener.add_argument("--root-path", default="")
    listener.add_argument("--allowed-origins", type=_strings, default=())
    for name in ("allowed-methods", "allowed-headers"):
        listener.add_argument(f"--{name}", type=_strings, default=("*",))
    listener.add_argument("--allow-credentials", action=argparse.BooleanOptionalAction)
    listener.add_argument("--uvicorn-log-level", choices=(*LOG_LEVELS, "trace"), default="info")
    listener.add_argument("--disable-uvicorn-access-log", action="store_true")
    listener.add_argument("--disable-access-log-for-endpoints", default="")
    listener.add_argument("--api-key", nargs="*")
    for name in ALIASES.values():
        listener.add_argument(f"--{name.replace('_', '-')}", help=argparse.SUPPRESS)
    listener.add_argument("--log-level", type=str.lower, choices=LOG_LEVELS, default="info")


def no_nul(text: str) -> str:
    """Parse an address or a path; an ArgumentTypeError if it contains a NUL."""
    if "\0" in text:
        raise argparse.ArgumentTypeError("it contains a NUL")
    return text


def _port(text: str) -> int:
    """Parse a port, or 0 for any that is free; a UsageError says what is possible."""
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) > _MAX_PORT:
        raise UsageError(f"--port: {text} is not a port.", remedy="use 0 to 65535.")
    return int(text)


def _strings(text: str) -> tuple[str, ...]:
    """Parse a JSON array of strings, as vLLM does; an ArgumentTypeError if it is something else."""
    try:
        strings = json.loads(text)
    except (ValueError, RecursionError):
        strings = None
    if not isinstance(strings, list) or not all(isinstance(one, str) for one in strings):
        raise argparse.ArgumentTypeError("it is not a JSON array of strings")
    return tuple(strings)


def listen_settings(
    namespace: argparse.Namespace, environment: Mapping[str, str]
) -> ListenSettings:
    """Return how to listen, from the flags and from vLLM's variables.

    Raises:
        UsageError: a value is out of range, or has no meaning beside the others.
    """
    default = FOLLOWER_PORT if namespace.node_rank else ListenSettings().port
    port = default if namespace.port is None else namespace.port
    if namespace.ssl_keyfile and not namespace.ssl_certfile:
        raise UsageError(
            "--ssl-keyfile was given without a certificate.", remedy="add --ssl-certfile."
        )
    if namespace.root_path and not namespace.root_path.startswith("/"):
        raise UsageError(
            f"--root-path: {namespace.root_path!r} does not begin with a slash.",
            remedy='begin it with "/".',
        )
    return ListenSettings(
        host=namespace.host,
        port=port,
        uds=namespace.uds,
        ssl_keyfile=namespace.ssl_keyfile,
        ssl_certfile=namespace.ssl_certfile,
        ssl_ca_certs=namespace.ssl_ca_certs,
        ssl_cert_reqs=namespace.ssl_cert_reqs,
        ssl_ciphers=namespace.ssl_ciphers,
        is_tls_refreshed=bool(namespace.enable_ssl_refresh),
        root_path=namespace.root_path.rstrip("/"),
        allowed_origins=namespace.allowed_origins,
        allowed_methods=namespace.allowed_methods,
        allowed_headers=namespace.allowed_headers,
        allows_credentials=bool(namespace.allow_credentials),
        uvicorn_log_level=namespace.uvicorn_log_level,
        log_level=namespace.log_level,
        has_access_log=not namespace.disable_uvicorn_access_log,
        unlogged_paths=paths_of(namespace.disable_access_log_for_endpoints),
        api_keys=_api_keys(namespace.api_key, environment.get("VLLM_API_KEY", "")),
        keep_alive_seconds=_keep_alive_seconds(environment),
    )


def paths_of(text: str) -> tuple[str, ...]:
    """Return the paths of `--disable-access-log-for-endpoints`."""
    return tuple(path.strip() for path in text.split(",") if path)


def take_aliases(namespace: argparse.Namespace) -> None:
    """Give each flag of ours that is absent the value of its alias, if that was given."""
    for ours, theirs in ALIASES.items():
        value = getattr(namespace, theirs)
        if getattr(namespace, ours) is None and value is not None:
            setattr(namespace, ours, str(value))


def _keep_alive_seconds(environment: Mapping[str, str]) -> float:
    text = environment.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE")
    try:
        return seconds(text) if text else ListenSettings().keep_alive_seconds
    except ValueError as error:
        raise UsageError(
            f"VLLM_HTTP_TIMEOUT_KEEP_ALIVE: {error}, not {text!r}.",
            remedy="correct it, or unset it and use --keep-alive-timeout.",
        ) from None


def _api_keys(given: list[str] | None, variable: str) -> tuple[str, ...]:
    """Return the keys of the flag, or the key of vLLM's variable. A UsageError repeats no key."""
    source, keys = ("VLLM_API_KEY", [variable]) if given is None else ("--api-key", given)
    if given is None and not variable:  # a Compose file passes an unset variable as empty
        return ()
    try:
        # An empty shell variable would open the server to everyone.
        return tuple(map(key, keys or [""]))
    except ValueError as error:
        raise UsageError(f"{source}: {error}.", remedy="correct it, or leave it out.") from None
