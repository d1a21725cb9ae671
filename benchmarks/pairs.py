"""What benchmarks share: the order of a pair, and the table and JSON of the results.

A record is what a benchmark prints with `--json`, and what `docs/benchmarks.md` is made of.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import chain
from math import log, sqrt
from pathlib import Path
from statistics import median, pvariance, quantiles, stdev
from typing import Any

import psutil

from holdfast import __version__
from holdfast.versions import installed_version, vllm_version
from plots import Curve

LEAST_PAIRS = 5
"""With fewer the spread says nothing."""
MANY_PAIRS = 10
"""From this many pairs on, the standard error says more than the least and the most."""
JACKKNIFE_GROUPS = 30
"""How often a part of the pairs is left out."""
SIDES = ("holdfast", "vllm serve")
Record = dict[str, Any]
GIB = 1024**3
_GOAL = re.compile(r"(itself )?(<=|>=|<|>) ([\d.]+)")
_COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


@dataclass(frozen=True, slots=True)
class Measure:
    """One row: what each side had in each pair. The ratio is that of the first side to the second.

    A row with one side has no ratio.
    """

    label: str
    values: Mapping[str, Sequence[float]]
    digits: int = 1
    goal: str = ""
    """What the ratio should be, as `<= 1.00`; or the value, if there is no ratio or as
    `itself <= 1.2`. Empty for none."""
    ratio_error: float | None = None
    """The standard error of a ratio that is not one of many; None for that of their mean."""

    def ratios(self) -> list[float]:
        """One for each pair."""
        if len(self.values) < 2:
            return []
        first, second = list(self.values.values())[:2]
        return [ours / theirs for ours, theirs in zip(first, second, strict=True) if theirs]

    def record(self) -> Record:
        """The row as JSON."""
        return {
            "label": self.label,
            "values": {side: list(values) for side, values in self.values.items()},
            "medians": {side: median(values) for side, values in self.values.items()},
            "ratios": self.ratios(),
            "standard_error": (
                standard_error(self.ratios()) if self.ratio_error is None else self.ratio_error
            ),
            "digits": self.digits,
            "goal": self.goal,
        }


@dataclass(frozen=True, slots=True)
class Findings:
    """What one benchmark has found."""

    name: str
    title: str
    """One line that says what was measured, and with what."""
    measures: Sequence[Measure] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    """Sentences that stand below the table."""
    curves: Sequence[Curve] = ()

    def record(self) -> Record:
        """Everything as JSON, with the machine and the versions."""
        return {
            "benchmark": self.name,
            "title": self.title,
            "measured": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            "measures": [measure.record() for measure in self.measures],
            "notes": list(self.notes),
            "curves": [asdict(curve) for curve in self.curves],
            "details": dict(self.details),
        }


def pooled_p99(
    label: str, values: Mapping[str, Sequence[Sequence[float]]], digits: int = 1, goal: str = ""
) -> Measure:
    """Return the row of the p99 of all values of a side, which are given for each pair.

    A p99 needs many values, and those of one burst are few. The standard error of the ratio is that
    of a jackknife (https://doi.org/10.1214/aos/1176345462), which for quantiles leaves out several
    pairs at once (https://doi.org/10.1214/aos/1176347263).
    """
    ours, theirs = values.values()
    count = min(len(ours), JACKKNIFE_GROUPS)
    p99s = {side: [_pooled(of_pairs)] for side, of_pairs in values.items()}
    if count < MANY_PAIRS:
        return Measure(label, p99s, digits, goal)
    without = [
        log(_pooled(_left_out(ours, one, count)) / _pooled(_left_out(theirs, one, count)))
        for one in range(count)
    ]
    (ratio,) = Measure(label, p99s).ratios()
    error = ratio * sqrt((count - 1) * pvariance(without))
    return Measure(label, p99s, digits, goal, error)


def p99(values: Sequence[float]) -> float:
    """The 99th percentile; that of one value is the value."""
    return quantiles(values, n=100, method="inclusive")[-1] if values[1:] else values[0]


def _pooled(values: Sequence[Sequence[float]]) -> float:
    return p99(list(chain.from_iterable(values)))


def _left_out(
    values: Sequence[Sequence[float]], group: int, groups: int
) -> Sequence[Sequence[float]]:
    """Return the values without those of one of as many groups of neighbours."""
    begin, end = (len(values) * edge // groups for edge in (group, group + 1))
    return [*values[:begin], *values[end:]]


def ordered(number: int, sides: Sequence[str] = SIDES) -> Sequence[str]:
    """Return the sides in the order of this pair: the one that goes first alternates."""
    return sides if number % 2 else sides[::-1]


def add_options(parser: argparse.ArgumentParser, *, pairs: int = LEAST_PAIRS) -> None:
    """The options that all benchmarks have."""
    parser.add_argument(
        "--pairs", type=int, default=pairs, help=f"how many are counted ({pairs}; at least 1)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--quick", action="store_true", help="try that it runs: few and short, no numbers to keep"
    )


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of the command line; with `--quick` one pair is enough."""
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.pairs = 1
    if arguments.pairs < 1:
        parser.error("--pairs: at least 1")
    return arguments


def say(text: str) -> None:
    """Tell what is going on, on standard error."""
    print(text, file=sys.stderr, flush=True)


def show(findings: Findings, arguments: argparse.Namespace) -> None:
    """Print the table or the JSON, as asked."""
    record = findings.record()
    print(json.dumps(record, indent=2) if arguments.json else "\n".join(text_table(record)))


def machine() -> dict[str, Any]:
    """What the numbers depend on beside the code."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "kernel": platform.release(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    """Ours and those of what does the work."""
    return {
        "holdfast": __version__,
        "vllm": vllm_version(),
        "torch": installed_version("torch"),
        "python": platform.python_version(),
    }


def text_table(record: Mapping[str, Any]) -> Iterator[str]:
    """The table for a terminal: medians, with the least and the most in brackets."""
    yield f"{record['title']}."
    yield _environment(record)
    yield ""
    rows = list(_rows(record))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
    yield from _after(record["notes"])


def markdown_table(record: Mapping[str, Any]) -> Iterator[str]:
    """The same for `docs/benchmarks.md`."""
    yield f"{record['title']}. {_environment(record)}"
    yield ""
    head, *rows = _rows(record)
    yield _piped(head)
    yield _piped(["---"] * len(head))
    yield from map(_piped, rows)
    yield from _after(record["notes"])


def _environment(record: Mapping[str, Any]) -> str:
    of, versions_of = record["machine"], record["versions"]
    return (
        f"{of['processor']}, {of['cores']} cores, {of['memory_gib']} GiB, Linux {of['kernel']}; "
        f"Holdfast {versions_of['holdfast']}, vLLM {versions_of['vllm']}, "
        f"torch {versions_of['torch']}, Python {versions_of['python']}; "
        f"{record['measured'][:10]}. Median (least to most) of each side, and of the ratio in a "
        "pair; ± is a standard error."
    )


def _rows(record: Mapping[str, Any]) -> Iterator[list[str]]:
    measures = record["measures"]
    sides = list(dict.fromkeys(side for measure in measures for side in measure["values"]))
    yield ["", *sides, "ratio", "goal", "met"]
    for measure in measures:
        values = (measure["values"].get(side, ()) for side in sides)
        cells = (spread(of_side, measure["digits"]) for of_side in values)
        yield [measure["label"], *cells, _ratio(measure), measure["goal"], _verdict(measure)]


def standard_error(ratios: Sequence[float]) -> float | None:
    """That of the ratio: the one of the mean of their logarithms, times their median.

    None for fewer than many, or where one is not positive.
    """
    if len(ratios) < MANY_PAIRS or min(ratios) <= 0:
        return None
    return median(ratios) * stdev(map(log, ratios)) / sqrt(len(ratios))


def _ratio(measure: Mapping[str, Any]) -> str:
    """With few pairs their spread, with many the standard error, which is not told as 0.00."""
    ratios, error = measure["ratios"], measure["standard_error"]
    if error is None:
        return spread(ratios, 2)
    digits = 2 if error >= 0.01 else 3
    return f"{median(ratios):.{digits}f} ± {error:.{digits}f}"


def _verdict(measure: Mapping[str, Any]) -> str:
    """Whether the goal is met; `within the error` if it is missed by less than that."""
    goal = _GOAL.fullmatch(measure["goal"])
    if goal is None:
        return ""
    is_met, bound, error = _COMPARISONS[goal[2]], float(goal[3]), 0.0
    value = next(iter(measure["medians"].values()))
    if measure["ratios"] and not goal[1]:
        value, error = median(measure["ratios"]), measure["standard_error"] or 0.0
    if is_met(value, bound):
        return "yes"
    return (
        "within the error" if is_met(value - error, bound) or is_met(value + error, bound) else "no"
    )


def spread(values: Sequence[float], digits: int) -> str:
    """`median (least to most)`; empty without values."""
    if not values:
        return ""
    middle, least, most = (f"{of(values):,.{digits}f}" for of in (median, min, max))
    return f"{middle} ({least} to {most})" if len(values) > 1 else middle


def _piped(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _after(notes: Iterable[str]) -> Iterator[str]:
    for note in notes:
        yield ""
        yield note


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
