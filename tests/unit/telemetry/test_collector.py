from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from holdfast.labels import (
    DEATH_CAUSES,
    LOSS_REASONS,
    MEMORY_ACTIONS,
    MEMORY_KINDS,
    RECYCLE_REASONS,
    REFUSAL_REASONS,
    TOOL_CALL_DEFECTS,
    BaselineCheck,
    ToolCallDefect,
)
from holdfast.lifecycle.states import State
from holdfast.records import (
    BaselineComparison,
    FollowerStatus,
    HostMemory,
    NodeStatus,
    RankStats,
    Status,
)
from holdfast.telemetry.collector import (
    FollowerCollector,
    HoldfastCollector,
    OwnRegistry,
    RequestCounts,
    last_step_age_seconds,
)
from holdfast.telemetry.counters import (
    WAIT_BOUNDS_SECONDS,
    Counters,
    Totals,
    request_waits,
)
from holdfast.telemetry.exposition import format_for, render, vllm_registry
from holdfast.telemetry.key_usage import KeyUsage
from holdfast.telemetry.metrics import BY_NAME, FOLLOWER_METRICS, METRICS, RANK_METRICS
from sample_status import MIB, REJECTION, a_fresh_status, a_probe, a_rank, a_status


class Server:
    """A status that moves on, and the registry that is scraped from it."""

    def __init__(self, status: Status) -> None:
        self.status = status
        self.counters = Counters()
        self.host_memory_bytes: int | None = None
        self.host_memory: HostMemory | None = None
        self.requests = RequestCounts(in_flight=2, held=1, waiting=4)
        self.waits = request_waits()
        self.restarts_left = 3
        self.lag_seconds = 0.02
        self.usage = KeyUsage()
        self.compared: dict[BaselineCheck, BaselineComparison] = {}
        self.has_log_stats: bool | None = None
        collector = HoldfastCollector(
            lambda: self.status,
            counters=self.counters,
            requests=lambda: self.requests,
            waits=self.waits,
            host_memory_bytes=lambda: self.host_memory_bytes,
            restarts_left=lambda: self.restarts_left,
            loop_lag_seconds=lambda: self.lag_seconds,
            host_memory=lambda: self.host_memory,
            broken_key_files=lambda: {"api": True, "admin": False},
            key_usage=lambda: self.usage.totals(),  # noqa: PLW0108 - a test replaces it
            baseline=lambda: self.compared,
            has_log_stats=lambda: self.has_log_stats,
            version="0.1.0",
            vllm_version="0.32.0",
        )
        self.registry = OwnRegistry(collector)

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sample on the page; None if there is no such series."""
        return self.registry.get_sample_value(f"holdfast_{name}", labels)

    def names(self) -> set[str]:
        """Return every family that has a series."""
        page = render([self.registry])
        families = text_string_to_metric_families(page.decode())
        return {BY_NAME[name_of(found)].full_name for found in families}


def name_of(family: Metric) -> str:
    """Its name in the table; the parser leaves the ending of a counter out."""
    name = family.name.removeprefix("holdfast_")
    return f"{name}_total" if family.type == "counter" else name


def test_a_full_status_shows_exactly_the_table() -> None:
    """What is emitted is what the table says: names, kinds, help and labels."""
    rank = a_rank(last_rejection=REJECTION)
    nodes = (NodeStatus("a", True, ((0, 0),)), NodeStatus("b", False, problem="it left"))
    server = Server(a_status(ranks=(rank,), nodes=nodes, nodes_wanted=2))
    server.compared = {"probe": BaselineComparison(True, 0.0, 0.0)}
    server.has_log_stats = True
    server.host_memory_bytes = 3 * MIB
    server.host_memory = HostMemory(3 * MIB, 9 * MIB, 0.25)
    server.usage.count("alice")
    page = render([server.registry])
    emitted = {
        BY_NAME[name_of(found)].name: (
            found.type,
            found.documentation,
            {label for sample in found.samples for label in sample.labels} - {"le"},
        )
        for found in text_string_to_metric_families(page.decode())
    }
    assert emitted == {m.name: (m.kind, m.help, set(m.labels)) for m in METRICS}


def test_a_fresh_status_shows_nothing_that_is_not_known() -> None:
    """In the first second only what the front end itself knows has a series."""
    assert Server(a_fresh_status()).names() == {
        BY_NAME[name].full_name
        for name in (
            "state",
            "baseline_configured",
            "engine_generation",
            "engine_starts_total",
            "engine_deaths_total",
            "engine_recycles_total",
            "engine_restarts_left",
            "event_loop_lag_seconds",
            "host_memory_actions_total",
            "key_file_broken",
            "probe_runs_total",
            "requests_in_flight",
            "ready",
            "requests_held",
            "requests_waiting",
            "requests_replayed_total",
            "requests_continued_total",
            "requests_lost_total",
            "requests_refused_total",
            "tool_calls_total",
            "broken_tool_calls_total",
            "request_wait_seconds",
            "build_info",
        )
    }


def test_what_a_key_has_used_stands_under_its_name() -> None:
    """Without keys there is no such series, as the test above shows."""
    server = Server(a_status())
    server.usage = KeyUsage(lambda: ("idle",))
    server.usage.count("alice", requests=1, prompt_tokens=20, output_tokens=300)
    assert server.value("key_requests_total", key="alice") == 1
    assert server.value("key_prompt_tokens_total", key="alice") == 20
    assert server.value("key_output_tokens_total", key="alice") == 300
    assert server.value("key_requests_total", key="idle") == 0


def test_sizes_stand_under_their_slot() -> None:
    """Each slot of a rank has its own size, reservation and high water."""
    server = Server(a_status())
    slot = {"engine": "0", "rank": "0", "ubatch": "0", "lane": "0"}
    assert server.value("workspace_size_bytes", **slot) == 24 * MIB
    assert server.value("workspace_reserved_bytes", **slot) == 22 * MIB
    assert server.value("workspace_high_water_bytes", **slot) == 20 * MIB
    assert server.value("workspace_size_bytes", **{**slot, "ubatch": "1"}) == 8 * MIB


def test_only_measured_memory_has_a_series() -> None:
    """A kind of memory that was not measured is absent, not zero."""
    server = Server(a_status())
    kinds = {k for k in MEMORY_KINDS if server.value("memory_bytes", engine="0", rank="0", kind=k)}
    assert kinds == {"weights", "kv_cache"}
    assert server.value("memory_bytes", engine="0", rank="0", kind="total") is None


def test_lamport_workspace_has_a_series_where_it_was_measured() -> None:
    """A rank without one has none, and one that was measured as empty says 0."""
    for size_bytes in (None, 0, 6 * MIB):
        server = Server(a_status(ranks=(a_rank(lamport_bytes=size_bytes),)))
        assert server.value("lamport_workspace_bytes", engine="0", rank="0") == size_bytes


def test_the_last_rejection_shows_what_was_needed() -> None:
    """The size of the refused request is known once one was refused, and absent before."""
    server = Server(a_status())
    assert server.value("workspace_last_rejection_bytes", engine="0", rank="0") is None
    server.status = a_status(ranks=(a_rank(last_rejection=REJECTION),))
    assert server.value("workspace_last_rejection_bytes", engine="0", rank="0") == 22 * MIB


@pytest.mark.parametrize("state", State)
def test_exactly_one_state_is_one(state: State) -> None:
    """Every state has a series, and only the present one is 1."""
    server = Server(a_status(state))
    values = {other: server.value("state", state=other) for other in State}
    assert values == {other: float(other is state) for other in State}


def test_a_skipped_probe_step_has_no_series() -> None:
    """An alert on a failed step does not fire for one that does not apply."""
    server = Server(a_status())
    assert server.value("probe_passed", step="context_sweep") == 1
    assert server.value("probe_tokens", step="context_sweep") == 2048
    assert server.value("probe_passed", step="widest_decode") is None


def test_probe_runs_are_counted_by_result() -> None:
    """Each finished run of the probe counts under what it found."""
    server = Server(a_status())
    server.counters.totals.probe_ran(a_probe())
    server.counters.totals.probe_ran(a_probe(passed=False))
    server.counters.totals.probe_ran(a_probe())
    assert server.value("probe_runs_total", result="passed") == 2
    assert server.value("probe_runs_total", result="failed") == 1


def test_the_gate_is_counted() -> None:
    """The page has what the gate counted."""
    assert Server(a_status()).value("requests_in_flight") == 2


def test_every_reason_of_a_refusal_counts_from_the_beginning() -> None:
    """Reasons that have refused nothing yet are 0, not absent."""
    server = Server(a_status())
    server.counters.refusals.count("not_ready")
    counts = {r: server.value("requests_refused_total", reason=r) for r in REFUSAL_REASONS}
    assert counts == {**dict.fromkeys(REFUSAL_REASONS, 0), "not_ready": 1}


def test_every_cause_of_death_counts_from_the_beginning() -> None:
    """An alert sees the first death as a rise, because its series was there at 0 before."""
    server = Server(a_fresh_status())
    counts = {c: server.value("engine_deaths_total", cause=c) for c in DEATH_CAUSES}
    assert counts == dict.fromkeys(DEATH_CAUSES, 0)
    server.counters.engine_deaths.count("stall")
    server.counters.engine_deaths.count("stall")
    server.counters.engine_deaths.count("core_exit")
    counts = {c: server.value("engine_deaths_total", cause=c) for c in DEATH_CAUSES}
    assert counts == {**dict.fromkeys(DEATH_CAUSES, 0), "stall": 2, "core_exit": 1}


def test_planned_restarts_count_by_what_was_reached() -> None:
    """Each reason counts from the first scrape on."""
    server = Server(a_fresh_status())
    server.counters.recycles.count("age")
    counts = {r: server.value("engine_recycles_total", reason=r) for r in RECYCLE_REASONS}
    assert counts == {**dict.fromkeys(RECYCLE_REASONS, 0), "age": 1}


@pytest.mark.parametrize("has_log_stats", [None, False, True])
def test_a_server_says_whether_vllm_reports(*, has_log_stats: bool | None) -> None:
    """As soon as it is known: an alert on vLLM's series tells by it why there are none."""
    server = Server(a_fresh_status())
    server.has_log_stats = has_log_stats
    assert server.value("log_stats") == has_log_stats


