"""Is it up, and if not, why? States, the proof, restarts, deaths and what they cost users."""

from __future__ import annotations

from types import MappingProxyType

from dashboards.answers import RIGHT
from dashboards.frame import Page
from dashboards.panels import (
    ALL_IS_GOOD,
    NONE_IS_GOOD,
    TILE_WIDTH,
    YES_IS_GOOD,
    Mappings,
    Panel,
    Query,
    Row,
    tile,
)
from dashboards.queries import FOLLOWER, RANK, SERVER, increase, rate, ratio

STATES: Mappings = MappingProxyType(
    {
        0: ("no answer", "super-light-red"),
        1: ("STARTING", "blue"),
        2: ("PROBING", "purple"),
        3: ("READY", "green"),
        4: ("RECOVERING", "orange"),
        5: ("SLEEPING", "text"),
        6: ("DRAINING", "yellow"),
        7: ("FAILED", "red"),
        8: ("STOPPED", "dark-red"),
    }
)
_NUMBERED_STATES = " or ".join(
    f'holdfast_state{{{SERVER}, state="{name}"}} * {number}'
    for number, (name, _) in STATES.items()
    if number
)
_UNANSWERED = f"up{{{SERVER}}} == 0"
_STATE_NUMBER = f"sum by (instance) ({_NUMBERED_STATES} or {_UNANSWERED})"
"""The number of the state that a server is in: one series a server, so one band on a timeline."""
_READY = f'sum(holdfast_state{{{SERVER}, state="READY"}})'
_TARGETS = f"up{{{SERVER}}}"

_STEP = "{{instance}} {{step}}"
_STARTS = f"holdfast_engine_starts_total{{{SERVER}}}"

_UP = Row(
    "Is it up?",
    (
        Panel(
            "State",
            "Current states of the servers. Outside READY, requests are held or get 503.",
            (Query(f"count by (state) (holdfast_state{{{SERVER}}} == 1)", "{{state}}"),),
            "short",
            "name",
            width=TILE_WIDTH,
        ),
        tile(
            "Ready",
            "Share of the servers that are READY. A server that does not answer counts as not "
            "READY.",
            ratio(f"({_READY} or sum({_TARGETS}) * 0)", f"count({_TARGETS})"),
            "percentunit",
            ALL_IS_GOOD,
        ),
        tile(
            "Engine deaths",
            "Engines that died since the servers started, not counting requested restarts.",
            f'sum(holdfast_engine_deaths_total{{{SERVER}, cause!="requested"}})',
            "short",
            NONE_IS_GOOD,
        ),
        tile(
            "Restarts left",
            "Restarts that the server with the fewest may still make within the window. At 0, "
            "the next death ends it with exit code 5, unless requests, the host's memory or "
            "another node caused it.",
            f"min(holdfast_engine_restarts_left{{{SERVER}}})",
            "short",
            ((None, "red"), (1, "orange"), (2, "green")),
        ),
        tile(
            "Requests lost",
            "Requests that failed because an engine died, since the servers started.",
            f"sum(holdfast_requests_lost_total{{{SERVER}}})",
            "short",
            NONE_IS_GOOD,
        ),
        tile(
            "Proven context",
            "The longest context that the last probe proved, on the server where it is shortest.",
            f"min(holdfast_probe_proven_tokens{{{SERVER}}})",
            "short",
        ),
    ),
)

