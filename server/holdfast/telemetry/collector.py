"""From the status of the server to Prometheus families, built at each scrape.

A value that is not known has no series: a zero would claim that it was measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.labels import LOSS_REASONS, BaselineCheck, LossReason
from holdfast.lifecycle.states import SERVING, State
from holdfast.records import (
    BaselineComparison,
    FollowerStatus,
    HostMemory,
    ProbeReport,
    RankStats,
    Status,
)
from holdfast.telemetry.counters import (
    Counters,
    Label,
    NodeRefusals,
    Totals,
)
from holdfast.telemetry.key_usage import Used
from holdfast.telemetry.metrics import BY_NAME, RANK_METRICS

Comparisons = Mapping[BaselineCheck, BaselineComparison]
Samples = Iterable[tuple[tuple[object, ...], float]]


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """The requests in progress, and what the deaths of engines did to requests."""

    in_flight: int = 0
    """Requests admitted and not fully answered yet."""
    held: int = 0
    """Requests that wait in the front end, for capacity in the engine or its next generation."""
    waiting: int = 0
    """The held requests, and those that wait in vLLM's schedulers."""
    replayed: int = 0
    """Requests that were replayed on a later generation."""
    continued: int = 0
    """Streams that a later generation went on with."""
    lost: Mapping[LossReason, int] = field(default_factory=dict)
    """Requests that failed because an engine died; an absent reason counts as 0."""


class HoldfastCollector(Collector):
    """Collects all families of `telemetry.metrics`. One scrape reads the status once.

    Every source is read in the thread of the scrape.
    """

    def __init__(  # noqa: PLR0913 - every source of a number on the page
        self,
        status: Callable[[], Status],
        *,
        counters: Counters,
        requests: Callable[[], RequestCounts],
        waits: Histogram,
        restarts_left: Callable[[], int],
        loop_lag_seconds: Callable[[], float],
        host_memory_bytes: Callable[[], int | None] = lambda: None,
        host_memory: Callable[[], HostMemory | None],
        broken_key_files: Callable[[], Mapping[str, bool]] = dict,
        key_usage: Callable[[], Mapping[str, Used]] = dict,
        baseline: Callable[[], Comparisons] | None = None,
        has_log_stats: Callable[[], bool | None] = lambda: None,
        version: str,
        vllm_version: str,
    ) -> None:
        self._status = status
        self._counters = counters
        self._requests = requests
        self._waits = waits
        self._restarts_left = restarts_left
        self._loop_lag_seconds = loop_lag_seconds
        self._host_memory_bytes = host_memory_bytes
        self._host_memory = host_memory
        self._broken_key_files = broken_key_files
        self._key_usage = key_usage
        self._baseline = baseline
        self._has_log_stats = has_log_stats
        self._build = (version, vllm_version)

    def collect(self) -> Iterator[Metric]:
        """Yield each family of the table that has a series."""
        status = self._status()
        self._counters.totals.absorb(status.ranks)
        families = (
            *_rank_families(status.ranks, self._counters.totals, over=_over(status)),
            *_unproven_families(status, self._counters.totals),
            _family("probe_runs_total", _by_label(self._counters.totals.probe_runs())),
            *_probe_families(status.probe),
            *_baseline_families(self._baseline),
            *_engine_families(status),
            *_node_families(status, self._counters.node_refusals),
            *self._counters.engine_deaths.counter.collect(),
            *self._counters.recycles.counter.collect(),
            _family("engine_host_memory_bytes", _if_known(self._host_memory_bytes())),
            _family("engine_restarts_left", [((), self._restarts_left())]),
            *_host_memory_families(self._host_memory()),
            *self._counters.memory_actions.counter.collect(),
            _family("key_file_broken", _by_label(self._broken_key_files())),
            _family("log_stats", _if_known(self._has_log_stats())),
            _family("event_loop_lag_seconds", [((), self._loop_lag_seconds())]),
            _family(
                "last_step_age_seconds",
                _if_known(last_step_age_seconds(status.ranks, time.monotonic())),
            ),
            *_request_families(self._requests()),
            *self._waits.collect(),
            *self._counters.refusals.counter.collect(),
            *_key_families(self._key_usage()),
            *self._counters.tool_calls.collect(),
            _family("build_info", [(self._build, 1)]),
        )
        return (family for family in families if family.samples)


class FollowerCollector(Collector):
    """Collects the families of a follower. Both sources are read in the thread of the scrape."""

    def __init__(
        self,
        status: Callable[[], FollowerStatus],
        totals: Totals,
        *,
        version: str,
        vllm_version: str,
    ) -> None:
        """`totals` has absorbed what the ranks wrote."""
        self._status = status
        self._totals = totals
        self._build = (version, vllm_version)

    def collect(self) -> Iterator[Metric]:
        """Yield each family of a follower that has a series."""
        status = self._status()
        families = (
            *_rank_families(status.ranks, self._totals),
            _family("node_head_connected", [((), status.is_connected)]),
            _family("node_generation", [((), status.generation)]),
            _family("build_info", [(self._build, 1)]),
        )
        return (family for family in families if family.samples)


class OwnRegistry(CollectorRegistry):
    """Our own registry, so that vLLM may clear the global one without touching it.

    It omits the creation times of series: in plain text each would be one more family.
    """

    def __init__(self, *collectors: Collector) -> None:
        super().__init__()
        for collector in collectors:
            self.register(collector)

    def collect(self) -> Iterator[Metric]:
        """Yield the families of all collectors."""
        for family in super().collect():
            family.samples = [
                sample for sample in family.samples if not sample.name.endswith("_created")
            ]
            yield family


