"""Everything that can be set: parsed once, frozen, grouped by owner.

`groups` and `limits` declare our flags, `flag` defines what a flag is and parses its value, and
`yaml_files` reads the files that flags name. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from holdfast.settings.flag import Flag
from holdfast.settings.groups import (
    KeySettings,
    LearnedRestart,
    LogFormat,
    LogSettings,
    OverloadSettings,
    ProbeSettings,
    RequestLogStyle,
    Suite,
    SupervisionSettings,
    WorkspaceSettings,
)
from holdfast.settings.limits import LimitSettings

__all__ = [
    "GROUPS",
    "Flag",
    "KeySettings",
    "LearnedRestart",
    "LimitSettings",
    "ListenSettings",
    "LogFormat",
    "LogSettings",
    "OverloadSettings",
    "ProbeSettings",
    "RequestLogStyle",
    "Settings",
    "Suite",
    "SupervisionSettings",
    "WorkspaceSettings",
    "add_flags",
    "flags",
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
    overload: OverloadSettings = field(default_factory=OverloadSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    keys: KeySettings = field(default_factory=KeySettings)
    logs: LogSettings = field(default_factory=LogSettings)
    listen: ListenSettings = field(default_factory=ListenSettings)
    vllm_arguments: tuple[str, ...] = field(default=(), repr=False)
    """The command line as given, including keys, for vLLM's own parser."""

    @property
    def is_open(self) -> bool:
        """Whether clients need neither an API key nor a certificate."""
        has_key = bool(self.listen.api_keys or self.keys.api_key_file)
        return not has_key and not self.listen.ssl_cert_reqs

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
    "overload": OverloadSettings,
    "limits": LimitSettings,
    "keys": KeySettings,
    "logs": LogSettings,
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
        meaning = f"{flag.meaning} (default: {flag.shown_default}; {flag.variable})"
        if flag.is_switch:
            group.add_argument(flag.name, action="store_const", const="1", help=meaning)
        else:
            group.add_argument(flag.name, metavar=flag.metavar, help=meaning.replace("%", "%%"))


def read_groups(namespace: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """Read our groups of settings: a flag overrides its variable, which overrides the default."""
    return {name: _read_group(kind, namespace, environment) for name, kind in GROUPS.items()}


def _read_group(kind: type, namespace: argparse.Namespace, environment: Mapping[str, str]) -> Any:
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
    # A Compose file passes a key that is not set as an empty string.
    if text is None or (flag.is_secret and not text):
        return False, None
    return True, flag.read(text, flag.variable)
