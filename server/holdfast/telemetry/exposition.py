"""One page of Prometheus text for our metrics and vLLM's. Asks nothing of the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

Registries = Iterable[Collector]
LONGEST_ACCEPT = 1024
"""Characters. Prometheus sends 250; to look through 64 KiB takes longer than to write the page."""
_OPENMETRICS = "application/openmetrics-text"
_ESCAPINGS = ("underscores", "allow-utf-8", "dots", "values")
CONTENT_TYPES = frozenset(
    choose_encoder(accept)[1]
    for accept in (
        "",
        _OPENMETRICS,
        *(
            f"{kind};version=1.0.0;escaping={escaping}"
            for kind in ("text/plain", _OPENMETRICS)
            for escaping in _ESCAPINGS
        ),
    )
)
"""The formats there are. The library would repeat any version that a client makes up."""


class PageFormat(NamedTuple):
    """How a page is written. Two of the same content type write the same page."""

    write: Callable[[Collector], bytes]
    content_type: str


def format_for(accept: str) -> PageFormat:
    """The newest format that the Accept header asks for."""
    try:
        found = PageFormat(*choose_encoder(accept if len(accept) <= LONGEST_ACCEPT else ""))
    except (TypeError, ValueError):  # it compares a version that is none
        return PLAIN
    if found.content_type in CONTENT_TYPES:
        return found
    return PageFormat(*choose_encoder(_OPENMETRICS))


PLAIN = PageFormat(*choose_encoder(""))


def render(registries: Registries, page_format: PageFormat = PLAIN) -> bytes:
    """The page of this moment."""
    return page_format.write(_Page(registries))


def vllm_registry() -> CollectorRegistry:
    """The registry that vLLM's metrics stand in now; a new one each time in multi-process mode."""
    if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return REGISTRY
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # it registers itself
    return registry


class _Page(Collector):
    """Many registries as one, since a page of OpenMetrics has one end.

    Of two families of one name the first is taken: in multi-process mode, ours are among vLLM's.
    """

    def __init__(self, registries: Registries) -> None:
        self._registries = tuple(registries)

    def collect(self) -> Iterator[Metric]:
        names = set[str]()
        for family in chain.from_iterable(registry.collect() for registry in self._registries):
            if family.name not in names:
                names.add(family.name)
                yield family
