"""report.html: one file without scripts, for people, on paper too."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from itertools import groupby
from xml.etree.ElementTree import Element

from holdfast.configuration_record import Configuration
from holdfast.verify.records import CheckResult, CheckStatus, Fault, Number, Report
from holdfast.verify.report import charts, wording
from holdfast.verify.report.markup import html, tag

_MARKS = {
    CheckStatus.PASSED: "✓",
    CheckStatus.FAILED: "✕",
    CheckStatus.WARNED: "!",
    CheckStatus.SKIPPED: "-",
    CheckStatus.INCONCLUSIVE: "?",
}
"""Not everyone sees the colours."""
_MAX_NARROW_CHARACTERS = 23
"""In letters: what fits into one column of the header."""


def rendered(report: Report) -> str:
    """The file."""
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    title = f"{report.server.model}: {report.verdict}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
    )
    head.append(_style(style))
    body = tag("body", tag("main", *_parts(report)))
    return f"<!DOCTYPE html>\n{html(tag('html', head, body, lang='en'))}\n"


def _style(text: str) -> Element:
    element = tag("style")
    element.text = text
    return element


def _parts(report: Report) -> Iterator[Element]:
    yield _header(report)
    yield tag("section", tag("h2", "Groups"), _overview(report), class_="card")
    for group, members in groupby(report.checks, key=lambda check: check.group):
        rows = [_check(check, report) for check in members]
        yield tag("section", tag("h2", group), *rows, class_="card")
    if any(check.duration_seconds for check in report.checks):
        heading = tag("h2", "Where the time went")
        drawn = _scrolling("div", charts.timeline(report.checks), class_="chart")
        yield tag("section", heading, drawn, class_="card")
    if report.server.configuration:
        heading = tag("h2", "Configuration")
        yield tag("section", heading, _configuration(report.server.configuration), class_="card")
    yield tag("footer", f"holdfast verify {report.tool.version}, {report.schema}")


def _header(report: Report) -> Element:
    counted = [
        tag("span", f"{report.count(status)} {status}", class_=f"chip text-{status}")
        for status in CheckStatus
        if report.count(status)
    ]
    known = [_fact(name, told) for name, told in wording.facts(report)]
    verdict = tag("p", report.verdict, class_=f"verdict fill-{report.verdict}")
    heading = tag("div", tag("p", "Is what it answers right?", class_="faint"))
    heading.append(tag("h1", report.server.model))
    return tag(
        "header",
        tag("div", heading, verdict, class_="title"),
        charts.proportions(report),
        tag("p", *counted, class_="chips"),
        tag("p", f"{report.reason}.", class_="reason"),
        tag("dl", *known),
        class_="card",
    )


def _fact(name: str, told: str) -> Element:
    kind = "wide" if len(told) > _MAX_NARROW_CHARACTERS else "narrow"
    return tag("div", tag("dt", name), tag("dd", told), class_=kind)


def _configuration(configuration: Configuration) -> Element:
    rows = [
        tag("tr", tag("th", name), tag("td", tag("code", told)))
        for name, told in wording.settings(configuration)
    ]
    summary = tag("summary", tag("span", "Flags, variables and files of the model", class_="more"))
    return tag("details", summary, tag("table", *rows, class_="settings"))


def _overview(report: Report) -> Element:
    rows = []
    for group, members in groupby(report.checks, key=lambda check: check.group):
        checks = list(members)
        squares = [
            tag("span", _MARKS[one.status], class_=f"square fill-{one.status}", title=one.name)
            for one in checks
        ]
        made = [one for one in checks if one.status is not CheckStatus.SKIPPED]
        seconds = sum(one.duration_seconds for one in checks)
        well = [one for one in made if one.status in (CheckStatus.PASSED, CheckStatus.WARNED)]
        rows.append(
            tag(
                "tr",
                tag("th", group),
                tag("td", *squares),
                tag("td", f"{len(well)} of {len(made)}", class_="number"),
                tag("td", wording.duration(seconds), class_="number"),
            )
        )
    return tag("table", *rows, class_="overview")


def _check(check: CheckResult, report: Report) -> Element:
    summary = tag(
        "summary",
        tag("span", _MARKS[check.status], class_=f"square fill-{check.status}", title=check.status),
        tag("b", check.name),
        tag("span", *_prose(check.reason or check.proves), class_="said"),
        tag("span", wording.duration(check.duration_seconds), class_="number faint"),
    )
    row = tag("details", summary, *_details(check, report))
    if check.status in (CheckStatus.FAILED, CheckStatus.INCONCLUSIVE):
        row.set("open", "")
    return row


def _details(check: CheckResult, report: Report) -> Iterator[Element]:
    if check.reason:
        yield tag("p", *_prose(check.proves), class_="faint")
    if check.remedy:
        yield tag("p", "Remedy: ", tag("code", check.remedy))
    faults = [
        _fault(one, wording.own_command(report, check, one))
        for one in (*check.faults, *check.warnings)
    ]
    if faults:
        yield tag("ul", *faults)
    if check.numbers:
        yield tag("table", *map(_number, check.numbers), class_="numbers")
    for series in check.series:
        yield _scrolling("figure", tag("figcaption", series.name), charts.plot(series))
    if check.requests:
        yield _commands(*(wording.command(report, one) for one in check.requests))


def _commands(*commands: str) -> Element:
    lines = [tag("code", one) for one in commands]
    heading = tag("p", "To repeat it:", class_="faint")
    return tag("div", heading, _scrolling("div", *lines), class_="requests")


def _scrolling(name: str, /, *content: Element | str, **attributes: str) -> Element:
    """An element that may be larger than its place, which a keyboard can scroll, too.

    https://dequeuniversity.com/rules/axe/4.10/scrollable-region-focusable
    """
    return tag(name, *content, tabindex="0", **attributes)


def _prose(text: str) -> Iterator[Element | str]:
    """The text, with what stands between backticks as code."""
    parts = text.split("`")
    is_balanced = len(parts) % 2 == 1
    for index, part in enumerate(parts):
        if is_balanced and index % 2:
            yield tag("code", part)
        else:
            yield part if is_balanced or not index else f"`{part}"


def _fault(fault: Fault, command: str) -> Element:
    point = tag("li", *_prose(fault.what))
    if fault.answered:
        point.append(tag("code", fault.answered, class_="answered"))
    if command:
        point.append(_commands(command))
    return point


def _number(number: Number) -> Element:
    status = CheckStatus.PASSED if number.is_within else CheckStatus.FAILED
    kind = f"number text-{status}" if number.limit else "number"
    drawn = charts.gauge(number)
    return tag(
        "tr",
        tag("th", number.name),
        tag("td", wording.value(number), class_=kind),
        tag("td", *([drawn] if drawn is not None else [])),
        tag("td", wording.limit(number.limit, number.unit), class_="faint"),
    )
