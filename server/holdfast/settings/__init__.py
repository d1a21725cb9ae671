"""Every flag of `holdfast serve`: parsed once, frozen, grouped by owner.

Runs in the front end, in followers and in the commands, since each reads its own command line.
`groups`, `limits` and `supervision` declare our flags, `flag` defines what a flag is and parses its
value, and `recycling` parses that of `--recycle-after`. `listen_flags` reads vLLM's flags of the
listener, `node_flags` those of several nodes, and `yaml_files` the files that flags name.
`variable_names` refuses variables that nothing reads. Sizes are bytes, times are seconds.

To add a flag: declare a member of a group with `flag.flag`, which also names its variable
`HOLDFAST_...`; add a row to `VALUES` in `tests/unit/settings/test_groups.py`; run `make reference`;
and add a line to `CHANGELOG.md`. A new group belongs in `Settings` and in `GROUPS`. A flag that
`holdfast follow` has too is also added in `nodes.command_line`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from holdfast.settings.flag import Flag
from holdfast.settings.groups import (
    KeySettings,
    LearnedRestart,
    LogFormat,
    LogSettings,
    NodeSettings,
    OverloadSettings,
    PageSettings,
    ProbeSettings,
    RequestLogStyle,
    Suite,
    WorkspaceSettings,
)
from holdfast.settings.limits import LimitSettings
from holdfast.settings.supervision import GuardMode, MemorySettings, SupervisionSettings

__all__ = [
    "GROUPS",
    "Flag",
    "GuardMode",
    "KeySettings",
    "LearnedRestart",
    "LimitSettings",
    "ListenSettings",
    "LogFormat",
    "LogSettings",
    "MemorySettings",
    "NodeSettings",
    "OverloadSettings",
    "PageSettings",
    "ProbeSettings",
    "RequestLogStyle",
    "Settings",
    "Suite",
    "SupervisionSettings",
    "WorkspaceSettings",
    "add_flag",
    "add_flags",
    "flags",
    "read_group",
    "read_groups",
]


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """vLLM's own flags that the listener needs before vLLM is imported."""

    host: str = ""
    port: int = 8000
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_ciphers: str | None = None
    is_tls_refreshed: bool = False
    root_path: str = ""
    """It does not end in a slash."""
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allows_credentials: bool = False
    uvicorn_log_level: str = "info"
    has_access_log: bool = True
    unlogged_paths: tuple[str, ...] = ()
    log_level: str = "info"
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    keep_alive_seconds: float = 5.0
    """The value of VLLM_HTTP_TIMEOUT_KEEP_ALIVE; our own flag overrides it."""

    @property
    def is_tls(self) -> bool:
        """Whether clients must use TLS. The certificate file may contain the private key too."""
        return bool(self.ssl_certfile)


_ADDRESS_FLAGS = frozenset({"--host", "--port", "--uds"})


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one `holdfast serve`."""

    is_demo: bool = False
    workspace: WorkspaceSettings = field(default_factory=WorkspaceSettings)
    probe: ProbeSettings = field(default_factory=ProbeSettings)
    supervision: SupervisionSettings = field(default_factory=SupervisionSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    overload: OverloadSettings = field(default_factory=OverloadSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    keys: KeySettings = field(default_factory=KeySettings)
    nodes: NodeSettings = field(default_factory=NodeSettings)
    logs: LogSettings = field(default_factory=LogSettings)
    page: PageSettings = field(default_factory=PageSettings)
    listen: ListenSettings = field(default_factory=ListenSettings)
    node_count: int = 1
    """The value of `--nnodes`."""
    node_rank: int = 0
    """Above 0 this node follows a head, as with `holdfast follow`."""
    master_address: str = ""
    """An address of the head that the other nodes reach; never empty if there are several."""
    has_master_port: bool = False
    """Whether `--master-port` was given, which has no effect."""
    vllm_arguments: tuple[str, ...] = field(default=(), repr=False)
    """The command line as given, including keys, for vLLM's own parser."""

    @property
    def is_open(self) -> bool:
        """Whether clients need neither an API key nor a certificate."""
        has_key = bool(self.listen.api_keys or self.keys.api_key_file)
        return not has_key and not self.listen.ssl_cert_reqs

    @property
    def given_keys(self) -> tuple[str, ...]:
        """The keys of clients and operators that stand in flags or variables."""
        return (*self.listen.api_keys, *filter(None, [self.keys.admin_api_key]))

    @property
    def uvicorn_listen(self) -> ListenSettings:
        """What uvicorn is given: its access log is on only in place of our own line."""
        has_access_log = self.listen.has_access_log and self.logs.requests == "uvicorn"
        return replace(self.listen, has_access_log=has_access_log)

    @property
    def arguments_without_address(self) -> tuple[str, ...]:
        """The command line without the address: the same engine may listen elsewhere."""
        kept: list[str] = []
        is_value = False
        for argument in self.vllm_arguments:
            name, has_value, _ = argument.partition("=")
            is_address = name in _ADDRESS_FLAGS
            if not (is_address or is_value):
                kept.append(argument)
            is_value = is_address and not has_value
        return tuple(kept)


GROUPS: Mapping[str, type] = {
    "workspace": WorkspaceSettings,
    "probe": ProbeSettings,
    "supervision": SupervisionSettings,
    "memory": MemorySettings,
    "overload": OverloadSettings,
    "limits": LimitSettings,
    "keys": KeySettings,
    "nodes": NodeSettings,
    "logs": LogSettings,
    "page": PageSettings,
}


def flags() -> Iterator[Flag]:
    """Yield every flag of ours, in the order of the documentation."""
    for group in GROUPS.values():
        for member in fields(group):
            yield member.metadata["flag"]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare our flags on our parser or vLLM's. A flag that is not given is None."""
    group = parser.add_argument_group("holdfast", "Workspaces, proof and supervision.")
    group.add_argument("--demo", action="store_true", help="serve the embedded demo model")
    for flag in flags():
        add_flag(group, flag)


def add_flag(parser: argparse._ActionsContainer, flag: Flag) -> None:
    """Declare one of our flags. It is None if it is not given."""
    meaning = f"{flag.meaning} (default: {flag.shown_default}; {flag.variable})"
    if flag.is_switch:
        parser.add_argument(flag.name, action="store_const", const="1", help=meaning)
    else:
        parser.add_argument(flag.name, metavar=flag.metavar, help=meaning.replace("%", "%%"))


def read_groups(namespace: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """Read our groups of settings: a flag overrides its variable, which overrides the default."""
    return {name: read_group(kind, namespace, environment) for name, kind in GROUPS.items()}


def read_group(kind: type, namespace: argparse.Namespace, environment: Mapping[str, str]) -> Any:
    """Read one group of settings, as `read_groups` does; a flag may be unknown to the parser."""
    members: Sequence[Field[Any]] = fields(kind)
    given = (
        (member.name, _given(member.metadata["flag"], namespace, environment)) for member in members
    )
    return kind(**{name: value for name, (is_given, value) in given if is_given})


def _given(
    flag: Flag, namespace: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[bool, Any]:
    text = getattr(namespace, flag.destination, None)
    if text is not None:
        return True, flag.read(text, flag.name)
    text = environment.get(flag.variable)
    if not text:  # Compose passes a variable that is not set as an empty one
        return False, None
    # A cluster sets HOLDFAST_NODE_PORT to an address beside a Service named `holdfast-node`.
    if flag.variable.endswith("_PORT") and "://" in text:
        return False, None
    return True, flag.read(text, flag.variable)
