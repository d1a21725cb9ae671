"""Every setting of ours, frozen, grouped by owner.

A setting is declared in one place: the field of its dataclass carries the flag, its parser, its
default and its meaning, and everybody else reads it from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.settings.flag import choice, flag
from holdfast.settings.values import (
    count,
    directory_or_none,
    file_path,
    headroom_fraction,
    key,
    niceness,
    positive_count,
    positive_seconds,
    positive_size_bytes,
    seconds,
    size_bytes,
    token_count,
    truth,
)
from holdfast.workspace.plan import GrowthPolicy

Suite = Literal["worst-case", "quick", "off"]
LearnedRestart = Literal["auto", "always", "never"]
MetricsAuth = Literal["none", "api-key"]
LogFormat = Literal["auto", "console", "json"]
RequestLogStyle = Literal["line", "uvicorn", "none"]


@dataclass(frozen=True, slots=True)
class WorkspaceSettings:
    """How much scratch is reserved, and what happens when it does not suffice."""

    reserve_bytes: int = flag(
        "--workspace-reserve", size_bytes, 0, "SIZE", "floor per slot, for example `64MiB`"
    )
    headroom: float = flag(
        "--workspace-headroom",
        headroom_fraction,
        0.10,
        "FRACTION",
        "added to the planned size; the result is rounded up to 2 MiB",
        shown="0.10",
    )
    growth: GrowthPolicy = choice(
        "--workspace-growth",
        ("deny", "alongside"),
        "alongside",
        "policy after the lock: refuse, or allocate a larger buffer and keep the old one alive",
    )
    growth_limit_bytes: int | None = flag(
        "--workspace-growth-limit",
        size_bytes,
        None,
        "SIZE",
        "most bytes a rank may hold above its size at the lock",
        shown="largest slot + 256MiB",
    )
    learned_directory: Path | Literal["default"] | None = flag(
        "--learned-dir",
        directory_or_none,
        "default",
        "DIR|none",
        "where learned reservations and the probe journal are kept",
        shown="user state directory",
    )
    learned_restart: LearnedRestart = choice(
        "--learned-restart",
        ("auto", "always", "never"),
        "auto",
        "start the engine once more after the probe made it grow: `auto` only after a rejection, "
        "or when starting took under 120 s",
    )


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """What is proven before READY."""

    suite: Suite = choice(
        "--probe", ("worst-case", "quick", "off"), "worst-case", "start-up probe suite"
    )
    timeout_seconds: float = flag(
        "--probe-timeout",
        positive_seconds,
        600.0,
        "SECONDS",
        "time for the whole suite",
        shown="600",
    )
    max_tokens: int | None = flag(
        "--probe-max-tokens", token_count, None, "N", "cap of probe sizes", shown="max_model_len"
    )
    admit_unproven: bool = flag(
        "--admit-unproven",
        truth,
        default=False,
        metavar="",
        meaning="take requests longer than the probe has proven, up to max_model_len, instead of "
        "answering 400; `--probe quick` and `off` imply it",
        shown="off",
        is_switch=True,
    )
    require_full: bool = flag(
        "--probe-require-full",
        truth,
        default=False,
        metavar="",
        meaning="a proof limited by time or journal is a failure (exit 4)",
        shown="off",
        is_switch=True,
    )

    @property
    def admits_unproven(self) -> bool:
        """Whether requests longer than what was proven are taken."""
        return self.admit_unproven or self.suite != "worst-case"


@dataclass(frozen=True, slots=True)
class SupervisionSettings:
    """What happens when the engine dies or hangs, and how the server ends."""

    max_engine_restarts: int = flag(
        "--max-engine-restarts",
        count,
        3,
        "N",
        "restarts within the restart window before exit 5; deaths that requests cause do not count",
    )
    restart_window_seconds: float = flag(
        "--restart-window",
        positive_seconds,
        1800.0,
        "SECONDS",
        "the window that `--max-engine-restarts` counts in",
        shown="1800",
    )
    hold_timeout_seconds: float = flag(
        "--hold-timeout",
        seconds,
        60.0,
        "SECONDS",
        "while recovering, new requests are held if the wait promises to be shorter, else 503",
        shown="60",
    )
    stall_timeout_seconds: float = flag(
        "--stall-timeout",
        positive_seconds,
        120.0,
        "SECONDS",
        "an engine with requests and without a step for so long, and for three times its slowest "
        "probed step, is ended and started again",
        shown="120",
    )
    drain_timeout_seconds: float = flag(
        "--drain-timeout",
        seconds,
        45.0,
        "SECONDS",
        "for streams to finish after SIGTERM",
        shown="45",
    )


@dataclass(frozen=True, slots=True)
class OverloadSettings:
    """What happens when more is asked than the engine, or the machine, can do."""

    max_waiting: int = flag(
        "--max-waiting", count, 1024, "N", "requests held in the front end before 429"
    )
    max_requests_per_key: int = flag(
        "--max-requests-per-key",
        count,
        0,
        "N",
        "requests of one API key at a time, waiting or in work, before 429; 0 is no limit, and "
        "without API keys it has no effect",
    )
    engine_core_niceness: int | None = flag(
        "--engine-core-niceness",
        niceness,
        None,
        "N",
        "added to the nice value of each EngineCore with workers of its own, 0 to 19: front end "
        "and workers go first where cores are few",
        shown="4 on CPUs, 0 on GPUs",
    )


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What a request and its connection may ask of the front end. A time of 0 is no limit."""

    max_body_bytes: int = flag(
        "--max-body-size",
        positive_size_bytes,
        32 << 20,
        "SIZE",
        "most bytes of a request body, counted as they come in; more is answered 413",
        shown="32MiB",
    )
    max_buffered_bytes: int = flag(
        "--max-buffered-size",
        positive_size_bytes,
        512 << 20,
        "SIZE",
        "most bytes of all request bodies together, beyond the first 64 KiB of each; a key, "
        "or without keys an address, has no more than it leaves free; more is answered 503",
        shown="512MiB",
    )
    max_json_depth: int = flag(
        "--max-json-depth",
        positive_count,
        128,
        "N",
        "levels of arrays and objects in a JSON body; more is answered 400",
    )
    max_url_bytes: int = flag(
        "--max-url-length",
        positive_size_bytes,
        8 << 10,
        "SIZE",
        "longest path and query; more is answered 414",
        shown="8KiB",
    )
    max_headers: int = flag(
        "--max-headers", positive_count, 100, "N", "headers of a request; more is answered 431"
    )
    max_header_bytes: int = flag(
        "--max-header-size",
        positive_size_bytes,
        64 << 10,
        "SIZE",
        "all names and values of the headers of a request together; more is answered 431",
        shown="64KiB",
    )
    header_timeout_seconds: float = flag(
        "--header-timeout",
        seconds,
        10.0,
        "SECONDS",
        "time for the first line and the headers of a request, after which it is answered 408; a "
        "new connection that says nothing, or does not end its TLS handshake, is closed; 0 for no "
        "limit",
        shown="10",
    )
    body_timeout_seconds: float = flag(
        "--body-timeout",
        seconds,
        30.0,
        "SECONDS",
        "a body of which over so long less than 1 KiB a second comes in is answered 408; 0 for no "
        "limit",
        shown="30",
    )
    send_timeout_seconds: float = flag(
        "--send-timeout",
        seconds,
        60.0,
        "SECONDS",
        "a client that has so long to read what is ready of an answer, some 64 KiB, and does not, "
        "is cut off; 0 for no limit",
        shown="60",
    )
    websocket_idle_timeout_seconds: float = flag(
        "--websocket-idle-timeout",
        seconds,
        300.0,
        "SECONDS",
        "a WebSocket on which neither side has said anything for so long is closed, with 1001; 0 "
        "for no limit",
        shown="300",
    )
    request_timeout_seconds: float = flag(
        "--request-timeout",
        seconds,
        0.0,
        "SECONDS",
        "a request that takes longer is aborted, and answered 504",
        shown="0 (none)",
    )
    grammar_timeout_seconds: float = flag(
        "--grammar-timeout",
        positive_seconds,
        30.0,
        "SECONDS",
        "a grammar (`response_format`, tools, `structured_outputs`) that takes longer to compile "
        "is answered 400",
        shown="30",
    )
    keep_alive_timeout_seconds: float | None = flag(
        "--keep-alive-timeout",
        seconds,
        None,
        "SECONDS",
        "a connection without a request is closed so long after its last answer",
        shown="`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`, or 5",
    )
    max_connections: int | None = flag(
        "--max-connections",
        positive_count,
        None,
        "N",
        "open connections; for a further one the oldest without a request is closed, or it is "
        "answered 503, but for health and metrics",
        shown="16384, or fewer where not so many files may be open",
    )


