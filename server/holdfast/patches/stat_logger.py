"""Keeps vLLM's own metrics across all generations of the engine, without the probe's traffic.

vLLM makes one logger per engine, whose constructor unregisters every `vllm:` metric before it
creates them again (0.32, 0.33). Here the logger of each generation writes to the metrics of the
first, so counters and histograms never start again at 0.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.metrics import loggers
from vllm.v1.metrics.loggers import PrometheusStatLogger

from holdfast.telemetry.load import SchedulerReport

_Kind: TypeAlias = type[Counter] | type[Gauge] | type[Histogram]
_KINDS: tuple[_Kind, ...] = (Counter, Gauge, Histogram)
_HOOK_SUFFIX = "_cls"
_INFO_SUFFIX = "_info"


STALE_SECONDS = 10.0
"""The age at which a report is stale: a scheduler that defers requests reports in every cycle."""


class Queues:
    """What the scheduler of each engine last reported."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_engine: dict[int, SchedulerReport] = {}
        self._blocked_since: dict[int, float] = {}
        self._deferring_since: dict[int, float] = {}
        self._updated_seconds: dict[int, float] = {}

    def update(self, engine: int, report: SchedulerReport, *, has_answered: bool = False) -> None:
        """Record a scheduler's report, and whether the step that it ends has answered a request.

        What a step finishes runs no longer: of a pooling model, that may be all of it.
        """
        now = self._updated_seconds[engine] = self._clock()
        self._by_engine[engine] = report
        if report.waiting and not report.running and not has_answered:
            self._blocked_since.setdefault(engine, now)
        else:
            self._blocked_since.pop(engine, None)
        if report.deferred and not report.running and not report.waiting:
            self._deferring_since.setdefault(engine, now)
        else:
            self._deferring_since.pop(engine, None)

    def clear(self) -> None:
        """Forget all reports: the engine is gone."""
        self._by_engine.clear()
        self._blocked_since.clear()
        self._deferring_since.clear()
        self._updated_seconds.clear()

    def kv_used(self) -> Mapping[int, float]:
        """Return the share of each engine's KV cache that is in use, from 0 to 1."""
        reports = tuple(self._by_engine.items())
        return {engine: one.kv_usage for engine, one in reports if one.kv_usage is not None}

    def blocked_since_seconds(self) -> Mapping[int, float]:
        """Return since when, in each such engine, requests have been waiting while none runs.

        vLLM does not count deferred requests as waiting.
        """
        return dict(self._blocked_since)

    def deferring(self) -> frozenset[int]:
        """Return the engines whose scheduler currently reports only deferred requests."""
        oldest = self._clock() - STALE_SECONDS
        return frozenset(
            one for one in self._deferring_since if self._updated_seconds[one] >= oldest
        )

    def totals(self) -> tuple[int, int]:
        """Return the running and the waiting requests over all engines."""
        reports = tuple(self._by_engine.values())
        return sum(one.running for one in reports), sum(one.waiting for one in reports)

    def reports(self, engines: int) -> tuple[SchedulerReport, ...]:
        """Return the report of each of the first `engines` engines. Any thread may ask."""
        return tuple(self._by_engine.get(index, SchedulerReport()) for index in range(engines))


