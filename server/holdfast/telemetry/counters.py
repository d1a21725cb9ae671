"""What the front end counts itself. Any thread may count and read.

prometheus_client would register these metrics in its global registry, which vLLM clears. So they
are in no registry: `HoldfastCollector` collects them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from prometheus_client import Counter, Histogram

from holdfast.records import DEATH_CAUSES, REFUSAL_REASONS, DeathCause, RefusalReason
from holdfast.telemetry.metrics import BY_NAME

Label = TypeVar("Label", bound=str)

WAIT_BOUNDS_SECONDS = (
    *(0.01, 0.04, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
"""They range from a wait that no user notices to one that hardly any client sits out. vLLM's
histogram of the time to the first token has each of them, so both can be queried at one bound."""


class _Counts(Generic[Label]):
    """Counts under one label, whose values are a closed set.

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


class Refusals(_Counts[RefusalReason]):
    """Requests and connections that were refused, by reason."""

    def __init__(self) -> None:
        super().__init__("requests_refused_total", REFUSAL_REASONS)


class EngineDeaths(_Counts[DeathCause]):
    """Deaths of the engine in all generations, by cause."""

    def __init__(self) -> None:
        super().__init__("engine_deaths_total", DEATH_CAUSES)


def request_waits() -> Histogram:
    """Return a histogram of the time that requests waited in the front end, which may be 0."""
    metric = BY_NAME["request_wait_seconds"]
    return Histogram(metric.full_name, metric.help, buckets=WAIT_BOUNDS_SECONDS, registry=None)
