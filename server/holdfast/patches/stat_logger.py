"""vLLM's own metrics: over all generations of the engine, and without the probe's traffic.

vLLM makes one logger for each engine, and its constructor takes every `vllm:` metric off the page
before it makes them anew (0.32, 0.33). Here the logger of each generation writes to the metrics of
the first, so counters and histograms go on where they stood, at any moment of a restart.
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

_Kind: TypeAlias = type[Counter] | type[Gauge] | type[Histogram]
_KINDS: tuple[_Kind, ...] = (Counter, Gauge, Histogram)
_HOOK_SUFFIX = "_cls"
_INFO_SUFFIX = "_info"


NEWS_SECONDS = 10.0
"""What a scheduler said is old after so long: one that defers goes round and says so each time."""


class Queues:
    """Requests that run, wait and are deferred in each engine, as its scheduler last said.

    Deferred is what something else holds back: a grammar, a transfer, an adapter.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_engine: dict[int, tuple[int, int]] = {}
        self._blocked_since: dict[int, float] = {}
        self._deferring_since: dict[int, float] = {}
        self._said_seconds: dict[int, float] = {}

    def said(self, engine: int, running: int, waiting: int, deferred: int = 0) -> None:
        """Take in what a scheduler said."""
        now = self._said_seconds[engine] = self._clock()
        self._by_engine[engine] = (running, waiting)
        if waiting and not running:
            self._blocked_since.setdefault(engine, now)
        else:
            self._blocked_since.pop(engine, None)
        if deferred and not running and not waiting:
            self._deferring_since.setdefault(engine, now)
        else:
            self._deferring_since.pop(engine, None)

    def clear(self) -> None:
        """The engine is gone, and what it had with it."""
        self._by_engine.clear()
        self._blocked_since.clear()
        self._deferring_since.clear()
        self._said_seconds.clear()

    def blocked_since_seconds(self) -> Mapping[int, float]:
        """Since when each engine's scheduler has said that requests wait and none runs.

        What is deferred does not count as waiting in vLLM.
        """
        return dict(self._blocked_since)

    def deferring(self) -> frozenset[int]:
        """The engines whose scheduler says now that it defers all that it has."""
        oldest = self._clock() - NEWS_SECONDS
        return frozenset(one for one in self._deferring_since if self._said_seconds[one] >= oldest)

    def deferring_seconds(self) -> float:
        """For how long nothing but what is deferred has been in any engine; 0 if something is."""
        if any(any(counts) for counts in self._by_engine.values()):
            return 0.0
        return self._clock() - max(self._deferring_since.values(), default=self._clock())

    def totals(self) -> tuple[int, int]:
        """(running, waiting) over all engines."""
        counts = tuple(self._by_engine.values())
        return sum(running for running, _ in counts), sum(waiting for _, waiting in counts)


class LastingMetrics:
    """The metrics of vLLM's loggers, each made once, by name. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[str, Any] = {}

    def maker(self, kind: _Kind) -> Callable[..., Any]:
        """Stands where vLLM names the class of a metric, and hands out the one that is there.

        The first one stays as it was made: a histogram cannot change its buckets, which follow
        `max_model_len`, and keep its counts.
        """

        def make(name: str, *arguments: Any, **options: Any) -> Any:
            with self._lock:
                if name not in self._made:
                    self._made[name] = kind(name, *arguments, **options)
                return self._made[name]

        return make

    def rest(self) -> None:
        """Say of no engine what only holds of one that runs: gauges are 0, facts are gone."""
        with self._lock:
            made = [(name, made) for name, made in self._made.items() if isinstance(made, Gauge)]
        for name, gauge in made:
            _zero(gauge)
            # The labels are the facts. Files of multi-process mode keep them, and they stay at 0.
            if name.endswith(_INFO_SUFFIX) and not _is_multi_process():
                gauge.clear()


@dataclass(slots=True)
class _Shared:
    """What the loggers of all generations of one server have in common."""

    metrics: LastingMetrics
    queues: Queues
    is_probing: Callable[[], bool]
    newest: LastingStatLogger | None = None


class LastingStatLogger(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is Any
    """The logger of one generation; `prometheus_logger` makes the class that an engine is given."""

    shared: ClassVar[_Shared]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # The generation before may have failed to start, after it had a logger.
        self.generation_ended()
        with _nothing_unregistered():
            super().__init__(*arguments, **options)
        self.shared.newest = self

    @classmethod
    def generation_ended(cls) -> None:
        """Zero what only holds of an engine that runs, and take nothing more from the one that did.

        vLLM's task that reads from a dead engine goes on until its shutdown, and would bring the
        length of its queues back.
        """
        cls.shared.newest = None
        cls.shared.queues.clear()
        cls.shared.metrics.rest()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        *arguments: Any,
        engine_idx: int = 0,
        **options: Any,
    ) -> None:
        """Record what users ask for: nothing while the probe or a canary is the only one."""
        if self.shared.newest is not self:
            return
        if scheduler_stats is not None:
            self.shared.queues.said(
                engine_idx,
                scheduler_stats.num_running_reqs,
                scheduler_stats.num_waiting_reqs,
                scheduler_stats.num_skipped_waiting_reqs,
            )
        if not self.shared.is_probing():
            super().record(
                scheduler_stats, iteration_stats, *arguments, engine_idx=engine_idx, **options
            )


def prometheus_logger(is_probing: Callable[[], bool], queues: Queues) -> type[LastingStatLogger]:
    """A class for `AsyncLLM(stat_loggers=[...])`, which takes the place of vLLM's default one.

    All generations of a server are given the same class, whose `generation_ended` is called when
    one is over.
    """
    metrics = LastingMetrics()
    hooks = _hooks(PrometheusStatLogger, metrics)
    members = {**hooks, "shared": _Shared(metrics, queues, is_probing)}
    return type("LastingStatLogger", (LastingStatLogger,), members)


def _hooks(owner: type, metrics: LastingMetrics) -> dict[str, Any]:
    """What replaces the attributes by which vLLM's class names its metrics and its parts."""
    names = (name for name in dir(owner) if name.endswith(_HOOK_SUFFIX))
    return {name: _hook(getattr(owner, name), metrics) for name in names}


def _hook(made: Any, metrics: LastingMetrics) -> Any:
    if made in _KINDS:
        return staticmethod(metrics.maker(made))
    return type(made.__name__, (made,), _hooks(made, metrics))


def _zero(gauge: Gauge) -> None:
    for family in gauge.collect():
        for sample in family.samples:
            (gauge.labels(**sample.labels) if sample.labels else gauge).set(0)


def _is_multi_process() -> bool:
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ


@contextmanager
def _nothing_unregistered() -> Iterator[None]:
    """Keep what is on the page: ours, and what vLLM's parsers and routes count by themselves."""
    original = loggers.unregister_vllm_metrics
    loggers.unregister_vllm_metrics = lambda: None
    try:
        yield
    finally:
        loggers.unregister_vllm_metrics = original
