"""Is memory as promised? Sizes, the lock, what grew or was refused, and where the rest went."""

from __future__ import annotations

from dashboards.frame import Page
from dashboards.panels import (
    ALL_IS_GOOD,
    NONE_IS_GOOD,
    YES_IS_GOOD,
    Panel,
    Query,
    Row,
    Step,
    tile,
)
from dashboards.queries import RANK, by_node, increase, ratio

_SLOT_NAME = "{{instance}} {{engine}}/{{rank}} ubatch {{ubatch}} lane {{lane}}"
_RANK_NAME = "{{instance}} {{engine}}/{{rank}}"
_HEADROOM: tuple[Step, ...] = ((None, "red"), (0.05, "green"))
_GREW: tuple[Step, ...] = ((None, "green"), (1, "orange"))

_SIZE = f"holdfast_workspace_size_bytes{{{RANK}}}"
_HIGH_WATER = f"holdfast_workspace_high_water_bytes{{{RANK}}}"
_LOCKED = f"holdfast_workspace_locked{{{RANK}}}"
_HEADROOM_OF_SLOT = ratio(f"({_SIZE} - {_HIGH_WATER})", _SIZE)
_GROWTHS = "holdfast_workspace_growths_total"
_REJECTIONS = "holdfast_workspace_growth_rejections_total"


def _memory(operator: str, kind: str) -> str:
    return f'holdfast_memory_bytes{{{RANK}, kind{operator}"{kind}"}}'


_PROMISE = Row(
    "Is memory as promised?",
    (
        tile(
            "Locked",
            "Share of the ranks whose workspaces are locked. Below 100 % while READY, the growth "
            "policy does not apply to all of them.",
            ratio(f"sum({_LOCKED})", f"count({_LOCKED})"),
            "percentunit",
            ALL_IS_GOOD,
        ),
        tile(
            "Least headroom",
            "What is left of the workspace that comes closest to its high water, as a share of "
            "its size. Below 5 %, reserve more.",
            f"min({_HEADROOM_OF_SLOT})",
            "percentunit",
            _HEADROOM,
        ),
        tile(
            "Growths after the lock",
            "Workspaces that were replaced by larger ones after the lock, since the server "
            "started: either by the probe of a first start, which learns from it, or by a "
            "request that needed more than was proven.",
            f'sum({_GROWTHS}{{{RANK}, phase="locked"}})',
            "short",
            _GREW,
        ),
        tile(
            "Rejections",
            "Workspace requests that were refused since the server started. Each ends the engine.",
            f"sum({_REJECTIONS}{{{RANK}}})",
            "short",
            NONE_IS_GOOD,
        ),
        tile(
            "Retired",
            "Outgrown buffers that are kept because a captured graph may use them. A restart "
            "frees them.",
            f"sum(holdfast_workspace_retired_bytes{{{RANK}}})",
            "bytes",
            ((None, "green"), (1, "orange")),
        ),
        tile(
            "Share of the budget",
            "The share of vLLM's memory budget that the workspaces use.",
            ratio(f"sum({_memory('=', 'workspace')})", f"sum({_memory('=', 'budget')})"),
            "percentunit",
            ((None, "green"), (0.1, "orange")),
        ),
    ),
)

