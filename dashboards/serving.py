"""Is it fast? Latency, throughput, queue and KV cache, from vLLM's own metrics."""

from __future__ import annotations

from dashboards.frame import Page, Slo
from dashboards.panels import NEUTRAL, Panel, Query, Row, Step, tile
from dashboards.queries import MODEL, RANK, SERVER, quantile, rate, ratio, within

_TTFT = "vllm:time_to_first_token_seconds"
_TPOT = "vllm:request_time_per_output_token_seconds"
_WAIT = "holdfast_request_wait_seconds"
_TOKENS = "suffix: tok/s"
_SLO: tuple[Step, ...] = ((None, "red"), (0.95, "orange"), (0.99, "green"))
_QUEUE: tuple[Step, ...] = ((None, "green"), (1, "orange"))
_FULL: tuple[Step, ...] = ((None, "green"), (0.9, "orange"), (0.98, "red"))
_TTFT_BOUNDS = ("0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0", "20.0", "40.0")
_TPOT_BOUNDS = ("0.01", "0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5", "1.0")


def _sum_of_rates(name: str) -> str:
    return f"sum({rate(name, MODEL)})"


def _quantiles(histogram: str, selector: str = MODEL) -> tuple[Query, ...]:
    return tuple(
        Query(quantile(share, histogram, selector), legend)
        for share, legend in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    )


def _mean(histogram: str, selector: str = MODEL) -> str:
    sums, counts = (rate(f"{histogram}_{what}", selector) for what in ("sum", "count"))
    return ratio(f"sum({sums})", f"sum({counts})")


_FAST = Row(
    "Is it fast?",
    (
        tile(
            "First token within SLO",
            "Share of the requests in the shown time range whose first token came within the SLO "
            "chosen above, counted from when the front end admitted them.",
            within(_TTFT, "$ttft_slo"),
            "percentunit",
            _SLO,
        ),
        tile(
            "Output tokens within SLO",
            "Share of the requests in the shown time range whose mean time per output token was "
            "within the SLO chosen above.",
            within(_TPOT, "$tpot_slo"),
            "percentunit",
            _SLO,
        ),
        tile(
            "First token, p95",
            "95 % of the requests had their first token within this time.",
            quantile(0.95, _TTFT),
            "s",
        ),
        tile(
            "Wait, p95",
            "95 % of the requests spent at most this time in the front end. It comes before the "
            "time to the first token.",
            quantile(0.95, _WAIT, SERVER),
            "s",
            ((None, "green"), (1, "orange"), (10, "red")),
        ),
        tile(
            "Waiting",
            "Requests waiting in the front end and in the scheduler.",
            f"sum(holdfast_requests_waiting{{{SERVER}}})",
            "short",
            _QUEUE,
        ),
        tile(
            "KV cache",
            "Used share of the KV cache, of the engine that uses most of its cache. A server that "
            "recovers shows a full one, so that routers avoid it.",
            f"max(vllm:kv_cache_usage_perc{{{MODEL}}})",
            "percentunit",
            _FULL,
        ),
    ),
)

_LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "From when the front end admitted a request to its first token: queue and prefill.",
            _quantiles(_TTFT),
            "s",
        ),
        Panel(
            "Time per output token",
            "Mean time between the tokens of a request.",
            _quantiles(_TPOT),
            "s",
        ),
        Panel(
            "Whole request",
            "From when the front end admitted a request to its last token.",
            _quantiles("vllm:e2e_request_latency_seconds"),
            "s",
        ),
        Panel(
            "Where the time goes",
            "Mean time of a request in the front end, in the engine's queue, in prefill and in "
            "decode.",
            (
                Query(_mean(_WAIT, SERVER), "front end"),
                Query(_mean("vllm:request_queue_time_seconds"), "queue"),
                Query(_mean("vllm:request_prefill_time_seconds"), "prefill"),
                Query(_mean("vllm:request_decode_time_seconds"), "decode"),
            ),
            "s",
            "stack",
        ),
    ),
)

