"""One page of Prometheus text for our metrics and vLLM's. Asks nothing of the engine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector


def vllm_registry() -> CollectorRegistry:
    """The registry that vLLM's metrics stand in now; a new one each time in multi-process mode."""
    if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return REGISTRY
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # it registers itself
    return registry


def render(registries: Iterable[Collector], *, accept: str = "") -> tuple[bytes, str]:
    """The page and its content type, in the newest format that the Accept header asks for."""
    encode, content_type = choose_encoder(accept)
    return encode(_Page(registries)), content_type


class _Page(Collector):
    """Many registries as one, since a page of OpenMetrics has one end."""

    def __init__(self, registries: Iterable[Collector]) -> None:
        self._registries = tuple(registries)

    def collect(self) -> Iterator[Metric]:
        for registry in self._registries:
            yield from registry.collect()
