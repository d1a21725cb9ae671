"""How a query names what it wants, so that every panel follows the same variables."""

from __future__ import annotations

import re

SERVER = 'job=~"$job", instance=~"$instance"'
"""Selects what a whole server says."""
RANK = f'{SERVER}, engine=~"$engine", rank=~"$rank"'
"""Selects what one rank of an engine says."""
FOLLOWER = 'job=~"$job-follower", instance=~".+"'
"""Selects what followers say, whose job is never among the choices."""
MODEL = f'{SERVER}, model_name=~"$model", engine=~"$engine"'
"""Selects what vLLM says of a model."""

_STRING = re.compile(r'"[^"]*"')
_METRIC = re.compile(r"\b(?:holdfast_\w+|vllm:\w+|up(?=\{))")


def metric_names(expression: str) -> tuple[str, ...]:
    """Every metric in a query, once, in order."""
    return tuple(dict.fromkeys(_METRIC.findall(_STRING.sub("", expression))))


def ratio(part: str, whole: str) -> str:
    """`part / whole`, with no result where the whole is nothing: no NaN, no infinity."""
    return f"{part} / ({whole} > 0)"


def rate(name: str, selector: str, window: str = "$__rate_interval") -> str:
    """How fast a counter rises, a second."""
    return f"rate({name}{{{selector}}}[{window}])"


def increase(name: str, selector: str) -> str:
    """How far a counter rose between two points of the graph, and at least over two scrapes."""
    return f"increase({name}{{{selector}}}[$__rate_interval])"


def by_node(expression: str) -> str:
    """The same numbers of ranks with the label `node`; no result on a single node."""
    node = f"holdfast_rank_info{{{RANK}}}"
    return f"{expression} * on (job, instance, engine, rank) group_left (node) {node}"


def quantile(share: float, histogram: str, selector: str = MODEL) -> str:
    """The value that `share` of the observations did not exceed; no result, no NaN, without any."""
    buckets = rate(f"{histogram}_bucket", selector)
    return f"histogram_quantile({share}, sum by (le) ({buckets})) >= 0"


def within(histogram: str, bound: str) -> str:
    """The share of all observations of the time shown that did not exceed a bound of a bucket."""
    good = rate(f"{histogram}_bucket", f'{MODEL}, le="{bound}"', "$__range")
    return ratio(f"sum({good})", f"sum({rate(f'{histogram}_count', MODEL, '$__range')})")
