"""Every setting of ours, frozen, grouped by owner and parsed once.

A setting is declared in one place: the field of its dataclass carries the flag, its parser, its
default and its meaning, and the parser, the environment variables, `--help` and the check of the
documentation all read it from there. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from holdfast.errors import UsageError
from holdfast.workspace.plan import GrowthPolicy

Suite = Literal["worst-case", "quick", "off"]
LearnedRestart = Literal["auto", "always", "never"]
LogFormat = Literal["auto", "console", "json"]

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
}
_MOST_BYTES = 1 << 50
_MOST_TOKENS = 1 << 31
_YEAR_SECONDS = 31_536_000
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


def size_bytes(text: str) -> int:
    """Bytes of a size such as `64MiB`, `1.5GB` or `1048576`; ValueError for anything else."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError("expected a size such as 64MiB, 1.5GiB or a number of bytes")
    size = int(Decimal(match[1]) * _UNITS[match[2]])
    if size >= _MOST_BYTES:
        raise ValueError("expected a size below 1 PiB")
    return size


def headroom_fraction(text: str) -> float:
    """A fraction from 0 to 10; ValueError for anything else."""
    value = _number(text)
    if not 0 <= value <= 10:
        raise ValueError("expected a fraction from 0 to 10, for example 0.10")
    return value


def positive_seconds(text: str) -> float:
    """A time above 0 and below a year; ValueError for anything else."""
    value = _number(text)
    if not 0 < value < _YEAR_SECONDS:
        raise ValueError("expected a number of seconds above 0 and below a year")
    return value


def seconds(text: str) -> float:
    """A time of 0 or more, below a year; ValueError for anything else."""
    value = _number(text)
    if not 0 <= value < _YEAR_SECONDS:
        raise ValueError("expected a number of seconds, 0 or more and below a year")
    return value


def token_count(text: str) -> int:
    """A count of at least 2, the shortest prompt and its answer; ValueError for anything else."""
    if not re.fullmatch("[0-9]{1,10}", text) or not 2 <= int(text) < _MOST_TOKENS:
        raise ValueError("expected a number of tokens, 2 or more")
    return int(text)


def count(text: str) -> int:
    """A whole number, 0 or more; ValueError for anything else."""
    if not re.fullmatch("[0-9]{1,6}", text):
        raise ValueError("expected a number, 0 or more")
    return int(text)


def directory_or_none(text: str) -> Path | None:
    """A directory, or None for the word `none`; ValueError for what cannot be a path."""
    if not text or "\0" in text:
        raise ValueError("expected a directory, or none")
    if text == "none":
        return None
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("expected a directory below the home of a known user") from None


def truth(text: str) -> bool:
    """A yes or no as people write it in an environment; ValueError for anything else."""
    if text.lower() not in _TRUE | _FALSE:
        raise ValueError("expected 1 or 0")
    return text.lower() in _TRUE


