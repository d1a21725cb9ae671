"""The numbers of a metric of prometheus_client, without a sample for each.

To collect a histogram the library makes three samples and two dictionaries for each bucket, which
is three quarters of a page. Here its values are read as its own `_child_samples` reads them
(prometheus_client 0.26, `metrics.py`). Whatever looks otherwise has no reading, and is collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, metrics
from prometheus_client.registry import Collector

Labels = tuple[tuple[str, ...], ...]
"""The values of the labels of each series, in the order in which they are collected."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one metric holds now."""

    labels: Labels
    numbers: tuple[float, ...]
    """Of its samples, in that order."""


def collectors(registry: Collector) -> tuple[Collector, ...]:
    """What is collected for a registry, part by part; the registry itself where that is unknown."""
    if not isinstance(registry, CollectorRegistry) or registry.get_target_info():
        return (registry,)
    parts: Mapping[Collector, object] = getattr(registry, "_collector_to_names", {registry: ()})
    return tuple(parts)


def reading(collector: Collector) -> Reading | None:
    """The numbers of a counter, a gauge or a histogram; None for all else, and with exemplars."""
    read = _READ.get(type(collector))
    if read is None:
        return None
    try:
        return _read(collector, read)
    except (AttributeError, _UnlikeOthersError):
        return None


class _UnlikeOthersError(Exception):
    """A series has more to tell than its numbers."""


_Read = Callable[[Any], Iterator[float]]


def _read(metric: Any, read: _Read) -> Reading:
    series = {(): metric}
    if metric._is_parent():  # noqa: SLF001 - see above, here and below
        with metric._lock:  # noqa: SLF001
            series = metric._metrics.copy()  # noqa: SLF001
    numbers = tuple(number for child in series.values() for number in _of_child(child, read))
    return Reading(tuple(series), numbers)


def _of_child(child: Any, read: _Read) -> Iterator[float]:
    if "_child_samples" in vars(child):  # `Gauge.set_function`
        raise _UnlikeOthersError
    yield from read(child)
    if metrics._use_created and not isinstance(child, Gauge):  # noqa: SLF001
        yield child._created  # noqa: SLF001


def _value(value: Any) -> float:
    if value.get_exemplar() is not None:
        raise _UnlikeOthersError
    return float(value.get())


def _of_counter(child: Any) -> Iterator[float]:
    yield _value(child._value)  # noqa: SLF001


def _of_gauge(child: Any) -> Iterator[float]:
    yield child._value.get()  # noqa: SLF001


def _of_histogram(child: Any) -> Iterator[float]:
    total = 0.0
    for bucket in child._buckets:  # noqa: SLF001
        total += _value(bucket)
        yield total
    yield total
    if child._upper_bounds[0] >= 0:  # noqa: SLF001
        yield child._sum.get()  # noqa: SLF001


_READ: Mapping[type, _Read] = MappingProxyType(
    {Counter: _of_counter, Gauge: _of_gauge, Histogram: _of_histogram}
)
