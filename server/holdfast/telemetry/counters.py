"""What the front end counts itself. Any thread may count and read.

prometheus_client would register these metrics where vLLM removes what it finds, so they are in no
registry: `HoldfastCollector` collects them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from prometheus_client import Counter, Histogram

from holdfast.records import DEATH_CAUSES, REFUSAL_REASONS, DeathCause, RefusalReason
from holdfast.telemetry.metrics import BY_NAME

Word = TypeVar("Word", bound=str)

WAIT_BOUNDS_SECONDS = (
    *(0.01, 0.04, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
"""From what no user notices to what nearly no client waits for. Each is one of vLLM's for the time
to the first token, so that both histograms can be asked at the same bound."""


class _Counts(Generic[Word]):
    """Counts under one label, whose values are a closed set.

    All are exported from the first scrape on: an alert sees no rise in a series that begins at 1.
    """

    def __init__(self, name: str, words: Iterable[Word]) -> None:
        metric = BY_NAME[name]
        self.counter = Counter(metric.full_name, metric.help, metric.labels, registry=None)
        for word in words:
            self.counter.labels(word)

    def count(self, word: Word) -> None:
        """Count one."""
        self.counter.labels(word).inc()


class Refusals(_Counts[RefusalReason]):
    """Requests and connections that were turned away, by reason."""

    def __init__(self) -> None:
        super().__init__("requests_refused_total", REFUSAL_REASONS)


class Outages(_Counts[DeathCause]):
    """Deaths of the engine in all generations, by cause."""

    def __init__(self) -> None:
        super().__init__("engine_deaths_total", DEATH_CAUSES)


def request_waits() -> Histogram:
    """How long requests waited in the front end, 0 for one that did not have to."""
    metric = BY_NAME["request_wait_seconds"]
    return Histogram(metric.full_name, metric.help, buckets=WAIT_BOUNDS_SECONDS, registry=None)
