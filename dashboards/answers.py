"""Is what it answers right? What the server itself notices, in one row."""

from __future__ import annotations

from types import MappingProxyType

from dashboards.panels import NONE_IS_GOOD, Panel, Query, Row
from dashboards.queries import RANK, SERVER, increase, ratio

_CALLS = f"sum by (instance) ({increase('holdfast_tool_calls_total', SERVER)})"
_BROKEN = increase("holdfast_broken_tool_calls_total", SERVER)

RIGHT = Row(
    "Is it right?",
    (
        Panel(
            "Broken tool calls",
            "Share of the model's tool calls that no client can use. A sudden rise after a change "
            "of version or flags points to the tool call parser or the chat template.",
            (Query(ratio(f"sum by (instance) ({_BROKEN})", _CALLS)),),
            "percentunit",
            thresholds=((None, "green"), (0.05, "red")),
            most=1,
        ),
        Panel(
            "Rows with a NaN",
            "Rows of logits with a NaN, by rank. Each gave its request an arbitrary token.",
            (
                Query(
                    increase("holdfast_engine_nan_rows_total", RANK),
                    "{{instance}} {{engine}}/{{rank}}",
                ),
            ),
            "short",
            thresholds=NONE_IS_GOOD,
        ),
        Panel(
            "Agreement with the baseline",
            "Whether the log-probs agreed with the recorded baseline: in the last probe, and when "
            "an idle engine was last asked. Empty without --verify-baseline.",
            (Query(f"holdfast_baseline_agreement{{{SERVER}}}", "{{check}} {{instance}}"),),
            "short",
            "timeline",
            mappings=MappingProxyType({0: ("differs", "red"), 1: ("agrees", "green")}),
        ),
        Panel(
            "Difference from the baseline",
            "The largest difference of a log-prob in the last comparison, in nats.",
            (
                Query(
                    f"holdfast_baseline_worst_difference_nats{{{SERVER}}}",
                    "{{check}} {{instance}}",
                ),
            ),
            "short",
        ),
        Panel(
            "Time since the last comparison",
            "An idle engine is compared every minute, a busy one never.",
            (
                Query(
                    f"holdfast_baseline_comparison_age_seconds{{{SERVER}}}",
                    "{{check}} {{instance}}",
                ),
            ),
            "s",
        ),
        Panel(
            "Broken tool calls by reason",
            "How many tool calls were broken: invalid_json, unknown_name or schema_mismatch.",
            (
                Query(
                    f"sum by (instance, reason) ({_BROKEN})",
                    "{{reason}} {{instance}}",
                ),
            ),
            "short",
            thresholds=NONE_IS_GOOD,
        ),
    ),
)
