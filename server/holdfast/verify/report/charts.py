"""The pictures of report.html, as SVG, in the colours of report.css: light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from holdfast.verify.records import CheckResult, CheckStatus, Number, Report, Series
from holdfast.verify.report import wording
from holdfast.verify.report.markup import tag

_WIDTH = 720.0
_LABEL = 190.0
_ROW = 20.0
_PLOT_HEIGHT = 220.0
_MAX_DOTS = 60
"""More dots would hide the curve; those beyond the limit are always drawn."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 12.0, 40.0


def proportions(report: Report) -> Element:
    """One bar with a part for each status, as long as that has checks."""
    drawn = _svg(_WIDTH, 12.0, "How many checks have which status")
    drawn.set("preserveAspectRatio", "none")  # as wide as the page
    total, x = max(1, len(report.checks)), 0.0
    for status in CheckStatus:
        width = _WIDTH * report.count(status) / total
        if width:
            title = tag("title", f"{report.count(status)} {status}")
            shown = max(width - 2.0, 1.0)
            drawn.append(
                tag("rect", title, class_=f"fill-{status}", x=x, y=0.0, width=shown, height=12.0)
            )
            x += width
    return drawn


def timeline(checks: Sequence[CheckResult]) -> Element:
    """A bar for each check that was made, from when it began to when it ended."""
    made = [check for check in checks if check.duration_seconds > 0]
    total = sum(check.duration_seconds for check in made) or 1.0
    room = _WIDTH - _LABEL - 60.0
    drawn = _svg(_WIDTH, _ROW * len(made) + 4.0, "How long each check took")
    begun = 0.0
    for row, check in enumerate(made):
        y = _ROW * row
        x = _LABEL + room * begun / total
        width = max(2.0, room * check.duration_seconds / total)
        seconds = wording.duration(check.duration_seconds)
        label = tag("text", wording.full_name(check), class_="label end", x=_LABEL - 10, y=y + 14)
        title = tag("title", f"{wording.full_name(check)}: {check.status}, {seconds}")
        grid = tag("line", class_="grid", x1=_LABEL, x2=_LABEL + room, y1=y + 19, y2=y + 19)
        bar = tag("rect", title, class_=f"fill-{check.status}", x=x, y=y + 4, rx=2.0)
        bar.set("width", f"{width:g}")
        bar.set("height", "11")
        after = tag("text", seconds, class_="label faint", x=x + width + 6, y=y + 14)
        drawn.extend([grid, label, bar, after])
        begun += check.duration_seconds
    return drawn


def gauge(number: Number) -> Element | None:
    """A number beside its limit; None where there is nothing to draw."""
    bound = number.limit
    if bound is None or not math.isfinite(number.value) or number.value < 0 or bound.value <= 0:
        return None
    width, height = 120.0, 12.0
    most = 1.25 * max(number.value, bound.value)
    drawn = _svg(width, height, f"{wording.value(number)}, {wording.limit(bound, number.unit)}")
    drawn.set("class", "gauge")
    status = CheckStatus.PASSED if number.is_within else CheckStatus.FAILED
    at = width * bound.value / most
    drawn.extend(
        [
            tag("rect", class_="track", x=0.0, y=3.0, width=width, height=6.0, rx=3.0),
            tag("rect", class_=f"fill-{status}", x=0.0, y=3.0, height=6.0, rx=3.0),
            tag("line", class_="bound", x1=at, x2=at, y1=0.0, y2=height),
        ]
    )
    drawn[-2].set("width", f"{max(2.0, width * number.value / most):g}")
    return drawn


def plot(series: Series) -> Element:
    """The points of a series, joined, with its limit as a dashed line."""
    points = [(x, y) for x, y in series.points if math.isfinite(x) and math.isfinite(y)]
    lost = len(series.points) - len(points)
    drawn = _svg(_WIDTH, _TOP + _PLOT_HEIGHT + _BOTTOM, series.name)
    drawn.set("class", "plot")
    limits = [series.limit.value] if series.limit else []
    x_ticks = _ticks([x for x, _ in points])
    y_ticks = _ticks([*(y for _, y in points), *limits])
    x_of = _scale(x_ticks, _LEFT, _WIDTH - _RIGHT)
    y_of = _scale(y_ticks, _TOP + _PLOT_HEIGHT, _TOP)
    _draw_axes(drawn, series, x_ticks, y_ticks)
    if series.limit:
        y = y_of(series.limit.value)
        drawn.append(tag("line", class_="bound", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y))
    path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
    drawn.append(tag("polyline", class_="curve", points=path))
    for x, y in points:
        is_within = series.limit is None or series.limit.is_met_by(y)
        if is_within and len(points) > _MAX_DOTS:
            continue
        title = tag("title", f"{wording.figure(x)}: {wording.figure(y)}")
        kind = "point" if is_within else f"fill-{CheckStatus.FAILED}"
        drawn.append(tag("circle", title, class_=kind, cx=x_of(x), cy=y_of(y), r=3.0))
    if lost:
        said = f"{lost} not finite"
        drawn.append(tag("text", said, class_="label end", x=_WIDTH - _RIGHT, y=_TOP + 10))
    return drawn


def _draw_axes(
    drawn: Element, series: Series, x_ticks: Sequence[float], y_ticks: Sequence[float]
) -> None:
    x_of = _scale(x_ticks, _LEFT, _WIDTH - _RIGHT)
    y_of = _scale(y_ticks, _TOP + _PLOT_HEIGHT, _TOP)
    floor = _TOP + _PLOT_HEIGHT
    for tick in y_ticks:
        y = y_of(tick)
        drawn.append(tag("line", class_="grid", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y))
        text = wording.figure(tick)
        drawn.append(tag("text", text, class_="label end", x=_LEFT - 8, y=y + 4))
    for tick in x_ticks:
        text = wording.figure(tick)
        drawn.append(tag("text", text, class_="label middle", x=x_of(tick), y=floor + 16))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    drawn.append(tag("text", series.x_name, class_="label middle", x=middle, y=floor + 34))
    turned = f"rotate(-90 12 {_TOP + _PLOT_HEIGHT / 2:g})"
    drawn.append(
        tag("text", series.y_name, class_="label middle", x=12.0, y=_TOP + _PLOT_HEIGHT / 2)
    )
    drawn[-1].set("transform", turned)


def _ticks(values: Sequence[float]) -> list[float]:
    """About five round numbers that enclose the values; at least two."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if low == high:
        low, high = min(low, 0.0), max(high, 0.0) or 1.0
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(one * power for one in (1, 2, 2.5, 5, 10) if one * power >= rough * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _scale(ticks: Sequence[float], start: float, end: float) -> _Scale:
    return _Scale(ticks[0], ticks[-1], start, end)


class _Scale:
    """Where on a line of the picture a value stands."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._high, self._start, self._end = low, high, start, end

    def __call__(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)


def _svg(width: float, height: float, label: str) -> Element:
    drawn = tag("svg", viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label)
    drawn.set("width", f"{width:g}")
    drawn.set("height", f"{height:g}")
    return drawn