_LIFE = Row(
    "Its life",
    (
        Panel(
            "States",
            "The state of each server over time, and when it did not answer Prometheus.",
            (Query(_STATE_NUMBER),),
            "short",
            "timeline",
            mappings=STATES,
            width=24,
        ),
        Panel(
            "Engine starts",
            "Engine starts, finished or not: one for each generation. A steep line is a restart "
            "loop.",
            (
                Query(_STARTS, "starts {{instance}}"),
                Query(f"holdfast_engine_generation{{{SERVER}}}", "generation {{instance}}"),
            ),
            "short",
        ),
        Panel(
            "Duration of the last start",
            "How long the last finished engine start took, without the probe.",
            (Query(f"holdfast_engine_start_duration_seconds{{{SERVER}}}"),),
            "s",
        ),
        Panel(
            "Deaths by cause",
            "Engines that died, by cause. workspace_rejection and out_of_memory call for more "
            "memory; terminated came from outside.",
            (
                Query(
                    "sum by (instance, cause) "
                    f"({increase('holdfast_engine_deaths_total', SERVER)})",
                    "{{cause}} {{instance}}",
                ),
            ),
            "short",
            thresholds=NONE_IS_GOOD,
        ),
        Panel(
            "Planned restarts",
            "Restarts of the engine that --recycle-after asked for, by the limit that the engine "
            "had reached.",
            (
                Query(
                    "sum by (instance, reason) "
                    f"({increase('holdfast_engine_recycles_total', SERVER)})",
                    "{{reason}} {{instance}}",
                ),
            ),
            "short",
        ),
        Panel(
            "Host memory of the engine",
            "What the engine's processes hold of their host's memory, without shared memory and "
            "mapped files. A line that rises from restart to restart is a leak.",
            (Query(f"holdfast_engine_host_memory_bytes{{{SERVER}}}"),),
            "bytes",
        ),
        Panel(
            "Memory of the host",
            "Memory left to the host, or to the container if its limit is the tighter one. Where "
            "the GPU shares it, a host without any freezes.",
            (Query(f"holdfast_host_memory_available_bytes{{{SERVER}}}"),),
            "bytes",
        ),
        Panel(
            "Short of memory",
            "Long prompts that had to wait or were given up, and engines that were ended, because "
            "the host was short of memory.",
            (
                Query(
                    "sum by (instance, action) "
                    f"({increase('holdfast_host_memory_actions_total', SERVER)})",
                    "{{action}} {{instance}}",
                ),
            ),
            "short",
            thresholds=NONE_IS_GOOD,
        ),
        Panel(
            "Pressure",
            "Share of the time during which at least one task waited for memory.",
            (Query(f"holdfast_host_memory_pressure_ratio{{{SERVER}}}"),),
            "percentunit",
        ),
        Panel(
            "Replayed and lost requests",
            "Requests that were replayed on the next generation of the engine, streams that it "
            "went on with, and requests that were lost, by reason.",
            (
                Query(
                    f"sum by (instance) ({increase('holdfast_requests_replayed_total', SERVER)})",
                    "replayed {{instance}}",
                ),
                Query(
                    "sum by (instance, reason) "
                    f"({increase('holdfast_requests_lost_total', SERVER)})",
                    "lost: {{reason}} {{instance}}",
                ),
                Query(
                    f"sum by (instance) ({increase('holdfast_requests_continued_total', SERVER)})",
                    "continued {{instance}}",
                ),
            ),
            "short",
        ),
        Panel(
            "Requests in flight and held",
            "Requests admitted and not yet fully answered, and those waiting in the front end "
            "for capacity or for the next engine.",
            (
                Query(f"holdfast_requests_in_flight{{{SERVER}}}", "in flight {{instance}}"),
                Query(f"holdfast_requests_held{{{SERVER}}}", "held {{instance}}"),
            ),
            "short",
        ),
        Panel(
            "Refused requests",
            "Requests per second that were refused, by reason.",
            (
                Query(
                    "sum by (instance, reason) "
                    f"({rate('holdfast_requests_refused_total', SERVER)})",
                    "{{reason}} {{instance}}",
                ),
            ),
            "reqps",
        ),
    ),
)

