"""Our settings except those of `limits` and `supervision`, frozen, grouped by owner.

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
    node_name,
    port_number,
    positive_seconds,
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
        "minimum size of each workspace, for example `64MiB`",
    )
    headroom: float = flag(
        "--workspace-headroom",
        headroom_fraction,
        0.10,
        "FRACTION",
        "margin added to the planned size, as a fraction of it; the sum is rounded up to 2 MiB",
        shown="0.10",
    )
    growth: GrowthPolicy = choice(
        "--workspace-growth",
        ("deny", "alongside"),
        "alongside",
        "what to do if a workspace is too small after the lock: `deny` refuses the memory, which "
        "ends the engine; `alongside` allocates a larger buffer and keeps the old one",
    )
    growth_limit_bytes: int | None = flag(
        "--workspace-growth-limit",
        size_bytes,
        None,
        "SIZE",
        "maximum bytes that the workspaces of a rank may take beyond their size at the lock; with "
        "`--enable-dbo` the default is twice as large",
        shown="largest workspace + 256MiB",
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
        "restart the engine once with larger workspaces if one grew during the probe: `auto` only "
        "if a growth was refused, or if the start took under 120 s",
    )


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """What is proven before READY."""

    suite: Suite = choice(
        "--probe",
        ("worst-case", "quick", "off"),
        "worst-case",
        "what to prove before READY: `worst-case` runs every step; `quick` only a first token, the "
        "longest prompt, the fullest batch and the baseline, if there is one; `off` proves nothing",
    )
    timeout_seconds: float = flag(
        "--probe-timeout",
        positive_seconds,
        600.0,
        "SECONDS",
        "time limit for the whole probe; larger sizes are left out if they would take longer",
        shown="600",
    )
    max_tokens: int | None = flag(
        "--probe-max-tokens",
        token_count,
        None,
        "N",
        "longest prompt that the probe tries, in tokens",
        shown="max_model_len",
    )
    lifts_proven_length: bool = flag(
        "--admit-unproven",
        boolean,
        default=False,
        metavar="",
        meaning="accept requests longer than the proven length, up to max_model_len, instead of "
        "answering 400; `--probe quick` and `off` imply it",
        shown="off",
        is_switch=True,
    )
    requires_full: bool = flag(
        "--probe-require-full",
        boolean,
        default=False,
        metavar="",
        meaning="fail with exit code 4 if the proof is limited, by time, memory, the journal or "
        "`--probe-max-tokens`",
        shown="off",
        is_switch=True,
    )

    baseline_file: Path | None = flag(
        "--verify-baseline",
        file_path,
        None,
        "FILE",
        "file that `holdfast verify --record` wrote: before READY and after every restart, the "
        "engine must compute the same log-probs; an idle engine is compared with it every minute",
        shown="none",
    )

    @property
    def admits_unproven(self) -> bool:
        """Whether requests longer than the proven length are admitted."""
        return self.lifts_proven_length or self.suite != "worst-case"


@dataclass(frozen=True, slots=True)
class OverloadSettings:
    """What happens when clients ask for more than the engine can do."""

    max_waiting: int = flag(
        "--max-waiting",
        count,
        1024,
        "N",
        "maximum requests queued in the front end; answer 429 beyond that; 0 queues none, not even "
        "during a recovery",
    )
    max_requests_per_key: int = flag(
        "--max-requests-per-key",
        count,
        0,
        "N",
        "maximum concurrent requests of one API key, queued or running; answer 429 beyond that. "
        "0 means no limit; has no effect without API keys",
    )


@dataclass(frozen=True, slots=True)
class KeySettings:
    """Which keys are accepted. vLLM's own `--api-key` is with the listener's settings."""

    api_key_file: Path | None = flag(
        "--api-key-file",
        file_path,
        None,
        "FILE",
        "file of API keys, one per line, in addition to `--api-key`; a line may give its key a "
        "name and limits; read again when it changes",
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
        "--metrics-auth",
        ("none", "api-key"),
        "none",
        "what `/metrics` and `/metrics/routing` require: nothing, or an API key; `api-key` needs a "
        "server with API keys",
    )
    usage_directory: Path | None = flag(
        "--usage-dir",
        directory_or_none,
        None,
        "DIR|none",
        "directory for usage per API key, one file per day; after a restart, "
        "`max_tokens_per_day` of the key file continues from there. Each server needs its own",
        shown="none",
    )


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """How the followers of an engine over several nodes reach their head, and prove the key.

    Which files belong together is checked by `node_flags`; their content, by `nodes.credentials`.
    """

    port: int = flag(
        "--node-port",
        port_number,
        29600,
        "PORT",
        "port on which the head listens for followers, with `--nnodes` above 1",
    )
    key_file: Path | None = flag(
        "--node-key-file",
        file_path,
        None,
        "FILE",
        "file of the key that all nodes share, at least 32 characters; required with `--nnodes` "
        "above 1",
        shown="none",
    )
    name: str = flag(
        "--node-name",
        node_name,
        "",
        "NAME",
        "name of this node in logs and metrics: up to 64 letters, digits, dots, dashes and "
        "underscores",
        shown="the host name",
    )
    certfile: Path | None = flag(
        "--node-ssl-certfile",
        file_path,
        None,
        "FILE",
        "certificate of the head: followers must then use TLS on `--node-port`, and name the "
        "certificate's authority with `--ssl-ca-certs`",
        shown="none",
    )
    keyfile: Path | None = flag(
        "--node-ssl-keyfile",
        file_path,
        None,
        "FILE",
        "private key of `--node-ssl-certfile`, if that file does not contain it",
        shown="none",
    )


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is logged, and in which format."""

    format: LogFormat = choice(
        "--log-format",
        ("auto", "console", "json"),
        "auto",
        "`console` writes one line per event, `json` one object per line for Holdfast, uvicorn and "
        "Python's warnings, and `auto` a progress view on a terminal and lines elsewhere",
    )
    requests: RequestLogStyle = choice(
        "--request-log",
        ("line", "uvicorn", "none"),
        "line",
        "what to log for each request: `line` has its times, its tokens and the engine that "
        "answered, `uvicorn` is the access log of `vllm serve`; `--disable-uvicorn-access-log` "
        "turns off both",
    )


@dataclass(frozen=True, slots=True)
class PageSettings:
    """Whether there is a status page."""

    is_on: bool = flag(
        "--ui",
        boolean,
        default=True,
        metavar="on|off",
        meaning="serve the status page at `/ui`, and the stream of `/statusz` for it and for "
        "`holdfast top`; with `off`, the server has neither",
        shown="on",
        choices=("on", "off"),
    )
