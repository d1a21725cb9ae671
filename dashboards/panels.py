"""What a panel is here, and Grafana's panel made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeVar

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as model

from dashboards.queries import metric_names

Kind = Literal["tile", "name", "lines", "stack", "timeline", "bars"]
"""`tile` is one number, `name` the names of the series that there are, `lines` and `stack` are
over time, `timeline` is one band a series coloured by its value, `bars` one bar a series, now."""
Step = tuple[float | None, str]
"""From this value on (None: from the least), this colour."""
Mappings = Mapping[int, tuple[str, str]]
"""What a value is called, and its colour."""
AnyPanel = stat.Panel | timeseries.Panel | statetimeline.Panel | bargauge.Panel
Some = TypeVar("Some", stat.Panel, timeseries.Panel, statetimeline.Panel, bargauge.Panel)

DATASOURCE = options.DataSourceRef(type_val="prometheus", uid="${datasource}")
NEUTRAL: tuple[Step, ...] = ((None, "text"),)
NONE_IS_GOOD: tuple[Step, ...] = ((None, "green"), (1, "red"))
ALL_IS_GOOD: tuple[Step, ...] = ((None, "red"), (1, "green"))
YES_IS_GOOD: Mappings = MappingProxyType({0: ("no", "red"), 1: ("yes", "green")})
TILE_WIDTH = 4
_WHOLE_WIDTH = 24
_TILE_HEIGHT, _BAND_HEIGHT, _GRAPH_HEIGHT = 4, 5, 8
_LEGEND_CALCULATIONS = ["lastNotNull", "max"]


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel, and how its series are called."""

    expression: str
    legend: str = "{{instance}}"


@dataclass(frozen=True, slots=True)
class Panel:
    """One question and its answer. `meaning` says what is shown and when to worry."""

    title: str
    meaning: str
    queries: tuple[Query, ...]
    unit: str
    kind: Kind = "lines"
    thresholds: tuple[Step, ...] = NEUTRAL
    mappings: Mappings = field(default_factory=dict)
    width: int = 12
    most: float | None = None

    @property
    def description(self) -> str:
        """The meaning, and at the end the names of the metrics that it is made of."""
        names = dict.fromkeys(
            name for query in self.queries for name in metric_names(query.expression)
        )
        return f"{self.meaning} Metrics: {', '.join(f'`{name}`' for name in names)}"


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def tile(
    title: str,
    meaning: str,
    expression: str,
    unit: str,
    thresholds: tuple[Step, ...] = NEUTRAL,
) -> Panel:
    """A number as it is now, a sixth of the page wide."""
    return Panel(title, meaning, (Query(expression),), unit, "tile", thresholds, width=TILE_WIDTH)


def built(panel: Panel) -> AnyPanel:
    """Grafana's panel."""
    match panel.kind:
        case "tile" | "name":
            return _with_all(_tile(panel), panel, _TILE_HEIGHT)
        case "lines" | "stack":
            return _with_all(_graph(panel), panel, _GRAPH_HEIGHT)
        case "timeline":
            is_alone = panel.width == _WHOLE_WIDTH
            height = _BAND_HEIGHT if is_alone else _GRAPH_HEIGHT
            return _with_all(_timeline(panel), panel, height)
        case "bars":
            return _with_all(_bars(), panel, _GRAPH_HEIGHT)


def _tile(panel: Panel) -> stat.Panel:
    is_name = panel.kind == "name"
    text = options.BigValueTextMode.NAME if is_name else options.BigValueTextMode.VALUE
    is_coloured = panel.thresholds != NEUTRAL
    colour = options.BigValueColorMode.VALUE if is_coloured else options.BigValueColorMode.NONE
    return (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .text_mode(text)
        .color_mode(colour)
        .graph_mode(options.BigValueGraphMode.NONE)
        .no_value("none")
    )


def _graph(panel: Panel) -> timeseries.Panel:
    graph = (
        timeseries.Panel()
        .legend(
            common.VizLegendOptions()
            .as_table(True)
            .show_legend(True)
            .display_mode(options.LegendDisplayMode.TABLE)
            .placement(options.LegendPlacement.BOTTOM)
            .calcs(_LEGEND_CALCULATIONS)
        )
        .tooltip(common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI))
        .show_points(options.VisibilityMode.NEVER)
        .line_width(1)
        .fill_opacity(40 if panel.kind == "stack" else 5)
        .axis_soft_min(0)
    )
    if panel.kind == "stack":
        graph.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL))
    if panel.thresholds != NEUTRAL:
        graph.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(options.GraphThresholdsStyleMode.DASHED)
        )
    return graph


def _timeline(panel: Panel) -> statetimeline.Panel:
    return (
        statetimeline.Panel()
        .show_value(options.VisibilityMode.NEVER)
        .row_height(0.8)
        .fill_opacity(80)
        .merge_values(True)
        .legend(common.VizLegendOptions().show_legend(bool(panel.mappings)))
    )


def _bars() -> bargauge.Panel:
    return (
        bargauge.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .orientation(options.VizOrientation.HORIZONTAL)
        .display_mode(options.BarGaugeDisplayMode.BASIC)
    )


def _with_all(builder: Some, panel: Panel, height: int) -> Some:
    """What Grafana's panels have in common."""
    builder.title(panel.title).description(panel.description).datasource(DATASOURCE)
    builder.span(panel.width).height(height).unit(panel.unit).min(0)
    builder.thresholds(_thresholds(panel.thresholds)).color_scheme(_colours(panel))
    if panel.most is not None:
        builder.max(panel.most)
    if panel.mappings:
        builder.mappings([_mapping(panel.mappings)])
    is_instant = panel.kind in {"tile", "name", "bars"}
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        builder.with_target(_target(letter, query, is_instant=is_instant))
    return builder


def _target(letter: str, query: Query, *, is_instant: bool) -> prometheus.Dataquery:
    target = (
        prometheus.Dataquery()
        .ref_id(letter)
        .datasource(DATASOURCE)
        .expr(query.expression)
        .legend_format(query.legend)
    )
    return target.instant() if is_instant else target.range()


def _thresholds(steps: tuple[Step, ...]) -> dashboard.ThresholdsConfig:
    return (
        dashboard.ThresholdsConfig()
        .mode(model.ThresholdsMode.ABSOLUTE)
        .steps([model.Threshold(value, colour) for value, colour in steps])
    )


def _colours(panel: Panel) -> dashboard.FieldColor:
    is_by_value = panel.kind not in {"lines", "stack"}
    mode = (
        model.FieldColorModeId.THRESHOLDS if is_by_value else model.FieldColorModeId.PALETTE_CLASSIC
    )
    return dashboard.FieldColor().mode(mode)


def _mapping(mappings: Mappings) -> model.ValueMapping:
    return model.ValueMap(
        {
            str(value): model.ValueMappingResult(text=text, color=colour, index=index)
            for index, (value, (text, colour)) in enumerate(mappings.items())
        }
    )
