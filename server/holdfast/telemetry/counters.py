"""Counters that never decrease: what the front end counts itself, and what ranks counted.

prometheus_client would register these metrics in its global registry, which vLLM clears. So they
are in no registry: `HoldfastCollector` collects them. Any thread may count and read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import add
from typing import Generic, Literal, TypeVar

from prometheus_client import Counter, Histogram
from prometheus_client import Metric as Family

from holdfast.labels import (
    DEATH_CAUSES,
    MEMORY_ACTIONS,
    NODE_REFUSAL_REASONS,
    RECYCLE_REASONS,
    REFUSAL_REASONS,
    TOOL_CALL_DEFECTS,
    DeathCause,
    MemoryAction,
    NodeRefusalReason,
    RecycleReason,
    RefusalReason,
    ToolCallDefect,
)
from holdfast.records import ProbeReport, RankStats
from holdfast.telemetry.metrics import BY_NAME, RANK_METRICS, Labels

Label = TypeVar("Label", bound=str)
RankCounts = Mapping[str, Mapping[Labels, float]]
"""The counters of one rank: the name of the metric, and its values by their labels."""
ProbeRunResult = Literal["passed", "failed"]
PROBE_RESULTS: tuple[ProbeRunResult, ...] = ("passed", "failed")

WAIT_BOUNDS_SECONDS = (
    *(0.01, 0.04, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
"""They range from a wait that no user notices to one that hardly any client sits out. vLLM's
histogram of the time to the first token has each of them, so both can be queried at one bound."""


_RANK_COUNTERS = tuple(metric for metric in RANK_METRICS if metric.kind == "counter")


class _Counts(Generic[Label]):
    """Counts by one label, with a closed set of values.

    All series are exported from the first scrape on: an alert sees no increase in a series that
    begins at 1.
    """

    def __init__(self, name: str, labels: Iterable[Label]) -> None:
        metric = BY_NAME[name]
        self.counter = Counter(metric.full_name, metric.help, metric.labels, registry=None)
        for label in labels:
            self.counter.labels(label)

    def count(self, label: Label) -> None:
        """Add one to the count of `label`."""
        self.counter.labels(label).inc()

    def counts(self) -> Mapping[str, int]:
        """Return the counts that are not 0."""
        samples = (sample for family in self.counter.collect() for sample in family.samples)
        return {
            label: int(sample.value)
            for sample in samples
            if sample.value and sample.name.endswith("_total")
            for label in sample.labels.values()
        }


class Refusals(_Counts[RefusalReason]):
    """Requests and connections that were refused, by reason."""

    def __init__(self) -> None:
        super().__init__("requests_refused_total", REFUSAL_REASONS)


class NodeRefusals(_Counts[NodeRefusalReason]):
    """Connections to the node port that were refused, by reason."""

    def __init__(self) -> None:
        super().__init__("node_connections_refused_total", NODE_REFUSAL_REASONS)


class EngineDeaths(_Counts[DeathCause]):
    """Deaths of the engine in all generations, by cause."""

    def __init__(self) -> None:
        super().__init__("engine_deaths_total", DEATH_CAUSES)


class Recycles(_Counts[RecycleReason]):
    """Planned restarts of the engine, by the limit that it had reached."""

    def __init__(self) -> None:
        super().__init__("engine_recycles_total", RECYCLE_REASONS)


class MemoryActions(_Counts[MemoryAction]):
    """What was done because the host was short of memory."""

    def __init__(self) -> None:
        super().__init__("host_memory_actions_total", MEMORY_ACTIONS)


class ToolCalls:
    """Tool calls of the model, and the broken ones by their defect."""

    def __init__(self) -> None:
        metric = BY_NAME["tool_calls_total"]
        self.counter = Counter(metric.full_name, metric.help, registry=None)
        self.broken = _Counts[ToolCallDefect]("broken_tool_calls_total", TOOL_CALL_DEFECTS)

    def count(self, defect: ToolCallDefect | None) -> None:
        """Count one call, and its defect if it has one."""
        self.counter.inc()
        if defect is not None:
            self.broken.count(defect)

    def collect(self) -> Iterator[Family]:
        """Yield both families."""
        yield from self.counter.collect()
        yield from self.broken.counter.collect()


def request_waits() -> Histogram:
    """Return a histogram of the time that requests waited in the front end, which may be 0."""
    metric = BY_NAME["request_wait_seconds"]
    return Histogram(metric.full_name, metric.help, buckets=WAIT_BOUNDS_SECONDS, registry=None)


@dataclass(frozen=True, slots=True)
class _Lives:
    """The generations of one rank: the sum of the ended ones, and the newest one seen."""

    earlier: RankCounts
    generation: int
    newest: RankCounts


class Totals:
    """What ranks and the probe counted, over all generations of the engine.

    The counters of a rank start at zero with each generation, because a new worker writes a new
    file. So the totals of earlier generations are kept here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lives: dict[tuple[int, int], _Lives] = {}
        self._probe_runs: dict[ProbeRunResult, int] = dict.fromkeys(PROBE_RESULTS, 0)
        self._probed_growths: dict[tuple[int, int, int], int] = {}
        """How often each rank had grown after the lock when the last probe ended."""

    def absorb(self, ranks: Iterable[RankStats]) -> None:
        """Add what the ranks wrote; repeated values and late, older ones add nothing.

        The owner of the engine calls this when a generation ends, since the last values of a dying
        generation would be lost if no scrape came between its death and the next start.
        """
        with self._lock:
            for rank in ranks:
                key = (rank.engine, rank.rank)
                self._lives[key] = _after(self._lives.get(key), rank)

    def probe_ran(self, report: ProbeReport, ranks: Iterable[RankStats] = ()) -> None:
        """Count one finished run of the probe, and remember what had grown on the ranks by then."""
        with self._lock:
            self._probe_runs["passed" if report.passed else "failed"] += 1
            self._probed_growths = {_life_of(rank): rank.growths["locked"] for rank in ranks}

    def unproven_growths(self, ranks: Iterable[RankStats]) -> Mapping[tuple[int, int], int]:
        """Return how often each rank has grown after the lock since the probe of its engine."""
        with self._lock:
            probed = self._probed_growths
        return {
            (rank.engine, rank.rank): rank.growths["locked"] - probed.get(_life_of(rank), 0)
            for rank in ranks
        }

    def ranks(self) -> Mapping[tuple[int, int], RankCounts]:
        """Return the totals by (engine, rank), for every rank ever seen."""
        with self._lock:
            lives = sorted(self._lives.items())
        return {key: _each(add, life.earlier, life.newest) for key, life in lives}

    def probe_runs(self) -> Mapping[ProbeRunResult, int]:
        """Return how often the probe ended with each result."""
        with self._lock:
            return dict(self._probe_runs)


