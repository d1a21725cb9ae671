"""Every metric of Holdfast, as data: the only source for the collectors, docs and their test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from holdfast.records import RankStats

PREFIX = "holdfast_"
Labels = tuple[object, ...]

_RANK = ("engine", "rank")
_SLOT = ("engine", "rank", "ubatch", "lane")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family. `name` omits the prefix, and ends in `_total` for a counter."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The name as exported."""
        return PREFIX + self.name


@dataclass(frozen=True, slots=True)
class RankMetric(Metric):
    """A family with a number of each rank. A counter may start again with each generation."""

    read: Callable[[RankStats], float | Mapping[Any, float] | None] = field(kw_only=True)
    """The number, or several by their labels after `engine` and `rank`; None if it is unknown."""
    shown_until: Literal["sleep", "end"] | None = field(default=None, kw_only=True)
    """What makes a gauge untrue, the engine's sleep or end; None if its last value stays true."""

    def values(self, rank: RankStats) -> Mapping[Labels, float]:
        """Return what is known, by the labels after `engine` and `rank`."""
        read = self.read(rank)
        if read is None:
            return {}
        if not isinstance(read, Mapping):
            return {(): read}
        return {key if isinstance(key, tuple) else (key,): value for key, value in read.items()}


RANK_METRICS: tuple[RankMetric, ...] = (
    RankMetric(
        "workspace_size_bytes",
        "gauge",
        "Current size of the workspace of a slot.",
        _SLOT,
        read=lambda rank: {(slot.ubatch, slot.lane): slot.size_bytes for slot in rank.slots},
        shown_until="sleep",
    ),
    RankMetric(
        "workspace_reserved_bytes",
        "gauge",
        "Bytes reserved for a slot before the KV cache was sized.",
        _SLOT,
        read=lambda rank: {(slot.ubatch, slot.lane): slot.reserved_bytes for slot in rank.slots},
        shown_until="sleep",
    ),
    RankMetric(
        "workspace_high_water_bytes",
        "gauge",
        "Largest number of bytes that any caller requested from a slot.",
        _SLOT,
        read=lambda rank: {(slot.ubatch, slot.lane): slot.high_water_bytes for slot in rank.slots},
        shown_until="sleep",
    ),
    RankMetric(
        "workspace_retired_bytes",
        "gauge",
        "Bytes of outgrown buffers that are kept because a captured graph may use them.",
        _RANK,
        read=lambda rank: rank.retired_bytes,
        shown_until="sleep",
    ),
    RankMetric(
        "workspace_persistent_bytes",
        "gauge",
        "Bytes of persistent resources held in addition to the scratch buffers.",
        _RANK,
        read=lambda rank: rank.persistent_bytes,
        shown_until="sleep",
    ),
    RankMetric(
        "workspace_locked",
        "gauge",
        "Whether the workspaces are locked (1) or not (0).",
        _RANK,
        read=lambda rank: rank.is_locked,
        shown_until="end",
    ),
    RankMetric(
        "lamport_workspace_bytes",
        "gauge",
        "Size of the Lamport all-reduce workspace.",
        _RANK,
        read=lambda rank: rank.lamport_bytes,
        shown_until="sleep",
    ),
    RankMetric(
        "workspace_growths_total",
        "counter",
        "Number of times a workspace grew, by phase: warmup, sealed, locked.",
        (*_RANK, "phase"),
        read=lambda rank: rank.growths,
    ),
    RankMetric(
        "workspace_growth_rejections_total",
        "counter",
        "Workspace requests that were refused, by kind: scratch, persistent, permute.",
        (*_RANK, "kind"),
        read=lambda rank: rank.rejections,
    ),
    RankMetric(
        "workspace_last_rejection_bytes",
        "gauge",
        "Bytes needed by the last workspace request that was refused.",
        _RANK,
        read=lambda rank: rank.last_rejection.needed_bytes if rank.last_rejection else None,
    ),
    RankMetric(
        "workspace_caller_bytes",
        "gauge",
        "Largest request of a caller; at most 16 callers per rank.",
        (*_RANK, "caller"),
        read=lambda rank: rank.callers,
    ),
    RankMetric(
        "memory_bytes",
        "gauge",
        "Device memory by kind: what is in use, activation_peak (the most that a step takes), "
        "budget (what vLLM may use) and total (what the device has). "
        "A kind that was not measured is absent.",
        (*_RANK, "kind"),
        read=lambda rank: rank.memory,
        shown_until="sleep",
    ),
    RankMetric(
        "engine_steps_total",
        "counter",
        "Engine steps finished.",
        _RANK,
        read=lambda rank: rank.steps,
    ),
    RankMetric(
        "engine_scheduled_tokens_total",
        "counter",
        "Tokens scheduled in finished engine steps.",
        _RANK,
        read=lambda rank: rank.scheduled_tokens,
    ),
    RankMetric(
        "engine_nan_rows_total",
        "counter",
        "Rows of logits with a NaN: each gave its request an arbitrary token. With speculation, "
        "the rows of a request in one step count as one.",
        _RANK,
        read=lambda rank: rank.nan_rows,
    ),
)