def grown(times: int, **differences: Any) -> RankStats:
    """A rank that has grown after the lock."""
    return a_rank(growths={"warmup": 2, "sealed": 0, "locked": times}, **differences)


def test_what_grows_after_the_probe_was_not_proven() -> None:
    """Whether a scrape came between READY and the growth or not."""
    server = Server(a_status(ranks=(grown(1),)))
    server.counters.totals.probe_ran(a_probe(), server.status.ranks)
    labels = {"engine": "0", "rank": "0"}
    assert server.value("workspace_unproven_growths", **labels) == 0
    server.status = a_status(ranks=(grown(3),))
    assert server.value("workspace_unproven_growths", **labels) == 2
    server.counters.totals.probe_ran(a_probe(), server.status.ranks)
    assert server.value("workspace_unproven_growths", **labels) == 0


def test_what_grew_is_gone_with_its_engine() -> None:
    """The next one has reserved what the last one learned, and what it grows itself counts."""
    server = Server(a_status(ranks=(grown(1),)))
    server.counters.totals.probe_ran(a_probe(), server.status.ranks)
    server.status = a_status(State.RECOVERING, ranks=(grown(3),), has_engine=False)
    labels = {"engine": "0", "rank": "0"}
    assert server.value("workspace_unproven_growths", **labels) is None
    server.status = a_status(State.PROBING, ranks=(grown(1, generation=2),))
    assert server.value("workspace_unproven_growths", **labels) == 1


