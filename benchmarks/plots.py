"""Curves as SVG: what a page of the documentation shows needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 620, 50, 300
COLOURS = ("#2f6fb3", "#c8641e", "#4b8b3b")
INK = "#8a8a8a"
"""Read on a white page and on a dark one."""
Y_TICKS = 5
_HEAD = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
    'font-family="sans-serif">'
)
_TICK_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Curve:
    """How something grows: one line for each side over the same places."""

    name: str
    """Of its file."""
    title: str
    x_label: str
    y_label: str
    xs: Sequence[float]
    """Rising, above 0; the axis is logarithmic."""
    lines: Mapping[str, Sequence[float]]


def svg(curve: Curve) -> str:
    """The picture; the y axis begins at 0."""
    top = _round_up(max(max(ys) for ys in curve.lines.values()))
    parts = [
        _HEAD,
        _text(LEFT, 20, curve.title, size=15),
        *_grid(curve, top),
        *_lines(curve, top),
        _text((LEFT + RIGHT) / 2, HEIGHT - 12, curve.x_label, anchor="middle"),
        _text(LEFT - 8, TOP - 12, curve.y_label, anchor="end"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _grid(curve: Curve, top: float) -> Iterator[str]:
    for tick in range(Y_TICKS + 1):
        value = top * tick / Y_TICKS
        y = _y(value, top)
        yield f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{INK}" stroke-opacity="0.3"/>'
        yield _text(LEFT - 8, y + 4, f"{value:,.4g}", anchor="end")
    for x in curve.xs:
        yield _text(_x(x, curve.xs), BOTTOM + 18, f"{x:,g}", anchor="middle")


def _lines(curve: Curve, top: float) -> Iterator[str]:
    for number, (side, ys) in enumerate(curve.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [(_x(x, curve.xs), _y(y, top)) for x, y in zip(curve.xs, ys, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for x, y in points:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
        yield _text(LEFT + 12 + 130 * number, TOP - 12, f"● {side}", colour=colour)


def _x(value: float, xs: Sequence[float]) -> float:
    least, most = math.log(xs[0]), math.log(xs[-1])
    share = (math.log(value) - least) / (most - least) if most > least else 0.5
    return LEFT + 15 + share * (RIGHT - LEFT - 30)


def _y(value: float, top: float) -> float:
    return BOTTOM - value / top * (BOTTOM - TOP)


def _round_up(value: float) -> float:
    """The next number above that makes even ticks."""
    if value <= 0:
        return 1.0
    magnitude = 10.0 ** math.floor(math.log10(value))
    return next(step * magnitude for step in _TICK_STEPS if step * magnitude >= value)


def _text(  # noqa: PLR0913 - what a text in a picture has
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
