"""The page around the panels: variables, annotations, links, rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as model

from dashboards.panels import DATASOURCE, Row, built
from dashboards.queries import RANK, SERVER

_TAG = "holdfast"
_SELECTED = (
    'last_over_time(up{job=~"$job"}[$__range]) unless on (job, instance) '
    '(last_over_time(vllm:num_requests_running{job=~"$job"}[$__range]) '
    'unless last_over_time(vllm:num_requests_running{job=~"$job", model_name=~"$model"}[$__range]))'
)
"""Every server of the time shown, also one that is gone, but those that served another model: one
that still starts has not said which."""
_MARKED = "[2m]"
"""Two steps of an annotation: nothing falls between two of them, and Grafana draws what two steps
in succession say as one mark."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What users were promised, as a variable: bounds of the buckets of a histogram of vLLM's."""

    name: str
    label: str
    bounds: tuple[str, ...]
    default: str


@dataclass(frozen=True, slots=True)
class Page:
    """A dashboard: the question that it answers, and its rows."""

    name: str
    question: str
    rows: tuple[Row, ...]
    slos: tuple[Slo, ...] = ()


def dashboard_of(page: Page) -> model.Dashboard:
    """Grafana's dashboard."""
    builder = (
        dashboard.Dashboard(f"Holdfast / {page.name.capitalize()}")
        .uid(f"holdfast-{page.name}")
        .description(page.question)
        .tags([_TAG])
        .readonly()
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .variables([*_variables(), *map(_slo, page.slos)])
        .annotations(_annotations())
        .link(_link())
    )
    numbers = count(1)
    for row in page.rows:
        builder.with_row(dashboard.Row(row.title).id(next(numbers)))
        for panel in row.panels:
            builder.with_panel(built(panel).id(next(numbers)))
    return builder.build()


def _variables() -> list[Any]:
    return [
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        _variable("job", "label_values(holdfast_state, job)", all_value=""),
        _variable("model", 'label_values(vllm:num_requests_running{job=~"$job"}, model_name)'),
        _variable(
            "instance",
            f"query_result({_SELECTED})",
            # Not the end of another label, such as that of Kubernetes for the name of a release.
            regex='/[{,]instance="([^"]+)"/',
            all_value="",
        ),
        _variable("engine", f"label_values(holdfast_engine_steps_total{{{SERVER}}}, engine)"),
        _variable(
            "rank",
            f'label_values(holdfast_engine_steps_total{{{SERVER}, engine=~"$engine"}}, rank)',
        ),
    ]


def _variable(
    name: str, query: str, *, regex: str = "", all_value: str = ".*"
) -> dashboard.QueryVariable:
    """Return a variable to choose from, all values at first, read again as the time range moves.

    Without `all_value`, "All" is the list itself. It has to be where others have the label too: the
    jobs of followers and of other programs, the instances of another model.
    """
    variable = (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(DATASOURCE)
        .query(query)
        .definition(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.NATURAL_ASC)
        .multi(True)
        .include_all(True)
        .current(model.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )
    if regex:
        variable.regex(regex)
    return variable.all_value(all_value) if all_value else variable


def _slo(slo: Slo) -> dashboard.CustomVariable:
    chosen = [
        model.VariableOption(selected=bound == slo.default, text=bound, value=bound)
        for bound in slo.bounds
    ]
    return (
        dashboard.CustomVariable(slo.name)
        .label(slo.label)
        .values(", ".join(slo.bounds))
        .options(chosen)
        .current(model.VariableOption(selected=True, text=slo.default, value=slo.default))
    )


def _annotations() -> list[Any]:
    generation = f"holdfast_engine_generation{{{SERVER}}}"
    age = f"(time() - process_start_time_seconds{{{SERVER}}})"
    locked = f"holdfast_workspace_locked{{{RANK}}}"
    growths = f"holdfast_workspace_growths_total{{{RANK}}}"
    return [
        _annotation(
            "Engine restart",
            "red",
            f"(changes({generation}{_MARKED}) > 0 and {generation} > 1) "
            f"or ({age} < 120 and on (job, instance) {generation})",
            "{{instance}}: a new generation of the engine, or a new server",
        ),
        _annotation(
            "Lock",
            "blue",
            # A restart of less than a step is seen by its generation.
            f"{locked} == 1 unless ({locked} offset 1m == 1 "
            f"and on (job, instance) {generation} == {generation} offset 1m)",
            "{{instance}}: workspaces of rank {{engine}}/{{rank}} are locked",
        ),
        _annotation(
            "Growth",
            "orange",
            f"increase({growths}{_MARKED}) > 0",
            "{{instance}}: a workspace of rank {{engine}}/{{rank}} grew ({{phase}})",
        ),
    ]


def _annotation(name: str, colour: str, expression: str, text: str) -> _Annotation:
    return _Annotation(
        model.AnnotationQuery(
            name=name,
            datasource=DATASOURCE,
            enable=True,
            icon_color=colour,
            expr=expression,
            step="1m",
            title_format=name,
            text_format=text,
            tag_keys="instance,engine,rank",
        )
    )


class _Annotation(Builder[model.AnnotationQuery]):
    """The SDK's own builder knows nothing of what a query of Prometheus needs."""

    def __init__(self, query: model.AnnotationQuery) -> None:
        self._query = query

    def build(self) -> model.AnnotationQuery:
        """The query."""
        return self._query


def _link() -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink("Holdfast")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags([_TAG])
        .include_vars(True)
        .keep_time(True)
    )