MEMORY_HELD = {
    "workspace_size_bytes",
    "workspace_reserved_bytes",
    "workspace_high_water_bytes",
    "workspace_retired_bytes",
    "workspace_persistent_bytes",
    "lamport_workspace_bytes",
    "memory_bytes",
}


def rank_names(server: Server) -> set[str]:
    """The metrics of ranks on the page."""
    return {metric.name for metric in RANK_METRICS} & {
        name.removeprefix("holdfast_") for name in server.names()
    }


def test_an_engine_that_sleeps_holds_no_memory() -> None:
    """What it has released is not shown as if it were in use; it is still locked."""
    refusing = a_rank(last_rejection=REJECTION)
    awake = rank_names(Server(a_status(ranks=(refusing,))))
    asleep = rank_names(Server(a_status(State.SLEEPING, ranks=(refusing,))))
    assert awake - asleep == MEMORY_HELD


def test_a_dead_engine_holds_nothing_and_is_not_locked() -> None:
    """What it refused last and who asked for most is what people look for after its death."""
    refusing = a_rank(last_rejection=REJECTION)
    alive = rank_names(Server(a_status(ranks=(refusing,))))
    dead = Server(a_status(State.RECOVERING, ranks=(refusing,), has_engine=False))
    assert alive - rank_names(dead) == MEMORY_HELD | {"workspace_locked"}


