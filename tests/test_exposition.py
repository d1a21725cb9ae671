from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, Info, Summary
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.telemetry.exposition import CONTENT_TYPES, LONGEST_ACCEPT, Pages, render
from holdfast.telemetry.readings import collectors, reading

FORMATS = (
    "",
    "text/plain;version=1.0.0;escaping=allow-utf-8",
    "application/openmetrics-text;version=1.0.0",
)


class Families(Collector):
    """A registry whose families are what the test puts into it."""

    def __init__(self, *families: Metric) -> None:
        self.families: Iterable[Metric] = families

    def collect(self) -> Iterable[Metric]:
        return self.families


def a_gauge(*values: tuple[str, float], name: str = "a_gauge") -> Metric:
    """A family with one series for each label."""
    family = GaugeMetricFamily(name, "A gauge.", labels=["label"])
    for label, value in values:
        family.add_metric([label], value)
    return family


def assert_same(pages: Pages, *registries: Collector) -> None:
    """The pages are those of the library, in every format."""
    for accept in FORMATS:
        assert pages.render(accept) == render(registries, accept=accept)


def test_pages_are_those_of_the_library_while_numbers_change() -> None:
    """Counters, gauges and histograms with their creation times, over many scrapes."""
    registry = CollectorRegistry()
    counter = Counter("a", "Counts.", ["model"], registry=registry)
    gauge = Gauge("b", "Rises and falls.", registry=registry)
    histogram = Histogram("c_seconds", "Buckets.", ["model"], registry=registry)
    pages = Pages(lambda: (registry,))
    for number in range(1, 8):
        counter.labels(f"model {number % 3}").inc(number * 1e7)
        gauge.set(1.0 / number)
        histogram.labels("one").observe(number)
        assert_same(pages, registry)


def test_metrics_are_read_without_being_collected() -> None:
    """Their classes are the library's private matter: this fails when they are others."""
    registry = CollectorRegistry()
    counter = Counter("a", "Counts.", ["model"], registry=registry)
    counter.labels("one").inc(2)
    Gauge("b", "Rises and falls.", registry=registry).set(3)
    Histogram("c", "Buckets.", ["model"], registry=registry, buckets=(1, 2)).labels("x").observe(1)
    for collector in collectors(registry):
        now = reading(collector)
        assert now is not None
        (family,) = collector.collect()
        assert list(now.numbers) == [sample.value for sample in family.samples]
    assert len(collectors(registry)) == 3


@pytest.mark.parametrize("buckets", [(1, 2), (-1, 1)])
def test_series_of_metrics_may_come_and_go(buckets: tuple[float, ...]) -> None:
    """As many of others, the same in another order, all gone."""
    registry = CollectorRegistry()
    histogram = Histogram("c", "Buckets.", ["model"], registry=registry, buckets=buckets)
    pages = Pages(lambda: (registry,))
    assert_same(pages, registry)
    for come, goes in (("one", None), ("two", "one"), ("one", None), ("two", "two")):
        histogram.labels(come).observe(1)
        if goes:
            histogram.remove(goes)
        assert_same(pages, registry)
    histogram.clear()
    assert_same(pages, registry)


def test_metrics_of_one_name_may_follow_each_other() -> None:
    """A kind that takes the place of another has its own lines, and the old one is let go."""
    registry = CollectorRegistry()
    pages = Pages(lambda: (registry,))
    for kind in (Counter, Gauge):
        metric = kind("a", f"Of {kind.__name__}.", registry=registry)
        metric.inc()
        assert_same(pages, registry)
        registry.unregister(metric)
    gone = weakref.ref(metric)
    del metric
    gc.collect()
    assert gone() is None