class LastingMetrics:
    """The metrics of vLLM's loggers, each created once. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[str, Any] = {}

    def maker(self, kind: _Kind) -> Callable[..., Any]:
        """Return a replacement for a metric's class that returns the existing metric of a name.

        The first metric is kept as it is: a histogram, whose buckets follow `max_model_len`, cannot
        change them and keep its counts.
        """

        def make(name: str, *arguments: Any, **options: Any) -> Any:
            with self._lock:
                if name not in self._made:
                    self._made[name] = kind(name, *arguments, **options)
                return self._made[name]

        return make

    def reset_gauges(self) -> None:
        """Reset what is true only of a running engine: gauges become 0, info metrics disappear."""
        with self._lock:
            made = [(name, made) for name, made in self._made.items() if isinstance(made, Gauge)]
        for name, gauge in made:
            _zero(gauge)
            # An info metric is its labels. Files of multi-process mode keep them, at 0.
            if name.endswith(_INFO_SUFFIX) and not _is_multi_process():
                gauge.clear()


@dataclass(slots=True)
class _Shared:
    """What the loggers of all generations of one server share."""

    metrics: LastingMetrics
    queues: Queues
    is_probing: Callable[[], bool]
    newest: LastingStatLogger | None = None


class LastingStatLogger(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is Any
    """The logger of one generation; `prometheus_logger` makes the class to pass to an engine."""

    shared: ClassVar[_Shared]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # The previous generation may have failed to start after it made a logger.
        self.generation_ended()
        with _nothing_unregistered():
            super().__init__(*arguments, **options)
        self.shared.newest = self

    @classmethod
    def generation_ended(cls) -> None:
        """Reset what is true only of a running engine, and ignore further reports of this one.

        vLLM's task that reads from a dead engine continues until its shutdown, and would restore
        the lengths of its queues.
        """
        cls.shared.newest = None
        cls.shared.queues.clear()
        cls.shared.metrics.reset_gauges()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        *arguments: Any,
        engine_idx: int = 0,
        **options: Any,
    ) -> None:
        """Record users' requests; nothing while only the probe or a canary is admitted."""
        if self.shared.newest is not self:
            return
        if scheduler_stats is not None:
            self.shared.queues.update(
                engine_idx, _report(scheduler_stats), has_answered=iteration_stats is not None
            )
        if not self.shared.is_probing():
            super().record(
                scheduler_stats, iteration_stats, *arguments, engine_idx=engine_idx, **options
            )
            if self.gauge_lora_info is not None and not _is_multi_process():
                _keep_newest(self.gauge_lora_info)


def prometheus_logger(is_probing: Callable[[], bool], queues: Queues) -> type[LastingStatLogger]:
    """Return a class for `AsyncLLM(stat_loggers=[...])` that replaces vLLM's default one.

    Pass the same class to all generations of a server, and call its `generation_ended` after each.
    """
    metrics = LastingMetrics()
    hooks = _hooks(PrometheusStatLogger, metrics)
    members = {**hooks, "shared": _Shared(metrics, queues, is_probing)}
    return type("LastingStatLogger", (LastingStatLogger,), members)


def _report(stats: Any) -> SchedulerReport:
    return SchedulerReport(
        stats.num_running_reqs,
        stats.num_waiting_reqs,
        stats.num_skipped_waiting_reqs,
        stats.kv_cache_usage,
        _in_use(stats.running_lora_adapters),
        _in_use(stats.waiting_lora_adapters),
    )


def _in_use(adapters: Mapping[str, int]) -> frozenset[str]:
    return frozenset(name for name, requests in adapters.items() if requests)


def _hooks(owner: type, metrics: LastingMetrics) -> dict[str, Any]:
    """Return replacements for the attributes with which vLLM's class names its metrics' classes."""
    names = (name for name in dir(owner) if name.endswith(_HOOK_SUFFIX))
    return {name: _hook(getattr(owner, name), metrics) for name in names}


def _hook(made: Any, metrics: LastingMetrics) -> Any:
    if made in _KINDS:
        return staticmethod(metrics.maker(made))
    return type(made.__name__, (made,), _hooks(made, metrics))


def _keep_newest(gauge: Gauge) -> None:
    """Remove all series but the newest of a gauge whose values are times.

    vLLM never removes any, and each order in which requests name adapters makes another.
    """
    samples = [sample for family in gauge.collect() for sample in family.samples]
    for sample in sorted(samples, key=lambda one: one.value)[:-1]:
        gauge.remove(*sample.labels.values())


def _zero(gauge: Gauge) -> None:
    for family in gauge.collect():
        for sample in family.samples:
            (gauge.labels(**sample.labels) if sample.labels else gauge).set(0)


def _is_multi_process() -> bool:
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ


@contextmanager
def _nothing_unregistered() -> Iterator[None]:
    """While entered, keep all metrics registered: ours, and those of vLLM's parsers and routes."""
    original = loggers.unregister_vllm_metrics
    loggers.unregister_vllm_metrics = lambda: None
    try:
        yield
    finally:
        loggers.unregister_vllm_metrics = original