def test_host_memory_has_a_series_while_there_is_an_engine() -> None:
    """Between two engines nothing is measured."""
    server = Server(a_status())
    assert server.value("engine_host_memory_bytes") is None
    server.host_memory_bytes = 3 * MIB
    assert server.value("engine_host_memory_bytes") == 3 * MIB


def test_every_action_for_lack_of_memory_counts_from_the_beginning() -> None:
    """Actions that were never taken are 0, not absent."""
    server = Server(a_fresh_status())
    server.counters.memory_actions.count("give_up")
    counts = {a: server.value("host_memory_actions_total", action=a) for a in MEMORY_ACTIONS}
    assert counts == {**dict.fromkeys(MEMORY_ACTIONS, 0), "give_up": 1}


def test_a_kernel_without_pressure_information_has_no_pressure() -> None:
    """What is left is known all the same."""
    server = Server(a_status())
    server.host_memory = HostMemory(MIB, 2 * MIB, None)
    assert server.value("host_memory_available_bytes") == MIB
    assert server.value("host_memory_pressure_ratio") is None


def test_every_reason_of_a_loss_counts_from_the_beginning() -> None:
    """Reasons that have met no request yet are 0, not absent."""
    server = Server(a_status())
    server.requests = RequestCounts(lost={"stream_broken": 2})
    counts = {r: server.value("requests_lost_total", reason=r) for r in LOSS_REASONS}
    assert counts == {**dict.fromkeys(LOSS_REASONS, 0), "stream_broken": 2}


@pytest.mark.parametrize("broken", TOOL_CALL_DEFECTS)
def test_every_defect_of_a_tool_call_counts_from_the_beginning(broken: ToolCallDefect) -> None:
    """Each call counts once, and a broken one under its defect, too."""
    server = Server(a_status())
    names = {
        name: server.value("broken_tool_calls_total", reason=name) for name in TOOL_CALL_DEFECTS
    }
    assert names == dict.fromkeys(TOOL_CALL_DEFECTS, 0)
    assert server.value("tool_calls_total") == 0
    for defect in (None, broken, None):
        server.counters.tool_calls.count(defect)
    assert server.value("tool_calls_total") == 3
    for name in TOOL_CALL_DEFECTS:
        counted = server.value("broken_tool_calls_total", reason=name)
        assert counted == (1 if name == broken else 0)


def test_each_comparison_with_the_baseline_has_its_result() -> None:
    """Whether it agreed, how far it differed, and how long ago; none before the first."""
    server = Server(a_status())
    assert server.value("baseline_configured") == 1
    assert server.value("baseline_agreement", check="canary") is None
    now_seconds = time.monotonic()
    server.compared = {
        "probe": BaselineComparison(True, 0.25, now_seconds - 90),
        "canary": BaselineComparison(False, math.inf, now_seconds),
    }
    assert server.value("baseline_agreement", check="probe") == 1
    assert server.value("baseline_agreement", check="canary") == 0
    assert server.value("baseline_worst_difference_nats", check="probe") == 0.25
    assert server.value("baseline_worst_difference_nats", check="canary") == math.inf
    age_seconds = server.value("baseline_comparison_age_seconds", check="probe")
    assert age_seconds is not None
    assert age_seconds >= 90


