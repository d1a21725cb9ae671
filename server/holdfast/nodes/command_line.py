"""The command line of `holdfast follow`, and what vLLM's way to start a follower says of it.

vLLM starts the other nodes with `serve ... --node-rank 1 --headless`. The model and its flags
stand there too, but come from the head.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.settings import (
    Flag,
    ListenSettings,
    LogFormat,
    LogSettings,
    MemorySettings,
    NodeSettings,
    Settings,
    add_flag,
    read_group,
)
from holdfast.settings.flag import (
    Parser,
    command_parser,
    file_path,
    flag,
    is_node_name,
    port_number,
    seconds,
)
from holdfast.settings.listen_flags import LOG_LEVELS, no_nul
from holdfast.settings.node_flags import FOLLOWER_PORT, KEY_REMEDY, is_host, is_ipv6

_DESCRIPTION = """\
Run the ranks of this node for the server at HOST, which `holdfast serve --nnodes` started there.
"""
_EPILOG = """\
The server hands out the model and its flags. Health and metrics of this node are at --port. Exit
codes: 0 stopped, 2 bad usage, or the server refuses a node that has never joined, 6 address in use.
"""
_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^]]+)\]|(?P<name>[^][:]+))(?::(?P<port>.*))?", re.DOTALL)


_MEANINGS = {
    "key_file": "file of the key that all nodes share, at least 32 characters; required",
    "guard": "end the ranks of this node, and with them the engine, before the host runs out of "
    "memory: `auto` where the device shares the host's memory",
    "marks": "thresholds for the available memory of the host or container: below the last, the "
    "ranks of this node end; the node joins again above 1.125 times the first",
    "format": "`json` writes one object per line, the others one line per event",
}
"""The meanings of flags that mean something else to `serve`, by their settings."""


@dataclass(frozen=True, slots=True)
class StopSettings:
    """How a follower ends, which no server has."""

    head_drain_seconds: float = flag(
        "--head-drain-timeout",
        seconds,
        0.0,
        "SECONDS",
        "how long the ranks keep running after SIGTERM, so that a head that is stopped at the "
        "same moment can drain; what stops the follower must allow 30 s more. 0 leaves at once, "
        "and ends the engine",
        shown="0",
    )


@dataclass(frozen=True, slots=True)
class FollowSettings:
    """All settings of one `holdfast follow`."""

    head_host: str
    head_port: int
    key_file: Path
    node_name: str
    ca_certs: Path | None
    """Who may have signed the head's certificate; without them there is no TLS."""
    listen: ListenSettings
    memory: MemorySettings = field(default_factory=MemorySettings)
    stop: StopSettings = field(default_factory=StopSettings)
    log_format: LogFormat = "auto"
    ignored_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys of the server that stand on the command line, since the head's was copied."""
    has_ignored_flags: bool = False
    """Whether a command line of `serve` was given, whose model and other flags have no effect."""


def follow_parser() -> Parser:
    """Return the parser of `holdfast follow`."""
    parser = command_parser("follow", "HOST[:PORT] [flags below]", _DESCRIPTION, _EPILOG)
    default = NodeSettings().port
    parser.add_argument(
        "head",
        metavar="HOST[:PORT]",
        help=f"address and --node-port of the head (default port: {default})",
    )
    add_flag(parser, _flag(NodeSettings, "key_file"))
    add_flag(parser, _flag(NodeSettings, "name"))
    parser.add_argument(
        "--ssl-ca-certs",
        metavar="FILE",
        help="file of the authorities that signed the head's --node-ssl-certfile; without it, "
        "TLS is off",
    )
    parser.add_argument(
        "--host",
        type=no_nul,
        default="",
        metavar="ADDRESS",
        help="address for health and metrics (default: all addresses)",
    )
    parser.add_argument(
        "--port",
        default=str(FOLLOWER_PORT),
        metavar="PORT",
        help=f"port for health and metrics; 0 picks a free port (default: {FOLLOWER_PORT})",
    )
    add_flag(parser, _flag(MemorySettings, "guard"))
    add_flag(parser, _flag(MemorySettings, "marks"))
    add_flag(parser, _flag(StopSettings, "head_drain_seconds"))
    parser.add_argument(
        "--log-level", type=str.lower, choices=LOG_LEVELS, default="info", help="default: info"
    )
    add_flag(parser, _flag(LogSettings, "format"))
    return parser


