"""From the status of the server to Prometheus families, built anew at each scrape.

What is not known has no series: a zero would claim that it was measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from holdfast.lifecycle.states import State
from holdfast.records import (
    GROWTH_PHASES,
    LOSS_REASONS,
    REJECTION_KINDS,
    LossReason,
    ProbeReport,
    RankStats,
    Status,
)
from holdfast.telemetry.metrics import BY_NAME
from holdfast.telemetry.outages import Outages
from holdfast.telemetry.refusals import Refusals
from holdfast.telemetry.totals import Totals
from holdfast.telemetry.waits import Waits

Word = TypeVar("Word", bound=str)
Samples = Iterable[tuple[tuple[object, ...], float]]


class Traffic(Protocol):
    """What the gate counts."""

    @property
    def in_flight(self) -> int:
        """Requests let in and not yet answered whole."""

    @property
    def held(self) -> int:
        """Requests not let in yet, which wait for a place in the engine or for its next one."""

    @property
    def waits(self) -> Waits:
        """How long those that were let in had waited."""


class Calls(Protocol):
    """What the engine proxy counts over all generations. Read from another thread than its own."""

    @property
    def held(self) -> int:
        """Calls of requests in flight that wait for the next generation."""

    @property
    def replayed(self) -> int:
        """Calls that were sent again to a later generation."""

    @property
    def lost(self) -> Mapping[LossReason, int]:
        """Calls that an engine's death cost their answer; a reason that is absent counts as 0."""


class HoldfastCollector(Collector):
    """All families of `telemetry.metrics`. One scrape asks for the status once.

    Everything given is asked in the thread of the scrape. `calls` gives None before vLLM is loaded.
    """

    def __init__(  # noqa: PLR0913 - everybody who knows a number of the page
        self,
        status: Callable[[], Status],
        *,
        totals: Totals,
        traffic: Traffic,
        outages: Outages,
        refusals: Refusals,
        calls: Callable[[], Calls | None],
        restarts_left: Callable[[], int],
        loop_lag_seconds: Callable[[], float],
        broken_key_files: Callable[[], Mapping[str, bool]] = dict,
        version: str,
        vllm_version: str,
    ) -> None:
        self._status = status
        self._totals = totals
        self._traffic = traffic
        self._outages = outages
        self._refusals = refusals
        self._calls = calls
        self._restarts_left = restarts_left
        self._loop_lag_seconds = loop_lag_seconds
        self._broken_key_files = broken_key_files
        self._build = (version, vllm_version)

    def collect(self) -> Iterator[Metric]:
        """Yield each family of the table that has a series."""
        status = self._status()
        self._totals.absorb(status.ranks)
        families = (
            *_workspace_families(status.ranks),
            *_memory_families(status.ranks),
            *_counter_families(self._totals),
            *_probe_families(status.probe),
            *_engine_families(status),
            _family("engine_deaths_total", _labelled(self._outages.deaths)),
            _family("engine_restarts_left", [((), self._restarts_left())]),
            _family("key_file_broken", _labelled(self._broken_key_files())),
            _family("event_loop_lag_seconds", [((), self._loop_lag_seconds())]),
            _family("last_step_age_seconds", _last_step_age(status.ranks)),
            _family("requests_in_flight", [((), self._traffic.in_flight)]),
            *_call_families(self._traffic, self._calls()),
            _histogram("request_wait_seconds", self._traffic.waits),
            _family("requests_refused_total", _labelled(self._refusals.counts)),
            _family("build_info", [(self._build, 1)]),
        )
        return (family for family in families if family.samples)