_NODES = Row(
    "Several nodes",
    (
        Panel(
            "Nodes",
            "Whether each node has joined, as the head sees it. Empty if the engine runs on one "
            "node.",
            (Query(f"holdfast_node_joined{{{SERVER}}}", "{{node}} {{instance}}"),),
            "short",
            "timeline",
            mappings=MappingProxyType({0: ("away", "red"), 1: ("joined", "green")}),
        ),
        Panel(
            "Followers",
            "Whether each follower has a connection to its head, as the follower sees it.",
            (Query(f"holdfast_node_head_connected{{{FOLLOWER}}}"),),
            "short",
            "timeline",
            mappings=MappingProxyType({0: ("no head", "red"), 1: ("connected", "green")}),
        ),
        Panel(
            "Nodes wanted and joined",
            "Nodes that the engine needs, and nodes that have joined, the head included. The "
            "engine starts when enough are there.",
            (
                Query(f"holdfast_nodes_wanted{{{SERVER}}}", "wanted {{instance}}"),
                Query(
                    f"sum by (instance) (holdfast_node_joined{{{SERVER}}})", "joined {{instance}}"
                ),
            ),
            "short",
        ),
        Panel(
            "Refused nodes",
            "Connections to the node port that were refused, by reason. not_needed is a spare that "
            "waits.",
            (
                Query(
                    "sum by (instance, reason) "
                    f"({increase('holdfast_node_connections_refused_total', SERVER)})",
                    "{{reason}} {{instance}}",
                ),
            ),
            "short",
        ),
    ),
)

_PROOF = Row(
    "The proof",
    (
        Panel(
            "Probe steps",
            "Whether each step of the last probe passed. A skipped step has no bar.",
            (Query(f"holdfast_probe_passed{{{SERVER}}}", _STEP),),
            "short",
            "bars",
            ALL_IS_GOOD,
            YES_IS_GOOD,
            width=8,
            most=1,
        ),
        Panel(
            "Sizes proven",
            "The largest size that each step proved: tokens of one context or of one engine step, "
            "or requests that decode together.",
            (Query(f"holdfast_probe_tokens{{{SERVER}}}", _STEP),),
            "short",
            "bars",
            width=8,
        ),
        Panel(
            "Time by step",
            "How long each step of the last probe took.",
            (Query(f"holdfast_probe_duration_seconds{{{SERVER}}}", _STEP),),
            "s",
            "bars",
            width=8,
        ),
        Panel(
            "Limited",
            "Whether the last probe skipped a size: the proof then covers less than the longest "
            "context that requests may have.",
            (Query(f"holdfast_probe_limited{{{SERVER}}}"),),
            "short",
            "timeline",
            mappings=MappingProxyType({0: ("whole", "green"), 1: ("limited", "orange")}),
        ),
        Panel(
            "Probe runs",
            "Finished probe runs, by result, since the servers started.",
            (
                Query(
                    f"sum by (instance, result) (holdfast_probe_runs_total{{{SERVER}}})",
                    "{{result}} {{instance}}",
                ),
            ),
            "short",
        ),
    ),
)

_PULSE = Row(
    "Does it move?",
    (
        Panel(
            "Time since the last step",
            "Time since any rank last finished an engine step. A long time is normal while "
            "nothing is in flight; with requests in flight it is a stall.",
            (Query(f"holdfast_last_step_age_seconds{{{SERVER}}}"),),
            "s",
        ),
        Panel(
            "Steps by rank",
            "Engine steps per second. If the ranks of one engine drift apart, they wait for each "
            "other.",
            (Query(rate("holdfast_engine_steps_total", RANK), "{{instance}} {{engine}}/{{rank}}"),),
            "ops",
        ),
        Panel(
            "Event loop",
            "The longest event loop delay of the front end in the last minute. Above the line, "
            "health probes begin to time out.",
            (Query(f"holdfast_event_loop_lag_seconds{{{SERVER}}}"),),
            "s",
            thresholds=((None, "green"), (1, "red")),
        ),
        Panel(
            "Versions",
            "Versions of Holdfast and vLLM.",
            (
                Query(
                    f"holdfast_build_info{{{SERVER}}}",
                    "{{instance}} Holdfast {{version}}, vLLM {{vllm_version}}",
                ),
            ),
            "short",
            "name",
        ),
    ),
)

LIFECYCLE = Page(
    "lifecycle",
    "Is it up and right, and if not, why? States, probe, answers, restarts, deaths, their cost.",
    (_UP, _LIFE, _NODES, _PROOF, RIGHT, _PULSE),
)