def read_follow(arguments: Sequence[str], environment: Mapping[str, str]) -> FollowSettings:
    """Return the settings of `holdfast follow`, from flags and environment.

    Raises:
        UsageError: a flag is unknown, missing or wrong.
    """
    namespace = follow_parser().parse_args(arguments)
    host, port = head_address(namespace.head)
    nodes = read_group(NodeSettings, namespace, environment)
    logs = read_group(LogSettings, namespace, environment)
    return FollowSettings(
        head_host=host,
        head_port=port,
        key_file=_key_file(nodes),
        node_name=_node_name(nodes),
        ca_certs=_ca_certs(namespace.ssl_ca_certs),
        listen=_listen_settings(namespace.host, _port(namespace.port), namespace.log_level),
        memory=read_group(MemorySettings, namespace, environment),
        stop=read_group(StopSettings, namespace, environment),
        log_format=logs.format,
    )


def head_drain_seconds(arguments: Sequence[str], environment: Mapping[str, str]) -> float:
    """Return for how long a follower goes on after SIGTERM; its other flags may be wrong.

    Raises:
        UsageError: the flag has no such value.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    add_flag(parser, _flag(StopSettings, "head_drain_seconds"))
    namespace, _ = parser.parse_known_args(arguments)
    stop: StopSettings = read_group(StopSettings, namespace, environment)
    return stop.head_drain_seconds


def of_headless(settings: Settings) -> FollowSettings:
    """Return what `serve --node-rank N --headless` says of the follower that it starts.

    Raises:
        UsageError: the host name cannot name a node.
    """
    listen = settings.listen
    # Otherwise --ssl-ca-certs are the authorities of the clients' certificates.
    names_the_heads = bool(settings.nodes.certfile or not listen.ssl_certfile)
    return FollowSettings(
        head_host=settings.master_address,
        head_port=settings.nodes.port,
        key_file=_key_file(settings.nodes),
        node_name=_node_name(settings.nodes),
        ca_certs=_ca_certs(listen.ssl_ca_certs) if names_the_heads else None,
        listen=_listen_settings(listen.host, listen.port, listen.log_level),
        memory=settings.memory,
        log_format=settings.logs.format,
        ignored_keys=settings.given_keys,
        has_ignored_flags=True,
    )


def head_address(text: str) -> tuple[str, int]:
    """Parse HOST, HOST:PORT or [IPv6]:PORT; the port is that of `--node-port` by default.

    An IPv6 address without brackets has no port, as in `--master-addr`.

    Raises:
        UsageError: it is something else.
    """
    if is_ipv6(text):
        return text, NodeSettings().port
    found = _ADDRESS.fullmatch(text)
    host = (found["ipv6"] or found["name"] or "") if found else ""
    try:
        if found is None or not (is_ipv6(host) if found["ipv6"] else is_host(host)):
            raise ValueError("expected HOST or HOST:PORT")  # noqa: TRY301 - one exit for both
        port = NodeSettings().port if found["port"] is None else port_number(found["port"])
    except ValueError as error:
        raise UsageError(
            f"the address of the server: {error}, not {text!r}.",
            remedy="write it as 10.0.0.1 or 10.0.0.1:29600, and an IPv6 address with a port in "
            "brackets.",
        ) from None
    return host, port


def _flag(group: type, name: str) -> Flag:
    """Return the flag of one setting of a group, with what it means on a follower."""
    found: dict[str, Flag] = {one.name: one.metadata["flag"] for one in fields(group)}
    return replace(found[name], meaning=_MEANINGS.get(name, found[name].meaning))


def _key_file(nodes: NodeSettings) -> Path:
    if nodes.key_file is None:
        raise UsageError("a follower needs --node-key-file.", remedy=KEY_REMEDY)
    return nodes.key_file


def _node_name(nodes: NodeSettings) -> str:
    name = nodes.name or platform.node()
    if not is_node_name(name):
        raise UsageError(
            f"the host name: {name!r} cannot name a node.", remedy="give the node a --node-name."
        )
    return name


def _ca_certs(text: str | None) -> Path | None:
    if text is None:
        return None
    try:
        return file_path(text)
    except ValueError as error:
        raise UsageError(
            f"--ssl-ca-certs: {error}.", remedy="name a file of certificates in PEM."
        ) from None


def _port(text: str) -> int:
    try:
        return 0 if text == "0" else port_number(text)
    except ValueError:
        raise UsageError(f"--port: {text!r} is not a port.", remedy="use 0 to 65535.") from None


def _listen_settings(host: str, port: int, log_level: str) -> ListenSettings:
    """Return how to listen for health checks and scrapes; they are not logged."""
    return ListenSettings(
        host=host,
        port=port,
        uvicorn_log_level="warning",
        has_access_log=False,
        log_level=log_level,
    )
