from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from holdfast.telemetry.exposition import (
    CONTENT_TYPES,
    MAX_ACCEPT_CHARACTERS,
    PLAIN,
    format_for,
    render,
)

OPENMETRICS = "application/openmetrics-text"


@pytest.mark.parametrize("version", ["new", "1.x", ""])
def test_a_version_that_is_none_is_no_error(version: str) -> None:
    """Accept headers that no scraper sends get a format too."""
    assert format_for(f"{OPENMETRICS};version={version}").content_type in CONTENT_TYPES


def test_a_format_that_a_client_makes_up_is_answered_as_the_nearest() -> None:
    """However many versions clients name, there are few formats."""
    for minor in range(20):
        made_up = format_for(f"{OPENMETRICS};version=1.{minor}.7")
        assert made_up.content_type == format_for(OPENMETRICS).content_type


@pytest.mark.parametrize("content_type", sorted(CONTENT_TYPES))
def test_each_format_may_be_asked_for(content_type: str) -> None:
    """Its page ends as that format ends."""
    chosen = format_for(content_type)
    registry = CollectorRegistry()
    Gauge("gauge", "A gauge.", registry=registry).set(2)
    page = render((registry,), chosen)
    assert b"gauge 2.0\n" in page
    assert page.endswith(b"# EOF\n") == chosen.content_type.startswith(OPENMETRICS)


def test_an_endless_accept_header_is_not_looked_through() -> None:
    """It gets plain text."""
    accept = f"{OPENMETRICS};version=1.0.0," + "," * MAX_ACCEPT_CHARACTERS
    assert format_for(accept) == PLAIN


@pytest.mark.parametrize(
    "names",
    [
        {"calls_total"},
        {"calls"},
        {"seconds_bucket", "gauge"},
        {"seconds"},
        {"nothing"},
        {"gauge", "nothing"},
    ],
)
def test_chosen_names_leave_the_series_that_the_library_would(names: set[str]) -> None:
    """`name[]` names series, not families, as in the library's own registry."""
    registry = CollectorRegistry()
    Gauge("gauge", "A gauge.", registry=registry).set(2)
    Counter("calls", "A counter.", registry=registry).inc()
    Histogram("seconds", "A histogram.", buckets=(1,), registry=registry).observe(0.5)
    expected = generate_latest(registry.restricted_registry(names))
    assert sorted(render((registry,), names=frozenset(names)).splitlines()) == sorted(
        expected.splitlines()
    )
