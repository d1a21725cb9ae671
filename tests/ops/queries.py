"""What a query of a dashboard or a rule is made of, as a parser of PromQL sees it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import promql_parser as promql

from holdfast.telemetry.metrics import FOLLOWER_METRICS, METRICS

ROOT = Path(__file__).parent.parent.parent
GENERATED = ROOT / "dashboards" / "generated"
_VARIABLE = re.compile(r"\$(\w+)")
_INTERVALS = frozenset({"__rate_interval", "__range", "__interval"})
_VLLM_NAME = re.compile(r'"(vllm:\w+)"')
_SERIES_OF_HISTOGRAM = ("_bucket", "_sum", "_count")
_LABELS = {
    metric.full_name + ending: (*metric.labels, *(("le",) if ending == "_bucket" else ()))
    for metric in (*METRICS, *FOLLOWER_METRICS)
    for ending in (_SERIES_OF_HISTOGRAM if metric.kind == "histogram" else ("",))
}
_TARGET_LABELS = ("job", "instance")


@dataclass(frozen=True, slots=True)
class Target:
    """One query of one panel."""

    dashboard: str
    panel: str
    letter: str
    expression: str

    def __str__(self) -> str:
        return f"{self.dashboard}/{self.panel}/{self.letter}"


@functools.cache
def dashboards() -> dict[str, dict[str, Any]]:
    """The generated dashboards, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(GENERATED.glob("*.json"))}


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel of a dashboard but the headings."""
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


def targets() -> list[Target]:
    """Every query of every panel."""
    return [
        Target(name, panel["title"], target["refId"], target["expr"])
        for name, dashboard in dashboards().items()
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]


def filled(expression: str, values: Mapping[str, str], interval: str = "1m") -> str:
    """A query with its variables filled in as Grafana does; what is not given is all there is."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        return values.get(name, interval if name in _INTERVALS else ".*")

    return _VARIABLE.sub(value, expression)


def variables(expression: str) -> set[str]:
    """The variables that a query names."""
    return set(_VARIABLE.findall(expression)) - _INTERVALS


def nodes(expression: str) -> list[promql.Expr]:
    """Every part of a query that has no variables left; ValueError if it is none."""
    found: list[promql.Expr] = []
    promql.walk(promql.parse(expression), found.append, lambda _: None)
    return found


def selectors(expression: str) -> list[promql.VectorSelector]:
    """Every selector of series in a query."""
    return [node for node in nodes(expression) if isinstance(node, promql.VectorSelector)]


def unknown_labels(expression: str) -> list[str]:
    """Every label by which a metric of ours is narrowed, and that neither it nor a target has."""
    return [
        f"{selector.name}{{{matcher.name}}}"
        for selector in selectors(expression)
        if (labels := _LABELS.get(selector.name or "")) is not None
        for matcher in selector.matchers.matchers
        if matcher.name not in (*labels, *_TARGET_LABELS)
    ]


def metric_names(expression: str) -> list[str]:
    """The metrics that a query names, once, in order."""
    names = [selector.name for selector in selectors(expression)]
    return list(dict.fromkeys(name for name in names if name))


def unguarded_divisions(expression: str) -> list[str]:
    """Return every division by something that may be zero or missing."""
    return [
        node.prettify()
        for node in nodes(expression)
        if isinstance(node, promql.BinaryExpr) and str(node.op) == "/" and not _is_safe(node.rhs)
    ]


def _is_safe(divisor: promql.Expr) -> bool:
    if isinstance(divisor, promql.NumberLiteral):
        return bool(divisor.val)
    if not isinstance(divisor, promql.ParenExpr):
        return False
    inner = divisor.expr
    if not isinstance(inner, promql.BinaryExpr) or str(inner.op) != ">":
        return False
    return isinstance(inner.rhs, promql.NumberLiteral) and inner.rhs.val == 0


def our_names() -> set[str]:
    """Every metric that Holdfast has."""
    return set(_LABELS)


@functools.cache
def vllm_names() -> frozenset[str]:
    """Every series that vLLM's source can make, with the endings that the client appends."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "v1"
    texts = [path.read_text() for path in folder.rglob("metrics/*.py")]
    bases = {name for text in texts for name in _VLLM_NAME.findall(text)}
    endings = ("", "_total", *_SERIES_OF_HISTOGRAM)
    return frozenset(base + ending for base in bases for ending in endings)