METRICS: tuple[Metric, ...] = (
    *RANK_METRICS,
    Metric(
        "workspace_unproven_growths",
        "gauge",
        "Number of times a workspace of this engine grew after the lock and after the last probe: "
        "a request needed more than was proven.",
        _RANK,
    ),
    Metric(
        "probe_passed",
        "gauge",
        "Whether a step of the last probe passed (1) or failed (0); absent if it was skipped.",
        ("step",),
    ),
    Metric(
        "probe_duration_seconds",
        "gauge",
        "Duration of a step of the last probe; absent if it was skipped.",
        ("step",),
    ),
    Metric(
        "probe_tokens",
        "gauge",
        "Largest size that a step of the last probe proved; absent if it was skipped.",
        ("step",),
    ),
    Metric("probe_proven_tokens", "gauge", "Longest context that the last probe proved."),
    Metric("probe_limited", "gauge", "Whether the last probe skipped a size (1) or not (0)."),
    Metric(
        "baseline_configured",
        "gauge",
        "Whether the server compares its log-probs with a baseline (1) or not (0).",
    ),
    Metric(
        "baseline_agreement",
        "gauge",
        "Whether the last comparison with the baseline in the probe, or each one by a canary since "
        "the engine started, agreed (1) or not (0).",
        ("check",),
    ),
    Metric(
        "baseline_worst_difference_nats",
        "gauge",
        "Largest absolute difference of a log-prob in the last comparison with the baseline.",
        ("check",),
    ),
    Metric(
        "baseline_comparison_age_seconds",
        "gauge",
        "Time since the last comparison with the baseline.",
        ("check",),
    ),
    Metric("probe_runs_total", "counter", "Finished probe runs.", ("result",)),
    Metric(
        "state", "gauge", "1 for the current state of the server, 0 for every other.", ("state",)
    ),
    Metric("ready", "gauge", "Whether requests are admitted (1) or not (0)."),
    Metric(
        "engine_generation",
        "gauge",
        "Number of the current engine, counted from 1; 0 before the first.",
    ),
    Metric("engine_starts_total", "counter", "Engine starts, finished or not."),
    Metric("engine_start_duration_seconds", "gauge", "Duration of the last finished start."),
    Metric("engine_deaths_total", "counter", "Engine deaths by cause.", ("cause",)),
    Metric(
        "engine_recycles_total",
        "counter",
        "Planned restarts of the engine (--recycle-after), by the limit that it had reached: age, "
        "host_memory, requests.",
        ("reason",),
    ),
    Metric(
        "engine_host_memory_bytes",
        "gauge",
        "Resident host memory of the engine's processes, without shared memory and mapped files.",
    ),
    Metric(
        "engine_restarts_left",
        "gauge",
        "Restarts that --max-engine-restarts still allows within the restart window; deaths caused "
        "by requests, host memory or another node do not count.",
    ),
    Metric(
        "host_memory_available_bytes",
        "gauge",
        "Memory left to the host, or to the container if its limit is the tighter one.",
    ),
    Metric(
        "host_memory_pressure_ratio",
        "gauge",
        "Share of the last two seconds during which at least one task of the host or container "
        "waited for memory, from 0 to 1.",
    ),
    Metric(
        "host_memory_actions_total",
        "counter",
        "Long prompts that had to wait (hold) or were aborted (give_up), and engines that were "
        "ended (end), because the host was short of memory.",
        ("action",),
    ),
    Metric(
        "key_file_broken",
        "gauge",
        "Whether a key file is invalid, so that the keys read last stay in force (1), or not (0).",
        ("ring",),
    ),
    Metric(
        "event_loop_lag_seconds",
        "gauge",
        "Longest event loop delay of the front end in the last minute.",
    ),
    Metric(
        "nodes_wanted",
        "gauge",
        "Nodes that the engine needs, including this one; absent for a single node.",
    ),
    Metric(
        "node_joined",
        "gauge",
        "1 for each node that the engine can run on, 0 for one that was lost or has left.",
        ("node",),
    ),
    Metric(
        "rank_info",
        "gauge",
        "The node of each rank, if there are several nodes; always 1.",
        (*_RANK, "node"),
    ),
    Metric(
        "node_connections_refused_total",
        "counter",
        "Connections to the node port that were refused, by reason.",
        ("reason",),
    ),
    Metric(
        "log_stats",
        "gauge",
        "Whether the engine exports the vllm: series (1); 0 with --disable-log-stats.",
    ),
    Metric("last_step_age_seconds", "gauge", "Time since any rank last finished an engine step."),
    Metric("requests_in_flight", "gauge", "Requests admitted and not yet fully answered."),
    Metric(
        "requests_held",
        "gauge",
        "Requests waiting in the front end for capacity or for the next engine.",
    ),
    Metric(
        "requests_waiting",
        "gauge",
        "Requests accepted and not yet running, in the front end and in the schedulers.",
    ),
    Metric(
        "request_wait_seconds",
        "histogram",
        "Time that a request waited in the front end before it went to the engine.",
    ),
    Metric(
        "requests_replayed_total",
        "counter",
        "Requests that were replayed on the next engine.",
    ),
    Metric(
        "requests_continued_total",
        "counter",
        "Streams that the next engine continued where they had stopped.",
    ),
    Metric(
        "requests_lost_total",
        "counter",
        "Requests that failed because an engine died, slept or was stopped, by reason.",
        ("reason",),
    ),
    Metric(
        "requests_refused_total",
        "counter",
        "Requests and connections refused before they reached the engine, or timed out, by reason.",
        ("reason",),
    ),
    Metric(
        "key_requests_total",
        "counter",
        "Requests of an API key that were passed to the engine, by the name of the key; names "
        "beyond 200 count as other.",
        ("key",),
    ),
    Metric(
        "key_prompt_tokens_total",
        "counter",
        "Prompt tokens that the engine processed for an API key, by the name of the key.",
        ("key",),
    ),
    Metric(
        "key_output_tokens_total",
        "counter",
        "Tokens that the engine generated for an API key, by the name of the key; those of broken "
        "answers count too.",
        ("key",),
    ),
    Metric("tool_calls_total", "counter", "Tool calls in finished answers of the model."),
    Metric(
        "broken_tool_calls_total",
        "counter",
        "Tool calls whose arguments are not JSON (invalid_json) or do not match the tool's schema "
        "(schema_mismatch), or that name no tool of the request (unknown_name).",
        ("reason",),
    ),
    Metric(
        "build_info",
        "gauge",
        "Versions that this process runs; always 1.",
        ("version", "vllm_version"),
    ),
)

FOLLOWER_METRICS: tuple[Metric, ...] = (
    Metric(
        "node_head_connected",
        "gauge",
        "Whether this follower has a connection to its head (1) or not (0).",
    ),
    Metric(
        "node_generation",
        "gauge",
        "Number of the engine that has processes on this follower; 0 if there is none.",
    ),
)
"""What a follower exports, beside `RANK_METRICS`, `build_info` and the metrics of its process."""

BY_NAME = MappingProxyType({metric.name: metric for metric in (*METRICS, *FOLLOWER_METRICS)})