_SIZES = Row(
    "Sizes by slot",
    (
        Panel(
            "Size, reserved and high water",
            "What each workspace holds, what was reserved before the KV cache was sized, and the "
            "most that any caller requested. A high water above the reserved size means that the "
            "workspace grew.",
            (
                Query(_SIZE, f"size {_SLOT_NAME}"),
                Query(f"holdfast_workspace_reserved_bytes{{{RANK}}}", f"reserved {_SLOT_NAME}"),
                Query(_HIGH_WATER, f"high water {_SLOT_NAME}"),
            ),
            "bytes",
        ),
        Panel(
            "Headroom",
            "What is left of each workspace above its high water. Below the line at 5 %, a "
            "slightly larger need makes it grow. Each generation of the engine has its own high "
            "water.",
            (Query(_HEADROOM_OF_SLOT, _SLOT_NAME),),
            "percentunit",
            thresholds=_HEADROOM,
            most=1,
        ),
        Panel(
            "Lock",
            "Whether the workspaces of a rank are locked: from then on, the growth policy applies.",
            (Query(_LOCKED, _RANK_NAME),),
            "short",
            "timeline",
            ALL_IS_GOOD,
            YES_IS_GOOD,
        ),
        Panel(
            "Outside the workspaces",
            "Outgrown buffers, persistent resources and, if there is one, the Lamport all-reduce "
            "workspace of each rank.",
            (
                Query(f"holdfast_workspace_retired_bytes{{{RANK}}}", f"retired {_RANK_NAME}"),
                Query(f"holdfast_workspace_persistent_bytes{{{RANK}}}", f"persistent {_RANK_NAME}"),
                Query(f"holdfast_lamport_workspace_bytes{{{RANK}}}", f"Lamport {_RANK_NAME}"),
            ),
            "bytes",
        ),
    ),
)

_GROWTH = Row(
    "Growth",
    (
        Panel(
            "Growths",
            "Workspaces that were replaced by larger ones, by phase: warmup is normal, sealed "
            "keeps the old buffer, locked was not proven at the start.",
            (
                Query(
                    f"sum by (instance, engine, rank, phase) ({increase(_GROWTHS, RANK)})",
                    f"{{{{phase}}}} {_RANK_NAME}",
                ),
            ),
            "short",
        ),
        Panel(
            "Rejections by kind",
            "Workspace requests that were refused, by kind. Each ends the engine.",
            (
                Query(
                    f"sum by (instance, engine, rank, kind) ({increase(_REJECTIONS, RANK)})",
                    f"{{{{kind}}}} {_RANK_NAME}",
                ),
            ),
            "short",
            thresholds=NONE_IS_GOOD,
        ),
        Panel(
            "Last rejection",
            "What the refused request needed. Reserve at least this much.",
            (Query(f"holdfast_workspace_last_rejection_bytes{{{RANK}}}", _RANK_NAME),),
            "bytes",
        ),
        Panel(
            "Largest callers",
            "The callers that requested most, by file, line and function.",
            (
                Query(
                    f"topk(10, max by (caller) (holdfast_workspace_caller_bytes{{{RANK}}}))",
                    "{{caller}}",
                ),
            ),
            "bytes",
            "bars",
        ),
    ),
)

_LEDGER = Row(
    "Memory ledger",
    (
        Panel(
            "Where the memory went",
            "What was measured on each rank. CUDA graphs and peak activations appear only on a "
            "GPU.",
            (
                Query(
                    f"sum by (instance, engine, rank, kind) ({_memory('!~', 'budget|total')})",
                    f"{{{{kind}}}} {_RANK_NAME}",
                ),
            ),
            "bytes",
            "stack",
        ),
        Panel(
            "Budget and device",
            "What vLLM may use, and what the device has.",
            (Query(_memory("=~", "budget|total"), f"{{{{kind}}}} {_RANK_NAME}"),),
            "bytes",
        ),
    ),
)

_NODES = Row(
    "By node",
    (
        Panel(
            "Least headroom by node",
            "What is left of the workspace on each node that comes closest to its high water, as a "
            "share of its size. Empty if the engine runs on one node.",
            (
                Query(
                    f"min by (instance, node) ({by_node(_HEADROOM_OF_SLOT)})",
                    "{{node}} {{instance}}",
                ),
            ),
            "percentunit",
            thresholds=_HEADROOM,
            most=1,
        ),
        Panel(
            "Memory by node",
            "What was measured on the ranks of each node. Nodes that differ much have different "
            "GPUs, or a neighbour that uses the memory.",
            (
                Query(
                    f"sum by (instance, node, kind) ({by_node(_memory('!~', 'budget|total'))})",
                    "{{kind}} {{node}} {{instance}}",
                ),
            ),
            "bytes",
            "stack",
        ),
    ),
)

WORKSPACE = Page(
    "workspace",
    "Is memory as promised? What is reserved, used, locked, grown and refused, and what caused it.",
    (_PROMISE, _SIZES, _GROWTH, _LEDGER, _NODES),
)