def last_step_age_seconds(ranks: Iterable[RankStats], now_seconds: float) -> float | None:
    """Return the time since any rank last finished a step; None if none ever did."""
    newest = last_step_seconds(ranks)
    return None if newest is None else max(0.0, now_seconds - newest)


def last_step_seconds(ranks: Iterable[RankStats]) -> float | None:
    """Return when any rank last finished a step; None if none ever did."""
    ends = [rank.last_step_ended_seconds for rank in ranks]
    return max((end for end in ends if end is not None), default=None)


def _family(name: str, samples: Samples) -> Metric:
    metric = BY_NAME[name]
    family_type = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = family_type(metric.full_name, metric.help, labels=metric.labels)
    for labels, value in samples:
        family.add_metric([str(label) for label in labels], value)
    return family


def _by_label(values: Mapping[Label, int]) -> Samples:
    return [((label,), value) for label, value in values.items()]


def holds_memory(status: Status) -> bool:
    """Whether the ranks hold what they have reported: an engine that sleeps has released it."""
    return status.has_engine and status.state != State.SLEEPING


def _over(status: Status) -> Collection[str]:
    """Return which parts of an engine's life are over: values of `RankMetric.shown_until`."""
    if holds_memory(status):
        return ()
    return ("sleep",) if status.has_engine else ("sleep", "end")


def _rank_families(
    ranks: tuple[RankStats, ...], totals: Totals, *, over: Collection[str] = ()
) -> Iterator[Metric]:
    counted = totals.ranks()
    for metric in RANK_METRICS:
        if metric.kind == "counter":
            numbers = [(key, counts[metric.name]) for key, counts in counted.items()]
        elif metric.shown_until in over:
            continue
        else:
            numbers = [((rank.engine, rank.rank), metric.values(rank)) for rank in ranks]
        yield _family(
            metric.name,
            [
                ((*key, *labels), value)
                for key, values in numbers
                for labels, value in values.items()
            ],
        )


def _unproven_families(status: Status, totals: Totals) -> Iterator[Metric]:
    if status.has_engine:
        grown = totals.unproven_growths(status.ranks)
        yield _family("workspace_unproven_growths", list(grown.items()))


def _probe_families(probe: ProbeReport | None) -> Iterator[Metric]:
    if probe is None:
        return
    steps = [((step.name,), step) for step in probe.steps if step.outcome != "skipped"]
    yield _family("probe_passed", [(key, step.outcome == "passed") for key, step in steps])
    yield _family("probe_duration_seconds", [(key, s.duration_seconds) for key, s in steps])
    yield _family("probe_tokens", [(key, step.tokens) for key, step in steps])
    yield _family("probe_proven_tokens", [((), probe.proven_tokens)])
    yield _family("probe_limited", [((), probe.limited)])


def _baseline_families(compared: Callable[[], Comparisons] | None) -> Iterator[Metric]:
    now_seconds = time.monotonic()
    last = [((check,), found) for check, found in compared().items()] if compared else []
    yield _family("baseline_configured", [((), compared is not None)])
    yield _family("baseline_agreement", [(key, found.agrees) for key, found in last])
    yield _family(
        "baseline_worst_difference_nats", [(key, found.worst_nats) for key, found in last]
    )
    yield _family(
        "baseline_comparison_age_seconds",
        [(key, max(0.0, now_seconds - found.compared_seconds)) for key, found in last],
    )


def _engine_families(status: Status) -> Iterator[Metric]:
    engine = status.engine
    yield _family("state", [((state,), state == status.state) for state in State])
    yield _family("ready", [((), status.state in SERVING)])
    yield _family("engine_generation", [((), engine.generation)])
    yield _family("engine_starts_total", [((), engine.starts)])
    if engine.last_start_seconds is not None:
        yield _family("engine_start_duration_seconds", [((), engine.last_start_seconds)])


def _host_memory_families(memory: HostMemory | None) -> Iterator[Metric]:
    if memory is None:
        return
    yield _family("host_memory_available_bytes", [((), memory.available_bytes)])
    if memory.pressure_ratio is not None:
        yield _family("host_memory_pressure_ratio", [((), memory.pressure_ratio)])


def _node_families(status: Status, refusals: NodeRefusals) -> Iterator[Metric]:
    if not status.nodes:
        return
    yield from refusals.counter.collect()
    yield _family("nodes_wanted", [((), status.nodes_wanted)])
    yield _family("node_joined", [((node.name,), node.is_joined) for node in status.nodes])
    yield _family(
        "rank_info", [((*place, node.name), 1) for node in status.nodes for place in node.ranks]
    )


def _request_families(counts: RequestCounts) -> Iterator[Metric]:
    yield _family("requests_in_flight", [((), counts.in_flight)])
    yield _family("requests_held", [((), counts.held)])
    yield _family("requests_waiting", [((), counts.waiting)])
    yield _family("requests_replayed_total", [((), counts.replayed)])
    yield _family("requests_continued_total", [((), counts.continued)])
    # All reasons from the first scrape on: an alert sees no rise in a series that begins at 1.
    lost = {reason: counts.lost.get(reason, 0) for reason in LOSS_REASONS}
    yield _family("requests_lost_total", _by_label(lost))


def _key_families(used: Mapping[str, Used]) -> Iterator[Metric]:
    """Yield families without a series if there are no keys."""
    yield _family("key_requests_total", [((name,), one.requests) for name, one in used.items()])
    yield _family(
        "key_prompt_tokens_total", [((name,), one.prompt_tokens) for name, one in used.items()]
    )
    yield _family(
        "key_output_tokens_total", [((name,), one.output_tokens) for name, one in used.items()]
    )


def _if_known(value: float | None) -> Samples:
    return [] if value is None else [((), value)]
