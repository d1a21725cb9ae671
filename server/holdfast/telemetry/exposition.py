"""One page of Prometheus text for our metrics and vLLM's. Asks nothing of the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from holdfast.telemetry.forms import Encode, Form, end_of, text_of
from holdfast.telemetry.readings import Labels, collectors, reading

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
"""What is answered, and remembered. The library would repeat any version that a client makes up."""


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
    """The pages of the same registries, scrape after scrape: as `render`, at a third of the cost.

    Renders one page at a time.
    """

    def __init__(self, registries: Callable[[], Registries]) -> None:
        self._registries = registries
        self._formats: dict[str, _Format] = {}

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page of this moment and its content type."""
        encode, content_type = _encoder(accept)
        known = self._formats.setdefault(content_type, _Format(encode))
        lines: list[str] = []
        for registry in self._registries():
            for collector in collectors(registry):
                lines += known.lines(collector)
        lines.append(end_of(encode))
        return "".join(lines).encode(), content_type


class _Format:
    """What is known of the families in one format."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._families: dict[str, Form] = {}
        self._metrics: WeakKeyDictionary[Collector, tuple[Labels, Form]] = WeakKeyDictionary()

    def lines(self, collector: Collector) -> Iterable[str]:
        now = reading(collector)
        if now is None:
            families = collector.collect()
            return [line for family in families for line in self._lines_of_family(family)]
        labels, form = self._metrics.get(collector, ((), None))
        if form is not None and labels == now.labels and form.places == len(now.numbers):
            return form.numbered(now.numbers)
        return self._lines_of_metric(collector, now.labels)

    def _lines_of_metric(self, collector: Collector, labels: Labels) -> Iterable[str]:
        (family,) = collector.collect()
        form, now = Form.of(family, self._encode), reading(collector)
        # Series may come and go meanwhile: whose lines these are is known only if none did.
        if form and now and now.labels == labels and form.places == len(now.numbers):
            self._metrics[collector] = (labels, form)
            return form.numbered(now.numbers)
        return [text_of(family, self._encode)]

    def _lines_of_family(self, family: Metric) -> Iterable[str]:
        known = self._families.get(family.name)
        lines = known.filled(family.samples) if known else None
        if lines is not None:
            return lines
        self._families.pop(family.name, None)
        form = Form.of(family, self._encode)
        if form is None:
            return [text_of(family, self._encode)]
        self._families[family.name] = form
        return form.filled(family.samples) or ()


def _encoder(accept: str) -> tuple[Encode, str]:
    try:
        found = choose_encoder(accept if len(accept) <= LONGEST_ACCEPT else "")
    except (TypeError, ValueError):  # it compares a version that is none
        return choose_encoder("")
    return found if found[1] in CONTENT_TYPES else choose_encoder(_OPENMETRICS)


class _Page(Collector):
    """Many registries as one, since a page of OpenMetrics has one end."""

    def __init__(self, registries: Registries) -> None:
        self._registries = tuple(registries)

    def collect(self) -> Iterator[Metric]:
        for registry in self._registries:
            yield from registry.collect()