def _number(text: str) -> float:
    # float() would take NaN, which no range check refuses, `1_0` and digits of other scripts too.
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", text.strip().lower()):
        raise ValueError("expected a number")
    return float(text)


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of `holdfast serve`, as the parser, the environment and the documentation see it."""

    name: str
    parse: Callable[[str], Any]
    metavar: str
    shown_default: str
    meaning: str
    choices: tuple[str, ...] = ()
    is_switch: bool = False

    @property
    def variable(self) -> str:
        """The environment variable that stands in for the flag."""
        return "HOLDFAST_" + self.destination.upper()

    @property
    def destination(self) -> str:
        """The attribute of the parsed namespace."""
        return self.name.removeprefix("--").replace("-", "_")

    def read(self, text: str, source: str) -> Any:
        """The value of `text`; UsageError names `source` if it is not one."""
        try:
            if self.choices and text not in self.choices:
                raise ValueError("expected one of " + ", ".join(self.choices))  # noqa: TRY301 - one exit for every wrong value
            return self.parse(text)
        except ValueError as error:
            raise UsageError(
                f"{source}: {error}, not {text!r}.",
                remedy=f"see `holdfast serve --help` for {self.name}.",
            ) from None


def _flag(  # noqa: PLR0913 - one row of the table of flags
    name: str,
    parse: Callable[[str], Any],
    default: Any,
    metavar: str,
    meaning: str,
    *,
    shown: str = "",
    choices: tuple[str, ...] = (),
    is_switch: bool = False,
) -> Any:
    flag = Flag(name, parse, metavar, shown or str(default), meaning, choices, is_switch)
    return field(default=default, metadata={"flag": flag})


def _choice(name: str, choices: tuple[str, ...], default: str, meaning: str) -> Any:
    return _flag(name, str, default, "|".join(choices), meaning, choices=choices)


@dataclass(frozen=True, slots=True)
class WorkspaceSettings:
    """How much scratch is reserved, and what happens when it does not suffice."""

    reserve_bytes: int = _flag(
        "--workspace-reserve", size_bytes, 0, "SIZE", "floor per slot, for example `64MiB`"
    )
    headroom: float = _flag(
        "--workspace-headroom",
        headroom_fraction,
        0.10,
        "FRACTION",
        "added to the planned size; the result is rounded up to 2 MiB",
        shown="0.10",
    )
    growth: GrowthPolicy = _choice(
        "--workspace-growth",
        ("deny", "alongside"),
        "alongside",
        "policy after the lock: refuse, or allocate a larger buffer and keep the old one alive",
    )
    growth_limit_bytes: int | None = _flag(
        "--workspace-growth-limit",
        size_bytes,
        None,
        "SIZE",
        "most bytes a rank may hold above its size at the lock",
        shown="largest slot + 256MiB",
    )
    learned_directory: Path | Literal["default"] | None = _flag(
        "--learned-dir",
        directory_or_none,
        "default",
        "DIR|none",
        "where learned reservations and the probe journal are kept",
        shown="user state directory",
    )
    learned_restart: LearnedRestart = _choice(
        "--learned-restart",
        ("auto", "always", "never"),
        "auto",
        "start the engine once more after the probe made it grow: `auto` only after a rejection, "
        "or when starting took under 120 s",
    )


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """What is proven before READY."""

    suite: Suite = _choice(
        "--probe", ("worst-case", "quick", "off"), "worst-case", "start-up probe suite"
    )
    timeout_seconds: float = _flag(
        "--probe-timeout",
        positive_seconds,
        600.0,
        "SECONDS",
        "time for the whole suite",
        shown="600",
    )
    max_tokens: int | None = _flag(
        "--probe-max-tokens", token_count, None, "N", "cap of probe sizes", shown="max_model_len"
    )
    require_full: bool = _flag(
        "--probe-require-full",
        truth,
        default=False,
        metavar="",
        meaning="a proof limited by time or journal is a failure (exit 4)",
        shown="off",
        is_switch=True,
    )


@dataclass(frozen=True, slots=True)
class SupervisionSettings:
    """What happens when the engine dies or hangs, and how the server ends."""

    max_engine_restarts: int = _flag(
        "--max-engine-restarts",
        count,
        3,
        "N",
        "restarts of a dead engine within the restart window before the server ends with exit 5",
    )
    restart_window_seconds: float = _flag(
        "--restart-window",
        positive_seconds,
        1800.0,
        "SECONDS",
        "the window that `--max-engine-restarts` counts in",
        shown="1800",
    )
    hold_timeout_seconds: float = _flag(
        "--hold-timeout",
        seconds,
        60.0,
        "SECONDS",
        "while recovering, new requests are held if the wait promises to be shorter, else 503",
        shown="60",
    )
    stall_timeout_seconds: float = _flag(
        "--stall-timeout",
        positive_seconds,
        120.0,
        "SECONDS",
        "an engine with requests and without a step for so long, and for three times its slowest "
        "probed step, is ended and started again",
        shown="120",
    )
    drain_timeout_seconds: float = _flag(
        "--drain-timeout",
        seconds,
        45.0,
        "SECONDS",
        "for streams to finish after SIGTERM",
        shown="45",
    )


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What the operator reads."""

    format: LogFormat = _choice(
        "--log-format",
        ("auto", "console", "json"),
        "auto",
        "`auto` is a progress view on a terminal and one line an event elsewhere",
    )


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """vLLM's own flags that are needed before vLLM is imported: the server listens at once."""

    host: str = ""
    port: int = 8000
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_ciphers: str | None = None
    root_path: str = ""
    uvicorn_log_level: str = "info"
    has_access_log: bool = True
    log_level: str = "info"
    api_keys: tuple[str, ...] = ()

    @property
    def is_tls(self) -> bool:
        """Whether clients must speak TLS; the file of the certificate may hold the key too."""
        return bool(self.ssl_certfile)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that was given for one `holdfast serve`."""

    is_demo: bool = False
    workspace: WorkspaceSettings = WorkspaceSettings()
    probe: ProbeSettings = ProbeSettings()
    supervision: SupervisionSettings = SupervisionSettings()
    logs: LogSettings = LogSettings()
    listen: ListenSettings = ListenSettings()
    vllm_arguments: tuple[str, ...] = ()
    """The command line as given, for vLLM's own parser."""


GROUPS: Mapping[str, type] = {
    "workspace": WorkspaceSettings,
    "probe": ProbeSettings,
    "supervision": SupervisionSettings,
    "logs": LogSettings,
}


def flags() -> Iterator[Flag]:
    """Every flag of ours, in the order of the documentation."""
    for group in GROUPS.values():
        for member in fields(group):
            yield member.metadata["flag"]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare our flags on a parser, ours or vLLM's. A flag that is not given is None."""
    group = parser.add_argument_group("holdfast", "Workspaces, proof and supervision.")
    group.add_argument("--demo", action="store_true", help="serve the embedded demo model")
    for flag in flags():
        meaning = f"{flag.meaning} (default: {flag.shown_default}; {flag.variable})"
        if flag.is_switch:
            group.add_argument(flag.name, action="store_const", const="1", help=meaning)
        else:
            group.add_argument(flag.name, metavar=flag.metavar, help=meaning.replace("%", "%%"))


def read_groups(namespace: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """Our groups of settings: a flag wins over its variable, which wins over the default."""
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
    if flag.variable in environment:
        return True, flag.read(environment[flag.variable], flag.variable)
    return False, None