_THROUGHPUT = Row(
    "Throughput",
    (
        Panel(
            "Tokens",
            "Prompt tokens received and output tokens generated, per second.",
            (
                Query(_sum_of_rates("vllm:prompt_tokens_total"), "prompt"),
                Query(_sum_of_rates("vllm:generation_tokens_total"), "output"),
            ),
            _TOKENS,
        ),
        Panel(
            "Finished requests",
            "Requests per second by how they ended. abort means that the client left.",
            (
                Query(
                    f"sum by (finished_reason) ({rate('vllm:request_success_total', MODEL)})",
                    "{{finished_reason}}",
                ),
            ),
            "reqps",
            "stack",
        ),
        Panel(
            "Tokens per step",
            "Mean number of tokens in a scheduler step: how full the batches are.",
            (Query(_mean("vllm:iteration_tokens_total"), "mean"),),
            "short",
        ),
        Panel(
            "Scheduled tokens by rank",
            "Tokens per second that each rank worked on, including those of the probe.",
            (
                Query(
                    rate("holdfast_engine_scheduled_tokens_total", RANK),
                    "{{instance}} {{engine}}/{{rank}}",
                ),
            ),
            _TOKENS,
        ),
    ),
)

_QUEUES = Row(
    "Queue and KV cache",
    (
        Panel(
            "Requests running and waiting",
            "Waiting includes the front end. If more wait than run for long, the queue does not "
            "drain. A server that recovers shows at least 10 for each engine, so that routers "
            "avoid it.",
            (
                Query(
                    f"sum by (instance) (vllm:num_requests_running{{{MODEL}}})",
                    "running {{instance}}",
                ),
                Query(
                    f"sum by (instance) (vllm:num_requests_waiting{{{MODEL}}})",
                    "waiting {{instance}}",
                ),
            ),
            "short",
        ),
        Panel(
            "Waiting by reason",
            "Requests waiting in the scheduler, for capacity or deferred, and those held in the "
            "front end.",
            (
                Query(
                    f"sum by (instance, reason) (vllm:num_requests_waiting_by_reason{{{MODEL}}})",
                    "{{reason}} {{instance}}",
                ),
            ),
            "short",
        ),
        Panel(
            "Requests in the front end",
            "Requests admitted and not yet fully answered, whatever the engine does, and those "
            "waiting for capacity in it.",
            (
                Query(f"holdfast_requests_in_flight{{{SERVER}}}", "inside {{instance}}"),
                Query(f"holdfast_requests_held{{{SERVER}}}", "waiting {{instance}}"),
            ),
            "short",
        ),
        Panel(
            "Wait in the front end",
            "How long requests waited for capacity in the engine before they reached vLLM.",
            _quantiles(_WAIT, SERVER),
            "s",
        ),
        Panel(
            "KV cache by engine",
            "Used share of the KV cache of each engine. Near the line, requests are preempted.",
            (Query(f"vllm:kv_cache_usage_perc{{{MODEL}}}", "{{instance}} {{engine}}"),),
            "percentunit",
            thresholds=_FULL,
            most=1,
        ),
        Panel(
            "Preemptions",
            "Requests per second that lost their place in the KV cache and are recomputed.",
            (Query(_sum_of_rates("vllm:num_preemptions_total"), "preemptions"),),
            "ops",
        ),
        Panel(
            "Prefix cache hits",
            "Share of the prompt tokens that were found in the prefix cache.",
            (
                Query(
                    ratio(
                        _sum_of_rates("vllm:prefix_cache_hits_total"),
                        _sum_of_rates("vllm:prefix_cache_queries_total"),
                    ),
                    "hits",
                ),
            ),
            "percentunit",
            thresholds=NEUTRAL,
            most=1,
        ),
    ),
)

_KEYS = Row(
    "API keys",
    (
        Panel(
            "Tokens by key",
            "Prompt and output tokens per second of each API key, by its name. Empty without keys.",
            (
                Query(
                    f"sum by (key) ({rate('holdfast_key_prompt_tokens_total', SERVER)} "
                    f"+ {rate('holdfast_key_output_tokens_total', SERVER)})",
                    "{{key}}",
                ),
            ),
            _TOKENS,
            "stack",
        ),
        Panel(
            "Requests by key",
            "Requests per second that reached the engine, by API key. Empty without keys.",
            (
                Query(
                    f"sum by (key) ({rate('holdfast_key_requests_total', SERVER)})",
                    "{{key}}",
                ),
            ),
            "reqps",
            "stack",
        ),
    ),
)

SERVING = Page(
    "serving",
    "Is it fast? Latency, throughput, queue and KV cache, without the probe's own requests.",
    (_FAST, _LATENCY, _THROUGHPUT, _QUEUES, _KEYS),
    (
        Slo("ttft_slo", "First token SLO (s)", _TTFT_BOUNDS, "2.5"),
        Slo("tpot_slo", "Output token SLO (s)", _TPOT_BOUNDS, "0.1"),
    ),
)
