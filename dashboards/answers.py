"""Is what it answers right? What the server itself notices, in one row."""

from __future__ import annotations

from dashboards.panels import NONE_IS_GOOD, Panel, Query, Row
from dashboards.queries import SERVER, increase, ratio

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
