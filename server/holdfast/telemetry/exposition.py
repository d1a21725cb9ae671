"""One page of Prometheus text for our metrics and vLLM's. Asks nothing of the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from holdfast.telemetry.forms import Encode, Form, end_of, text_of

Registries = Iterable[Collector]
MOST_FORMATS = 4
"""A scraper asks for one; the version in its name is the client's to choose."""


def vllm_registry() -> CollectorRegistry:
    """The registry that vLLM's metrics stand in now; a new one each time in multi-process mode."""
    if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return REGISTRY
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # it registers itself
    return registry


def render(registries: Registries, *, accept: str = "") -> tuple[bytes, str]:
    """The page and its content type, in the newest format that the Accept header asks for."""
    encode, content_type = _encoder(accept)
    return encode(_Page(registries)), content_type


class Pages:
    """The pages of the same registries, scrape after scrape: as `render`, at half the cost.

    Renders one page at a time.
    """

    def __init__(self, registries: Callable[[], Registries]) -> None:
        self._registries = registries
        self._formats: dict[str, dict[str, Form]] = {}

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page of this moment and its content type."""
        encode, content_type = _encoder(accept)
        if content_type not in self._formats and len(self._formats) == MOST_FORMATS:
            return encode(_Page(self._registries())), content_type
        forms = self._formats.setdefault(content_type, {})
        lines: list[str] = []
        for family in _Page(self._registries()).collect():
            lines += _lines(family, forms, encode)
        lines.append(end_of(encode))
        return "".join(lines).encode(), content_type


def _lines(family: Metric, forms: dict[str, Form], encode: Encode) -> Iterable[str]:
    known = forms.get(family.name)
    lines = known.filled(family.samples) if known else None
    if lines is not None:
        return lines
    forms.pop(family.name, None)
    form = Form.of(family, encode)
    if form is None:
        return [text_of(family, encode)]
    forms[family.name] = form
    return form.filled(family.samples) or ()


def _encoder(accept: str) -> tuple[Encode, str]:
    try:
        return choose_encoder(accept)
    except TypeError:  # it compares a version that is none
        return choose_encoder("")


class _Page(Collector):
    """Many registries as one, since a page of OpenMetrics has one end."""

    def __init__(self, registries: Registries) -> None:
        self._registries = tuple(registries)

    def collect(self) -> Iterator[Metric]:
        for registry in self._registries:
            yield from registry.collect()
