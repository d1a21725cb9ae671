"""Writes the tables of flags and metrics in `docs/reference.md` from the code that declares them.

python scripts/reference.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from holdfast.settings import GROUPS
from holdfast.telemetry.metrics import FOLLOWER_METRICS, METRICS, Metric
from holdfast.telemetry.routing import ROUTING_SERIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"


def written(page: str) -> str:
    """The page with what stands between each pair of marks replaced by the current table."""
    for name, lines in tables().items():
        begin, end = f"<!-- {name}: written by `make reference` -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, has_end, after = rest.partition(end)
        if not has_end:
            raise ValueError(f"{PAGE} lacks the marks of {name}")
        page = "\n".join([f"{before}{begin}", *lines, f"{end}{after}"])
    return page


def tables() -> Mapping[str, Sequence[str]]:
    """The lines of each section, by its name."""
    return {
        "flags": list(_flag_sections()),
        "metrics": list(_metric_table(METRICS)),
        "metrics for routers": list(_routing_table()),
        "metrics of a follower": list(_metric_table(FOLLOWER_METRICS)),
    }


def _flag_sections() -> Iterator[str]:
    for name, kind in GROUPS.items():
        yield f"\n### {name.capitalize()}\n"
        yield from _head("flag", "default", "meaning")
        for flag in (member.metadata["flag"] for member in fields(kind)):
            yield _row(
                f"`{f'{flag.name} {flag.metavar}'.strip()}`", flag.shown_default, flag.meaning
            )
    yield ""


def _metric_table(metrics: Sequence[Metric]) -> Iterator[str]:
    yield ""
    yield from _head("metric", "kind", "labels", "meaning")
    for metric in metrics:
        yield _row(f"`{metric.full_name}`", metric.kind, ", ".join(metric.labels), metric.help)
    yield ""


def _routing_table() -> Iterator[str]:
    yield ""
    yield from _head("metric", "labels", "meaning")
    for series in ROUTING_SERIES:
        yield _row(f"`{series.name}`", ", ".join(series.labels), series.help)
    yield ""


def _head(*names: str) -> Iterator[str]:
    yield _row(*names)
    yield "|" + "---|" * len(names)


def _row(*cells: str) -> str:
    escaped = " | ".join(cell.replace("|", r"\|") for cell in cells)
    return f"| {escaped} |"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