def test_what_a_recovery_costs_is_counted() -> None:
    """Replayed, continued and held requests, and the restarts that are left."""
    server = Server(a_status(State.RECOVERING))
    server.requests = RequestCounts(held=6, waiting=7, replayed=4, continued=3)
    server.restarts_left = 2
    assert server.value("requests_held") == 6
    assert server.value("requests_waiting") == 7
    assert server.value("ready") == 0
    assert server.value("requests_replayed_total") == 4
    assert server.value("requests_continued_total") == 3
    assert server.value("engine_restarts_left") == 2


def test_a_wait_stands_in_each_bucket_that_it_fits_in() -> None:
    """And in the sum of all."""
    server = Server(a_status())
    for seconds in (0.0, 3.0, 1000.0):
        server.waits.observe(seconds)
    counts = {
        bound: server.value("request_wait_seconds_bucket", le=bound)
        for bound in (*map(str, WAIT_BOUNDS_SECONDS), "+Inf")
    }
    assert counts["+Inf"] == 3
    assert {bound for bound, count in counts.items() if count == 1} == {
        str(bound) for bound in WAIT_BOUNDS_SECONDS if bound < 3
    }
    assert server.value("request_wait_seconds_sum") == 1003.0


def test_the_lag_of_the_loop_is_shown() -> None:
    """The page has what was measured, in seconds."""
    assert Server(a_status()).value("event_loop_lag_seconds") == 0.02


def test_the_age_is_that_of_the_newest_step() -> None:
    """An idle rank next to a busy one does not make the engine look stuck."""
    ranks = [a_rank(last_step_ended_seconds=end) for end in (None, 900.0, 1000.0)]
    assert last_step_age_seconds(ranks, 1003.0) == 3.0


def test_no_step_has_no_age() -> None:
    """Before the first step the age is unknown."""
    assert last_step_age_seconds([a_rank(last_step_ended_seconds=None)], 1003.0) is None


def test_counters_rise_over_generations() -> None:
    """A new generation starts at zero, and the page continues from where it was."""
    server = Server(a_status(ranks=(a_rank(steps=10),)))
    assert server.value("engine_steps_total", engine="0", rank="0") == 10
    server.status = a_status(ranks=(a_rank(generation=2, steps=1),))
    assert server.value("engine_steps_total", engine="0", rank="0") == 11


def test_counters_stay_while_there_is_no_engine() -> None:
    """Between two generations, when no rank reports, the totals are still on the page."""
    server = Server(a_status(ranks=(a_rank(steps=10),)))
    assert server.value("engine_steps_total", engine="0", rank="0") == 10
    server.status = a_status(State.RECOVERING, ranks=())
    assert server.value("engine_steps_total", engine="0", rank="0") == 10


def test_the_last_words_of_a_dying_generation_are_kept_without_a_scrape() -> None:
    """A rejection that killed the engine is on the page, although no scrape came in between."""
    server = Server(a_status())
    dying = a_rank(rejections={"scratch": 1, "persistent": 0, "permute": 0})
    server.counters.totals.absorb([dying])
    server.status = a_status(ranks=(a_rank(generation=2),))
    labels = {"engine": "0", "rank": "0", "kind": "scratch"}
    assert server.value("workspace_growth_rejections_total", **labels) == 1


def test_one_page_holds_both_registries() -> None:
    """Our families and those of another registry are on the same page."""
    other = CollectorRegistry()
    Counter("vllm:prompt_tokens", "Tokens.", registry=other).inc(7)
    page = render([Server(a_status()).registry, other])
    names = {found.name for found in text_string_to_metric_families(page.decode())}
    assert {"vllm:prompt_tokens", "holdfast_state"} <= names


def test_openmetrics_is_spoken_when_asked_for() -> None:
    """The page of many registries is one valid OpenMetrics exposition, with one end."""
    other = CollectorRegistry()
    Counter("vllm:prompt_tokens", "Tokens.", registry=other).inc(7)
    accept = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;q=0.3"
    page_format = format_for(accept)
    page = render([Server(a_status()).registry, other], page_format)
    parsed = openmetrics_families(page.decode())  # type: ignore[no-untyped-call]
    names = {found.name for found in parsed}
    assert {"vllm:prompt_tokens", "holdfast_build_info"} <= names
    assert page_format.content_type.startswith("application/openmetrics-text")


