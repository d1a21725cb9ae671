"""One page of Prometheus text for our metrics and vLLM's. It asks the engine for nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

Registries = Iterable[Collector]
Names = frozenset[str]
"""The names of the series to show; empty for all."""
MAX_ACCEPT_CHARACTERS = 1024
"""Characters. Prometheus sends 250; parsing 64 KiB takes longer than writing the page."""
OPENMETRICS = "application/openmetrics-text"
_ESCAPINGS = ("underscores", "allow-utf-8", "dots", "values")
CONTENT_TYPES = frozenset(
    choose_encoder(accept)[1]
    for accept in (
        "",
        OPENMETRICS,
        *(
            f"{kind};version=1.0.0;escaping={escaping}"
            for kind in ("text/plain", OPENMETRICS)
            for escaping in _ESCAPINGS
        ),
    )
)
"""All known formats. The library would repeat any version that a client makes up."""


class PageFormat(NamedTuple):
    """How a page is written. Two formats of the same content type write the same page."""

    write: Callable[[Collector], bytes]
    content_type: str


def format_for(accept: str) -> PageFormat:
    """Return the newest format that the Accept header asks for."""
    try:
        found = PageFormat(*choose_encoder(accept if len(accept) <= MAX_ACCEPT_CHARACTERS else ""))
    except (TypeError, ValueError):  # the header names something that is not a version
        return PLAIN
    if found.content_type in CONTENT_TYPES:
        return found
    return PageFormat(*choose_encoder(OPENMETRICS))


PLAIN = PageFormat(*choose_encoder(""))


def render(
    registries: Registries, page_format: PageFormat = PLAIN, names: Names = frozenset()
) -> bytes:
    """Render the page as of now: the series of these names, or all if none is given."""
    page = _Page(registries)
    return page_format.write(_Chosen(page, names) if names else page)


def vllm_registry() -> CollectorRegistry:
    """Return the registry of vLLM's metrics and this process's own.

    In multi-process mode, it is a new one at each call: the files have nothing of the process.
    """
    if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return REGISTRY
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # it registers itself
    return registry


class _Page(Collector):
    """Joins several registries into one, since a page of OpenMetrics has one end marker.

    If two families have the same name, the first wins: in multi-process mode, vLLM's include ours.
    """

    def __init__(self, registries: Registries) -> None:
        self._registries = tuple(registries)

    def collect(self) -> Iterator[Metric]:
        names = set[str]()
        for family in chain.from_iterable(registry.collect() for registry in self._registries):
            if family.name not in names:
                names.add(family.name)
                yield family


class _Chosen(Collector):
    """Leaves out every series of another name, as `RestrictedRegistry` of the library does.

    That one asks only the collectors that describe themselves, and ours do not.
    """

    def __init__(self, page: Collector, names: Names) -> None:
        self._page = page
        self._names = names

    def collect(self) -> Iterator[Metric]:
        for family in self._page.collect():
            family.samples = [sample for sample in family.samples if sample.name in self._names]
            if family.samples:
                yield family
