"""The report of `holdfast verify` in a real Chromium, on a phone and on a desk, light and dark."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from browsers import DESK_WIDTH, PHONE_WIDTH, Scheme, Tab, chromium, needs_browser, new_tab
from holdfast.configuration_record import ModelFile
from holdfast.verify.records import CheckStatus, Fault, Number, Report, Series, at_least, at_most
from holdfast.verify.report import page
from openai_double import OpenAIDouble
from sample_reports import SERVED, SERVER, check, report
from verified import verified

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = needs_browser
LONG = "registry.example.com/" + "deep/" * 20 + "holdfast@sha256:" + "cd" * 32
OPEN_ALL = "document.querySelectorAll('details').forEach(one => { one.open = true })"
OPENED = "[...document.querySelectorAll('details[open] b')].map(one => one.textContent)"
LIGHTNESS = """getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3)
  .reduce((sum, channel) => sum + Number(channel), 0)"""
on_every_screen = pytest.mark.parametrize("width", [PHONE_WIDTH, DESK_WIDTH])
in_every_scheme = pytest.mark.parametrize("scheme", ["light", "dark"])


def full_report() -> Report:
    """A report with every kind of result and of drawing, and with names that are long."""
    noise = tuple((position, abs(math.sin(position)) / 2) for position in range(300))
    agreement = replace(
        check(
            "agreement_under_a_name_that_is_rather_long",
            CheckStatus.FAILED,
            Number("median difference", 0.25, "nat", at_most(0.5, "A/A")),
            Number("largest difference", 1.7, "nat", at_most(0.9, "A/A")),
            Number("right answers", 80, "%", at_least(75, "baseline"), of=100),
            why="it differs",
        ),
        series=(Series("by position", "position", "difference [nat]", noise, at_most(0.4)),),
        faults=(Fault("it differs", None, "x" * 300),),
        duration_seconds=41.0,
    )
    served = replace(
        SERVED,
        image=LONG,
        flags=(*SERVED.flags, f"--chat-template={LONG}"),
        files=tuple(ModelFile(f"model-{n:05}.safetensors", n, "ab" * 32) for n in range(20)),
    )
    others = [
        check(status.value, status, why="because") for status in CheckStatus if status != "passed"
    ]
    server = replace(SERVER, configuration=served, model="deepseek-ai/DeepSeek-V4-Flash-Instruct")
    return report(check("chat"), agreement, *others, server=server)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What a run has written, and a report with all that there may be in one."""
    directory = tmp_path_factory.mktemp("pages")
    run = asyncio.run(verified(OpenAIDouble("no such capital"), directory))
    full = directory / "full.html"
    full.write_text(page.rendered(full_report()))
    return {"run": run.directory / "report.html", "full": full}


@pytest.fixture(scope="module")
def browser(pages: dict[str, Path]) -> Iterator[Browser]:
    """One browser for all tests of this file; the run is over, since it needs an event loop."""
    assert pages
    with chromium() as started:
        yield started


def loaded_by(tab: Tab, path: Path) -> list[str]:
    """Open a file; the addresses of everything that it has asked for."""
    loaded: list[str] = []
    tab.page.on("request", lambda request: loaded.append(request.url))
    tab.page.goto(path.as_uri())
    return loaded


@in_every_scheme
@on_every_screen
@pytest.mark.parametrize("name", ["run", "full"])
def test_the_page_fits_and_everybody_can_read_it(
    browser: Browser, pages: dict[str, Path], name: str, width: int, scheme: Scheme
) -> None:
    """With all open, nothing is loaded, run, complained of or cut off; axe finds no barrier."""
    with new_tab(browser, width=width, scheme=scheme) as tab:
        assert loaded_by(tab, pages[name]) == [pages[name].as_uri()]
        tab.page.evaluate(OPEN_ALL)
        assert tab.page.evaluate("document.scripts.length") == 0
        assert tab.pixels_beside == 0
        assert tab.serious_findings() == []
        assert tab.complaints == []


def test_the_schemes_differ(browser: Browser, pages: dict[str, Path]) -> None:
    """A dark page is dark."""
    lightness = {}
    schemes: tuple[Scheme, ...] = ("light", "dark")
    for scheme in schemes:
        with new_tab(browser, scheme=scheme) as tab:
            tab.page.goto(pages["run"].as_uri())
            lightness[scheme] = tab.page.evaluate(LIGHTNESS)
    assert lightness["dark"] < 100
    assert lightness["light"] > 600


def test_what_failed_is_open(browser: Browser, pages: dict[str, Path]) -> None:
    """A reader sees first what is wrong, and how to repeat it."""
    with new_tab(browser, width=PHONE_WIDTH) as tab:
        tab.page.goto(pages["run"].as_uri())
        assert tab.page.evaluate(OPENED) == ["capital"]