@dataclass(frozen=True, slots=True)
class Counters:
    """Everything that one server counts, from its start to its end."""

    totals: Totals = field(default_factory=Totals)
    engine_deaths: EngineDeaths = field(default_factory=EngineDeaths)
    recycles: Recycles = field(default_factory=Recycles)
    refusals: Refusals = field(default_factory=Refusals)
    node_refusals: NodeRefusals = field(default_factory=NodeRefusals)
    tool_calls: ToolCalls = field(default_factory=ToolCalls)
    memory_actions: MemoryActions = field(default_factory=MemoryActions)


def _life_of(rank: RankStats) -> tuple[int, int, int]:
    return rank.engine, rank.rank, rank.generation


def _after(known: _Lives | None, rank: RankStats) -> _Lives:
    seen = {metric.name: metric.values(rank) for metric in _RANK_COUNTERS}
    if known is None:
        return _Lives({name: {} for name in seen}, rank.generation, seen)
    if rank.generation < known.generation:
        return known
    if rank.generation == known.generation:
        return _Lives(known.earlier, known.generation, _each(max, known.newest, seen))
    return _Lives(_each(add, known.earlier, known.newest), rank.generation, seen)


def _each(
    join: Callable[[float, float], float], left: RankCounts, right: RankCounts
) -> dict[str, Mapping[Labels, float]]:
    """Join each counter of both; one that is missing counts as 0."""
    return {
        name: {
            labels: join(left[name].get(labels, 0), right[name].get(labels, 0))
            for labels in {**left[name], **right[name]}
        }
        for name in right
    }
