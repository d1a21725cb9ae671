"""What each panel has to show, computed from the pages of the server."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from dashboards.lifecycle import STATES
from ops_tests.life import SLOS
from ops_tests.seen import Expected, Seen, Values, ratio, summed

_NUMBERS = {name: number for number, (name, _) in STATES.items()}
_TTFT = "vllm:time_to_first_token_seconds"
_TPOT = "vllm:request_time_per_output_token_seconds"
_WAIT = "holdfast_request_wait_seconds"
_SIZE = "holdfast_workspace_size_bytes"
_HIGH_WATER = "holdfast_workspace_high_water_bytes"


def _plain(name: str, **wanted: str) -> Expected:
    return lambda seen: seen.values(name, **wanted)


def _total(name: str, **wanted: str) -> Expected:
    return lambda seen: seen.total(name, **wanted)


def _rates(name: str, **wanted: str) -> Expected:
    return lambda seen: seen.rates(name, **wanted)


def _rate(name: str) -> Expected:
    return lambda seen: seen.rate(name)


def _increases(name: str) -> Expected:
    return lambda seen: list(seen.rises(name).values())


def _quantile(share: float, histogram: str) -> Expected:
    return lambda seen: [x for x in seen.quantile(share, histogram) if not math.isnan(x)]


def _mean(histogram: str) -> Expected:
    return lambda seen: seen.mean(histogram)


def _least(name: str) -> Expected:
    return lambda seen: sorted(seen.values(name))[:1]


def _headrooms(seen: Seen) -> Values:
    water = seen.of(_HIGH_WATER)
    return [(size - water[slot]) / size for slot, size in seen.of(_SIZE).items() if size]


def _locked_share(seen: Seen) -> Values:
    locked = seen.values("holdfast_workspace_locked")
    return ratio(summed(locked), [len(locked)])


def _budget_share(seen: Seen) -> Values:
    part = seen.total("holdfast_memory_bytes", kind="workspace")
    return ratio(part, seen.total("holdfast_memory_bytes", kind="budget"))


def _state_number(seen: Seen) -> Values:
    return [
        float(_NUMBERS[dict(labels)["state"]])
        for labels, value in seen.of("holdfast_state").items()
        if value
    ]


def _hits(seen: Seen) -> Values:
    return ratio(
        seen.rate("vllm:prefix_cache_hits_total"), seen.rate("vllm:prefix_cache_queries_total")
    )


def _broken_share(seen: Seen) -> Values:
    calls = sum(seen.rises("holdfast_tool_calls_total").values())
    broken = sum(seen.rises("holdfast_broken_tool_calls_total").values())
    return ratio([broken], [calls])


def _quantiles(panel: str, histogram: str) -> dict[str, Expected]:
    shares = {"A": 0.5, "B": 0.95, "C": 0.99}
    return {f"{panel}/{letter}": _quantile(share, histogram) for letter, share in shares.items()}


def _on_one_node(_seen: Seen) -> Values:
    """What panels of several nodes show of the server here, which has one."""
    return []


def _without_keys(_seen: Seen) -> Values:
    """What panels of API keys show of the server here, which has none."""
    return []


WORKSPACE: Mapping[str, Expected] = {
    "Locked/A": _locked_share,
    "Least headroom/A": lambda seen: sorted(_headrooms(seen))[:1],
    "Growths after the lock/A": _total("holdfast_workspace_growths_total", phase="locked"),
    "Rejections/A": _total("holdfast_workspace_growth_rejections_total"),
    "Retired/A": _total("holdfast_workspace_retired_bytes"),
    "Share of the budget/A": _budget_share,
    "Size, reserved and high water/A": _plain(_SIZE),
    "Size, reserved and high water/B": _plain("holdfast_workspace_reserved_bytes"),
    "Size, reserved and high water/C": _plain(_HIGH_WATER),
    "Headroom/A": _headrooms,
    "Lock/A": _plain("holdfast_workspace_locked"),
    "Outside the workspaces/A": _plain("holdfast_workspace_retired_bytes"),
    "Outside the workspaces/B": _plain("holdfast_workspace_persistent_bytes"),
    "Outside the workspaces/C": _plain("holdfast_lamport_workspace_bytes"),
    "Growths/A": _increases("holdfast_workspace_growths_total"),
    "Rejections by kind/A": _increases("holdfast_workspace_growth_rejections_total"),
    "Last rejection/A": _plain("holdfast_workspace_last_rejection_bytes"),
    "Largest callers/A": lambda seen: sorted(
        seen.values("holdfast_workspace_caller_bytes"), reverse=True
    )[:10],
    "Where the memory went/A": _plain("holdfast_memory_bytes", kind="!budget|total"),
    "Budget and device/A": _plain("holdfast_memory_bytes", kind="budget|total"),
    "Least headroom by node/A": _on_one_node,
    "Memory by node/A": _on_one_node,
}

LIFECYCLE: Mapping[str, Expected] = {
    "State/A": lambda seen: [value for value in seen.values("holdfast_state") if value],
    "Ready/A": _plain("holdfast_state", state="READY"),
    "Engine deaths/A": _total("holdfast_engine_deaths_total", cause="!requested"),
    "Restarts left/A": _least("holdfast_engine_restarts_left"),
    "Requests lost/A": _total("holdfast_requests_lost_total"),
    "Proven context/A": _least("holdfast_probe_proven_tokens"),
    "States/A": _state_number,
    "Engine starts/A": _plain("holdfast_engine_starts_total"),
    "Engine starts/B": _plain("holdfast_engine_generation"),
    "Duration of the last start/A": _plain("holdfast_engine_start_duration_seconds"),
    "Deaths by cause/A": _increases("holdfast_engine_deaths_total"),
    "Planned restarts/A": _increases("holdfast_engine_recycles_total"),
    "Host memory of the engine/A": _plain("holdfast_engine_host_memory_bytes"),
    "Memory of the host/A": _plain("holdfast_host_memory_available_bytes"),
    "Short of memory/A": _increases("holdfast_host_memory_actions_total"),
    "Pressure/A": _plain("holdfast_host_memory_pressure_ratio"),
    "Replayed and lost requests/A": _increases("holdfast_requests_replayed_total"),
    "Replayed and lost requests/B": _increases("holdfast_requests_lost_total"),
    "Replayed and lost requests/C": _increases("holdfast_requests_continued_total"),
    "Requests in flight and held/A": _plain("holdfast_requests_in_flight"),
    "Requests in flight and held/B": _plain("holdfast_requests_held"),
    "Refused requests/A": _rates("holdfast_requests_refused_total"),
    "Nodes/A": _on_one_node,
    "Followers/A": _on_one_node,
    "Nodes wanted and joined/A": _on_one_node,
    "Nodes wanted and joined/B": _on_one_node,
    "Refused nodes/A": _on_one_node,
    "Probe steps/A": _plain("holdfast_probe_passed"),
    "Sizes proven/A": _plain("holdfast_probe_tokens"),
    "Time by step/A": _plain("holdfast_probe_duration_seconds"),
    "Limited/A": _plain("holdfast_probe_limited"),
    "Probe runs/A": _plain("holdfast_probe_runs_total"),
    "Broken tool calls/A": _broken_share,
    "Rows with a NaN/A": _increases("holdfast_engine_nan_rows_total"),
    "Agreement with the baseline/A": _plain("holdfast_baseline_agreement"),
    "Difference from the baseline/A": _plain("holdfast_baseline_worst_difference_nats"),
    "Time since the last comparison/A": _plain("holdfast_baseline_comparison_age_seconds"),
    "Broken tool calls by reason/A": _increases("holdfast_broken_tool_calls_total"),
    "Time since the last step/A": _plain("holdfast_last_step_age_seconds"),
    "Steps by rank/A": _rates("holdfast_engine_steps_total"),
    "Event loop/A": _plain("holdfast_event_loop_lag_seconds"),
    "Versions/A": _plain("holdfast_build_info"),
}

SERVING: Mapping[str, Expected] = {
    "First token within SLO/A": lambda seen: seen.share_within(_TTFT, SLOS["ttft_slo"]),
    "Output tokens within SLO/A": lambda seen: seen.share_within(_TPOT, SLOS["tpot_slo"]),
    "First token, p95/A": _quantile(0.95, _TTFT),
    "Wait, p95/A": _quantile(0.95, _WAIT),
    "Waiting/A": _plain("holdfast_requests_waiting"),
    "KV cache/A": _plain("vllm:kv_cache_usage_perc"),
    **_quantiles("Time to first token", _TTFT),
    **_quantiles("Time per output token", _TPOT),
    **_quantiles("Whole request", "vllm:e2e_request_latency_seconds"),
    "Where the time goes/A": _mean(_WAIT),
    "Where the time goes/B": _mean("vllm:request_queue_time_seconds"),
    "Where the time goes/C": _mean("vllm:request_prefill_time_seconds"),
    "Where the time goes/D": _mean("vllm:request_decode_time_seconds"),
    "Tokens/A": _rate("vllm:prompt_tokens_total"),
    "Tokens/B": _rate("vllm:generation_tokens_total"),
    "Finished requests/A": _rates("vllm:request_success_total"),
    "Tokens per step/A": _mean("vllm:iteration_tokens_total"),
    "Scheduled tokens by rank/A": _rates("holdfast_engine_scheduled_tokens_total"),
    "Requests running and waiting/A": _plain("vllm:num_requests_running"),
    "Requests running and waiting/B": _plain("vllm:num_requests_waiting"),
    "Waiting by reason/A": _plain("vllm:num_requests_waiting_by_reason"),
    "Requests in the front end/A": _plain("holdfast_requests_in_flight"),
    "Requests in the front end/B": _plain("holdfast_requests_held"),
    **_quantiles("Wait in the front end", _WAIT),
    "KV cache by engine/A": _plain("vllm:kv_cache_usage_perc"),
    "Preemptions/A": _rate("vllm:num_preemptions_total"),
    "Prefix cache hits/A": _hits,
    "Tokens by key/A": _without_keys,
    "Requests by key/A": _without_keys,
}

PANELS: Mapping[str, Expected] = {
    f"{dashboard}/{panel}": expected
    for dashboard, panels in (
        ("workspace", WORKSPACE),
        ("lifecycle", LIFECYCLE),
        ("serving", SERVING),
    )
    for panel, expected in panels.items()
}

WATCHED: Mapping[str, str] = {
    "HoldfastWorkspaceRejected": "holdfast_workspace_growth_rejections_total",
    "HoldfastWorkspaceGrew": "holdfast_workspace_unproven_growths",
    "HoldfastWorkspaceHeadroomLow": _SIZE,
    "HoldfastWorkspaceNotLocked": "holdfast_workspace_locked",
    "HoldfastProbeFailed": "holdfast_probe_runs_total",
    "HoldfastProofIncomplete": "holdfast_probe_proven_tokens",
    "HoldfastRestartLoop": "holdfast_engine_deaths_total",
    "HoldfastRequestsLost": "holdfast_requests_lost_total",
    "HoldfastReplaySurge": "holdfast_requests_replayed_total",
    "HoldfastQueueSaturated": "holdfast_requests_waiting",
    "HoldfastNanRows": "holdfast_engine_nan_rows_total",
    "HoldfastBaselineDiffers": "holdfast_baseline_configured",
    "HoldfastToolCallsBroken": "holdfast_tool_calls_total",
    "HoldfastKeyFileBroken": "holdfast_key_file_broken",
}
"""What must be on the page of a READY server, or the alert fires."""


def _happened(name: str, least: float = 1, **wanted: str) -> Expected:
    """How often it happened, if it did so often."""
    return lambda seen: [count for count in seen.total(name, **wanted) if count >= least]


def _not_ready(seen: Seen) -> Values:
    return [] if any(seen.values("holdfast_state", state="READY|SLEEPING")) else [1.0]


def _low_headrooms(seen: Seen) -> Values:
    return [room for room in _headrooms(seen) if room < 0.05] if _is_ready(seen) else []


def _unproven_growths(seen: Seen) -> Values:
    grown = _happened("holdfast_workspace_unproven_growths")
    return grown(seen) if _is_ready(seen) else []


def _is_ready(seen: Seen) -> bool:
    return any(seen.values("holdfast_state", state="READY"))


_DUE: Mapping[str, Expected] = {
    "HoldfastNotReady": _not_ready,
    "HoldfastWorkspaceRejected": _happened("holdfast_workspace_growth_rejections_total"),
    "HoldfastWorkspaceHeadroomLow": _low_headrooms,
    "HoldfastWorkspaceGrew": _unproven_growths,
    "HoldfastNanRows": _happened("holdfast_engine_nan_rows_total"),
    "HoldfastRequestsLost": _happened("holdfast_requests_lost_total"),
    "HoldfastStalled": _happened("holdfast_engine_deaths_total", cause="stall"),
    "HoldfastRestartLoop": _happened("holdfast_engine_deaths_total", 2, cause="!requested"),
}
"""The alerts whose condition the page of one server can tell, and its value."""


def due_alerts(seen: Seen) -> dict[str, Values]:
    """The alerts whose condition holds, with its values: what happened, and what is missing."""
    due = {alert: expected(seen) for alert, expected in _DUE.items()}
    for alert, name in WATCHED.items():
        if _is_ready(seen) and not seen.of(name):
            due[alert] = [1.0]
    return {alert: values for alert, values in due.items() if values}


RECORDS: Mapping[str, Callable[[Seen], Values]] = {
    "engine_rank_ubatch_lane:holdfast_workspace_headroom:ratio": _headrooms,
    "instance:holdfast_engine_deaths:increase30m": _total("holdfast_engine_deaths_total"),
    "instance:holdfast_requests_lost:increase30m": _total("holdfast_requests_lost_total"),
    "instance:vllm_num_requests_running:sum": _total("vllm:num_requests_running"),
}
"""What each recording rule comes to, except quantiles, which have a window of their own."""