@dataclass(frozen=True, slots=True)
class KeySettings:
    """Who may ask. vLLM's own `--api-key` is with the listener's settings."""

    api_key_file: Path | None = flag(
        "--api-key-file",
        file_path,
        None,
        "FILE",
        "API keys, one a line, beside those of `--api-key`; read again when it changes",
        shown="none",
    )
    admin_api_key: str | None = flag(
        "--admin-api-key",
        key,
        None,
        "KEY",
        "opens `/admin/*`, which answer 404 without one",
        shown="none",
        is_secret=True,
    )
    admin_api_key_file: Path | None = flag(
        "--admin-api-key-file",
        file_path,
        None,
        "FILE",
        "admin keys, one a line; read again when it changes",
        shown="none",
    )
    metrics_auth: MetricsAuth = choice(
        "--metrics-auth", ("none", "api-key"), "none", "what `/metrics` asks for"
    )


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What the operator reads."""

    format: LogFormat = choice(
        "--log-format",
        ("auto", "console", "json"),
        "auto",
        "`auto` is a progress view on a terminal and one line an event elsewhere",
    )
    requests: RequestLogStyle = choice(
        "--request-log",
        ("line", "uvicorn", "none"),
        "line",
        "what is logged of each request: `line` has its times, tokens and generation, `uvicorn` is "
        "the access log of `vllm serve`; `--disable-uvicorn-access-log` turns off both",
    )
