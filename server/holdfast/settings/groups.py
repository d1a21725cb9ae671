"""All our settings except the limits, frozen, grouped by owner.

A setting is declared in one place: the field of its dataclass carries the flag, its parser, its
default and its meaning, and all other code reads it from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.settings.flag import (
    boolean,
    choice,
    count,
    directory_or_none,
    file_path,
    flag,
    headroom_fraction,
    key,
    positive_seconds,
    seconds,
    size_bytes,
    token_count,
)
from holdfast.workspace.plan import GrowthPolicy

Suite = Literal["worst-case", "quick", "off"]
LearnedRestart = Literal["auto", "always", "never"]
MetricsAuth = Literal["none", "api-key"]
LogFormat = Literal["auto", "console", "json"]
RequestLogStyle = Literal["line", "uvicorn", "none"]


@dataclass(frozen=True, slots=True)
class WorkspaceSettings:
    """How much scratch memory is reserved, and what happens when it is not enough."""

    reserve_bytes: int = flag(
        "--workspace-reserve",
        size_bytes,
        0,
        "SIZE",
        "minimum size of each slot, for example `64MiB`",
    )
    headroom: float = flag(
        "--workspace-headroom",
        headroom_fraction,
        0.10,
        "FRACTION",
        "margin added to the planned size, as a fraction; the result is rounded up to 2 MiB",
        shown="0.10",
    )
    growth: GrowthPolicy = choice(
        "--workspace-growth",
        ("deny", "alongside"),
        "alongside",
        "what to do after the lock: refuse to grow, or allocate a larger buffer and keep the old "
        "one alive",
    )
    growth_limit_bytes: int | None = flag(
        "--workspace-growth-limit",
        size_bytes,
        None,
        "SIZE",
        "maximum bytes a rank may hold above its size at the lock",
        shown="largest slot + 256MiB",
    )
    learned_directory: Path | Literal["default"] | None = flag(
        "--learned-dir",
        directory_or_none,
        "default",
        "DIR|none",
        "directory for learned reservations and the probe journal",
        shown="user state directory",
    )
    learned_restart: LearnedRestart = choice(
        "--learned-restart",
        ("auto", "always", "never"),
        "auto",
        "restart the engine once if the probe made it grow: `auto` only after a rejection, or if "
        "the start took under 120 s",
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
        "time limit for the whole suite",
        shown="600",
    )
    max_tokens: int | None = flag(
        "--probe-max-tokens",
        token_count,
        None,
        "N",
        "upper limit for probe sizes",
        shown="max_model_len",
    )
    admit_unproven: bool = flag(
        "--admit-unproven",
        boolean,
        default=False,
        metavar="",
        meaning="accept requests longer than the probe has proven, up to max_model_len, instead of "
        "answering 400; `--probe quick` and `off` imply it",
        shown="off",
        is_switch=True,
    )
    require_full: bool = flag(
        "--probe-require-full",
        boolean,
        default=False,
        metavar="",
        meaning="fail with exit code 4 if time or the journal limited the proof",
        shown="off",
        is_switch=True,
    )

    baseline_file: Path | None = flag(
        "--verify-baseline",
        file_path,
        None,
        "FILE",
        "file of `holdfast verify --record`: before READY and after every restart, the engine must "
        "compute the log-probs in it; an idle engine is compared with it every minute",
        shown="none",
    )

    @property
    def admits_unproven(self) -> bool:
        """Whether requests longer than the proven length are admitted."""
        return self.admit_unproven or self.suite != "worst-case"


@dataclass(frozen=True, slots=True)
class SupervisionSettings:
    """What happens when the engine dies or hangs, and how the server ends."""

    max_engine_restarts: int = flag(
        "--max-engine-restarts",
        count,
        3,
        "N",
        "restarts allowed within the restart window before exit code 5; deaths caused by "
        "requests do not count",
    )
    restart_window_seconds: float = flag(
        "--restart-window",
        positive_seconds,
        1800.0,
        "SECONDS",
        "window in which `--max-engine-restarts` counts",
        shown="1800",
    )
    hold_timeout_seconds: float = flag(
        "--hold-timeout",
        seconds,
        60.0,
        "SECONDS",
        "during a recovery, hold new requests if READY is expected within this time, otherwise "
        "answer 503",
        shown="60",
    )
    stall_timeout_seconds: float = flag(
        "--stall-timeout",
        positive_seconds,
        120.0,
        "SECONDS",
        "restart an engine that has requests but finishes no step for this long (and for 3x the "
        "slowest probed step)",
        shown="120",
    )
    drain_timeout_seconds: float = flag(
        "--drain-timeout",
        seconds,
        45.0,
        "SECONDS",
        "time for running requests to finish after SIGTERM",
        shown="45",
    )


@dataclass(frozen=True, slots=True)
class OverloadSettings:
    """What happens when clients ask for more than the engine can do."""

    max_waiting: int = flag(
        "--max-waiting",
        count,
        1024,
        "N",
        "maximum requests queued in the front end; answer 429 beyond that",
    )
    max_requests_per_key: int = flag(
        "--max-requests-per-key",
        count,
        0,
        "N",
        "maximum concurrent requests of one API key, queued or running; answer 429 beyond that. "
        "0 disables; no effect without API keys",
    )


@dataclass(frozen=True, slots=True)
class KeySettings:
    """Which keys are accepted. vLLM's own `--api-key` is with the listener's settings."""

    api_key_file: Path | None = flag(
        "--api-key-file",
        file_path,
        None,
        "FILE",
        "file of API keys, one per line, in addition to `--api-key`; read again when it changes",
        shown="none",
    )
    admin_api_key: str | None = flag(
        "--admin-api-key",
        key,
        None,
        "KEY",
        "key that opens `/admin/*`; without one, those routes answer 404",
        shown="none",
        is_secret=True,
    )
    admin_api_key_file: Path | None = flag(
        "--admin-api-key-file",
        file_path,
        None,
        "FILE",
        "file of admin keys, one per line; read again when it changes",
        shown="none",
    )
    metrics_auth: MetricsAuth = choice(
        "--metrics-auth", ("none", "api-key"), "none", "what `/metrics` requires"
    )


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is logged, and in which format."""

    format: LogFormat = choice(
        "--log-format",
        ("auto", "console", "json"),
        "auto",
        "`auto` is a progress view on a terminal and one line per event elsewhere",
    )
    requests: RequestLogStyle = choice(
        "--request-log",
        ("line", "uvicorn", "none"),
        "line",
        "what to log for each request: `line` has its times, tokens and generation, `uvicorn` is "
        "the access log of `vllm serve`; `--disable-uvicorn-access-log` turns off both",
    )