def test_what_computes_its_number_is_collected() -> None:
    """A gauge with a function, and metrics that are no counter, gauge or histogram."""
    registry = CollectorRegistry()
    numbers = iter(range(100))
    Gauge("a", "Asks.", registry=registry).set_function(lambda: next(numbers) // len(FORMATS) // 2)
    Summary("b", "Sums.", registry=registry).observe(1)
    Info("c", "Says.", registry=registry).info({"version": "1"})
    Enum("d", "States.", registry=registry, states=["on", "off"]).state("off")
    registry.set_target_info({"env": "test"})
    pages = Pages(lambda: (registry,))
    assert_same(pages, registry)
    registry.set_target_info(None)
    assert_same(pages, registry)


@pytest.mark.parametrize("value", [0, -1.5, 1e300, float("inf"), float("-inf"), float("nan"), True])
def test_every_number_is_written_as_the_library_writes_it(value: float) -> None:
    """Large, infinite, none and boolean."""
    registry = Families(a_gauge(("x", 1.0)))
    pages = Pages(lambda: (registry,))
    assert_same(pages, registry)
    registry.families = [a_gauge(("x", value))]
    assert_same(pages, registry)


@pytest.mark.parametrize("label", ['x"\\\n.py', "a b 1.0", "# HELP", "\u2028\x0b\x1c\x85\r", "ü"])
def test_odd_labels_stay_as_they_are(label: str) -> None:
    """What ends a line elsewhere does not end one here."""
    registry = Families(a_gauge((label, 1.0), ("other", 2.0)))
    pages = Pages(lambda: (registry,))
    assert_same(pages, registry)
    registry.families = [a_gauge((label, 3.0), ("other", 2.0))]
    assert_same(pages, registry)


def test_series_and_families_may_come_and_go() -> None:
    """What was known of a family is forgotten when its series are others."""
    registry = Families()
    pages = Pages(lambda: (registry,))
    for families in (
        [a_gauge(("x", 1.0))],
        [a_gauge(("x", 1.0), ("y", 2.0))],
        [a_gauge(("y", 2.0), ("x", 1.0))],
        [],
        [a_gauge(("x", 5.0), name="another"), a_gauge(("y", 2.0))],
        [a_gauge(("x", 5.0), name="another"), a_gauge(("y", 7.0), ("z", 2.0))],
    ):
        registry.families = families
        assert_same(pages, registry)


def test_two_registries_may_have_a_family_of_one_name() -> None:
    """Each is written with its own numbers."""
    first, second = Families(a_gauge(("x", 1.0))), Families(a_gauge(("y", 2.0)))
    pages = Pages(lambda: (first, second))
    assert_same(pages, first, second)
    assert_same(pages, first, second)


def test_a_changed_line_does_not_outlive_a_family_that_no_longer_fits() -> None:
    """Half a family that was filled before the other half did not fit is not shown later."""
    registry = Families(a_gauge(("x", 1.0), ("y", 2.0)))
    pages = Pages(lambda: (registry,))
    assert_same(pages, registry)
    timed = a_gauge(("x", 9.0))
    timed.add_sample("a_gauge", {"label": "y"}, 2.0, timestamp=12.0)
    for families in ([timed], [a_gauge(("x", 1.0), ("y", 2.0))]):
        registry.families = families
        assert_same(pages, registry)


def test_exemplars_are_written_by_the_library() -> None:
    """A line with more than a number is not kept."""
    registry = CollectorRegistry()
    counter = Counter("a", "Counts.", registry=registry)
    pages = Pages(lambda: (registry,))
    for number in range(3):
        counter.inc(exemplar={"trace": str(number)})
        assert_same(pages, registry)


def test_a_version_that_is_none_gets_plain_text() -> None:
    """An Accept header that no scraper sends ends in no error."""
    registry = Families(CounterMetricFamily("a", "Counts.", 1))
    accept = "application/openmetrics-text;version=new"
    assert Pages(lambda: (registry,)).render(accept) == render((registry,))
    assert render((registry,), accept=accept) == render((registry,))


def test_a_format_that_a_client_makes_up_takes_no_place() -> None:
    """It is answered as the format that is nearest, and Prometheus pays no more than before."""
    registry = Families(a_gauge(("x", 1.0)))
    pages = Pages(lambda: (registry,))
    for minor in range(20):
        made_up = f"application/openmetrics-text;version=1.{minor}.7"
        accept = "application/openmetrics-text"
        assert pages.render(made_up) == render((registry,), accept=accept)
    assert_same(pages, registry)
    assert {render((registry,), accept=accept)[1] for accept in FORMATS} <= set(pages._formats)
    assert set(pages._formats) <= CONTENT_TYPES


def test_an_endless_accept_header_is_not_looked_through() -> None:
    """It gets plain text."""
    registry = Families(a_gauge(("x", 1.0)))
    pages = Pages(lambda: (registry,))
    accept = "application/openmetrics-text;version=1.0.0," + "," * LONGEST_ACCEPT
    assert pages.render(accept) == render((registry,))