def registry_of(*collectors: Collector) -> CollectorRegistry:
    """A registry of its own, so that vLLM may clear the global one without touching ours."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return registry


def last_step_age_seconds(ranks: Iterable[RankStats], now_seconds: float) -> float | None:
    """Time since any rank last finished a step; None if none ever did."""
    ends = [rank.last_step_ended_seconds for rank in ranks]
    newest = max((end for end in ends if end is not None), default=None)
    return None if newest is None else max(0.0, now_seconds - newest)


def _family(name: str, samples: Samples) -> Metric:
    metric = BY_NAME[name]
    family_type = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = family_type(metric.full_name, metric.help, labels=metric.labels)
    for labels, value in samples:
        family.add_metric([str(label) for label in labels], value)
    return family


def _histogram(name: str, waits: Waits) -> Metric:
    metric = BY_NAME[name]
    family = HistogramMetricFamily(metric.full_name, metric.help)
    buckets = [(floatToGoString(bound), count) for bound, count in waits.buckets]  # type: ignore[no-untyped-call]  # to text
    family.add_metric([], buckets=buckets, sum_value=waits.sum_seconds)
    return family


def _labelled(values: Mapping[Word, int]) -> Samples:
    return [((label,), value) for label, value in values.items()]


def _workspace_families(ranks: tuple[RankStats, ...]) -> Iterator[Metric]:
    slots = [((r.engine, r.rank, s.ubatch, s.lane), s) for r in ranks for s in r.slots]
    yield _family("workspace_size_bytes", [(key, s.size_bytes) for key, s in slots])
    yield _family("workspace_reserved_bytes", [(key, s.reserved_bytes) for key, s in slots])
    yield _family("workspace_high_water_bytes", [(key, s.high_water_bytes) for key, s in slots])
    keyed = [((r.engine, r.rank), r) for r in ranks]
    yield _family("workspace_retired_bytes", [(key, r.retired_bytes) for key, r in keyed])
    yield _family("workspace_persistent_bytes", [(key, r.persistent_bytes) for key, r in keyed])
    yield _family("workspace_locked", [(key, r.is_locked) for key, r in keyed])
    lamport = [(key, r.lamport_bytes) for key, r in keyed if r.lamport_bytes is not None]
    yield _family("lamport_workspace_bytes", lamport)
    yield _family(
        "workspace_last_rejection_bytes",
        [(key, r.last_rejection.needed_bytes) for key, r in keyed if r.last_rejection],
    )


def _memory_families(ranks: tuple[RankStats, ...]) -> Iterator[Metric]:
    yield _family(
        "workspace_caller_bytes",
        [((r.engine, r.rank, name), size) for r in ranks for name, size in r.callers.items()],
    )
    yield _family(
        "memory_bytes",
        [((r.engine, r.rank, kind), size) for r in ranks for kind, size in r.memory.items()],
    )


def _counter_families(totals: Totals) -> Iterator[Metric]:
    ranks = totals.ranks()
    yield _family(
        "workspace_growths_total",
        [
            ((*key, phase), count)
            for key, counters in ranks.items()
            for phase, count in zip(GROWTH_PHASES, counters.growths, strict=True)
        ],
    )
    yield _family(
        "workspace_growth_rejections_total",
        [
            ((*key, kind), count)
            for key, counters in ranks.items()
            for kind, count in zip(REJECTION_KINDS, counters.rejections, strict=True)
        ],
    )
    yield _family("engine_steps_total", [(key, c.steps) for key, c in ranks.items()])
    yield _family(
        "engine_scheduled_tokens_total", [(key, c.scheduled_tokens) for key, c in ranks.items()]
    )
    runs = totals.probe_runs()
    yield _family("probe_runs_total", [((result,), count) for result, count in runs.items()])


def _probe_families(probe: ProbeReport | None) -> Iterator[Metric]:
    if probe is None:
        return
    steps = [((step.name,), step) for step in probe.steps if step.outcome != "skipped"]
    yield _family("probe_passed", [(key, step.outcome == "passed") for key, step in steps])
    yield _family("probe_duration_seconds", [(key, s.duration_seconds) for key, s in steps])
    yield _family("probe_tokens", [(key, step.tokens) for key, step in steps])
    yield _family("probe_proven_tokens", [((), probe.proven_tokens)])
    yield _family("probe_limited", [((), probe.limited)])


def _engine_families(status: Status) -> Iterator[Metric]:
    engine = status.engine
    yield _family("state", [((state,), state == status.state) for state in State])
    yield _family("engine_generation", [((), engine.generation)])
    yield _family("engine_starts_total", [((), engine.starts)])
    if engine.last_start_seconds is not None:
        yield _family("engine_start_duration_seconds", [((), engine.last_start_seconds)])


def _call_families(traffic: Traffic, calls: Calls | None) -> Iterator[Metric]:
    lost = calls.lost if calls else {}
    yield _family("requests_held", [((), traffic.held + (calls.held if calls else 0))])
    yield _family("requests_replayed_total", [((), calls.replayed if calls else 0)])
    # All reasons from the first scrape on: an alert sees no rise in a series that begins at 1.
    yield _family("requests_lost_total", [((word,), lost.get(word, 0)) for word in LOSS_REASONS])


def _last_step_age(ranks: Iterable[RankStats]) -> Samples:
    age = last_step_age_seconds(ranks, time.monotonic())
    return [] if age is None else [((), age)]