def test_a_caller_with_odd_characters_stays_one_label() -> None:
    """Quotes, backslashes and line ends of a caller's name are escaped."""
    caller = 'x"\\\n.py:1:f'
    page = render([Server(a_status(ranks=(a_rank(callers={caller: 1}),))).registry])
    families = text_string_to_metric_families(page.decode())
    callers = [s.labels["caller"] for f in families for s in f.samples if "caller" in s.labels]
    assert callers == [caller]


OF_PROCESS = {
    "process_cpu_seconds",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_virtual_memory_bytes",
}


def test_multi_process_mode_reads_the_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """With a multi-process directory, vLLM's metrics are read from there each time."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert vllm_registry() is not vllm_registry()
    page = render([vllm_registry()]).decode()
    assert {found.name for found in text_string_to_metric_families(page)} == OF_PROCESS


def test_the_page_has_what_alerts_ask_of_the_process() -> None:
    """The same families as in multi-process mode, whose files have none of them."""
    page = render([vllm_registry()]).decode()
    assert {found.name for found in text_string_to_metric_families(page)} >= OF_PROCESS


def test_multi_process_mode_shows_each_family_once(tmp_path: Path) -> None:
    """Our counters are in those files too, and on the page with their own help."""
    program = (
        "from test_collector import Server, a_status, render, vllm_registry; "
        "server = Server(a_status()); server.counters.refusals.count('not_ready'); "
        "print(render([server.registry, vllm_registry()]).decode())"
    )
    page = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    lines = page.splitlines()
    types = [line for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    assert 'holdfast_requests_refused_total{reason="not_ready"} 1.0' in lines
    help_text = BY_NAME["requests_refused_total"].help
    assert f"# HELP holdfast_requests_refused_total {help_text}" in lines


def test_a_broken_file_of_keys_is_shown_by_its_ring() -> None:
    """The other is 0, because it is known to be valid."""
    server = Server(a_status())
    assert server.value("key_file_broken", ring="api") == 1
    assert server.value("key_file_broken", ring="admin") == 0


def a_follower(**differences: Any) -> FollowerStatus:
    """A follower that runs one rank of generation 7."""
    status = FollowerStatus("b", "running", "h:1", True, generation=7, ranks=(a_rank(rank=1),))
    return replace(status, **differences)


def of_follower(status: FollowerStatus) -> CollectorRegistry:
    """The registry of a follower whose ranks have been counted."""
    totals = Totals()
    totals.absorb(status.ranks)
    collector = FollowerCollector(lambda: status, totals, version="0.1.0", vllm_version="0.32.0")
    return OwnRegistry(collector)


def test_a_follower_shows_its_ranks_and_its_own_metrics() -> None:
    """Exactly those of the two tables, and what it runs."""
    status = a_follower(ranks=(a_rank(rank=1, last_rejection=REJECTION),))
    page = render([of_follower(status)]).decode()
    emitted = {name_of(found) for found in text_string_to_metric_families(page)}
    tables = {metric.name for metric in (*RANK_METRICS, *FOLLOWER_METRICS)}
    assert emitted == tables | {"build_info"}


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_follower_says_whether_it_has_its_head(*, is_connected: bool) -> None:
    """And which generation it runs, 0 if none."""
    registry = of_follower(a_follower(is_connected=is_connected))
    assert registry.get_sample_value("holdfast_node_head_connected") == is_connected
    assert registry.get_sample_value("holdfast_node_generation") == 7
    waiting = of_follower(a_follower(state="waiting", generation=0, ranks=()))
    assert waiting.get_sample_value("holdfast_node_generation") == 0
    locked = "holdfast_workspace_locked", {"engine": "0", "rank": "1"}
    assert registry.get_sample_value(*locked) == 1
    assert waiting.get_sample_value(*locked) is None
