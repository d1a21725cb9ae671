"""The report of `holdfast verify` in a real browser, on a phone and on a desk, light and dark."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.configuration_record import ModelFile
from holdfast.verify.records import Fault, Number, Report, Series, Status, at_least, at_most
from holdfast.verify.report import page
from openai_double import OpenAIDouble
from ops_tests import browser
from ops_tests.browser import Scheme, Tab
from sample_reports import SERVED, SERVER, check, report
from verified import verified

PHONE, DESK = 375, 1280
LONG = "registry.example.com/" + "deep/" * 20 + "holdfast@sha256:" + "cd" * 32
BESIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
OPEN_ALL = "document.querySelectorAll('details').forEach(one => { one.open = true })"
CONTRASTS = """(() => {
  const channels = (color) => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const luminance = (color) => {
    const [red, green, blue] = channels(color).map((one) => one / 255)
      .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ground = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return color === "rgba(0, 0, 0, 0)" ? ground(element.parentElement) : color;
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
    if (!own || element.closest("svg, style")) continue;
    const [one, other] = [getComputedStyle(element).color, ground(element)].map(luminance);
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    found.push([ratio, element.className + " " + element.textContent.slice(0, 40)]);
  }
  return found;
})()"""
"""The contrast of each text with what is behind it, and the beginning of the text."""

pytestmark = [
    pytest.mark.skipif(
        shutil.which(browser.NAME) is None, reason="there is no Chromium: apt-get install chromium"
    ),
    pytest.mark.timeout(600),
]
on_every_screen = pytest.mark.parametrize("width", [PHONE, DESK])
in_every_scheme = pytest.mark.parametrize("scheme", ["light", "dark"])


def full_report() -> Report:
    """A report with every kind of result and of drawing, and with names that are long."""
    noise = tuple((position, abs(math.sin(position)) / 2) for position in range(300))
    roads = replace(
        check(
            "roads_of_a_name_that_is_rather_long",
            Status.FAILED,
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
    others = [check(status.value, status, why="because") for status in Status if status != "passed"]
    server = replace(SERVER, configuration=served, model="deepseek-ai/DeepSeek-V4-Flash-Instruct")
    return report(check("chat"), roads, *others, server=server)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What a run has written, and a report with all that there may be in one."""
    directory = tmp_path_factory.mktemp("pages")
    run = asyncio.run(verified(OpenAIDouble("no such capital"), directory))
    full = directory / "full.html"
    full.write_text(page.rendered(full_report()))
    return {"run": run.directory / "report.html", "full": full}


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    """A page that is still empty."""
    with browser.tab(tmp_path / "chromium") as opened:
        yield opened


@in_every_scheme
@on_every_screen
@pytest.mark.parametrize("name", ["run", "full"])
def test_the_page_fits_and_is_quiet(
    tab: Tab, pages: dict[str, Path], name: str, width: int, scheme: Scheme
) -> None:
    """Nothing else is loaded, run or complained of; with all open, nothing is cut off or beside."""
    tab.open(pages[name], width, scheme)
    tab.evaluate(OPEN_ALL)
    assert tab.evaluate("document.scripts.length") == 0
    assert tab.loaded == [pages[name].as_uri()]
    assert tab.complaints == []
    assert tab.evaluate("window.innerWidth") == width
    assert tab.evaluate(BESIDE) == 0


@in_every_scheme
def test_every_text_can_be_read(tab: Tab, pages: dict[str, Path], scheme: Scheme) -> None:
    """Its contrast is that of WCAG's level AA, https://www.w3.org/TR/WCAG22/#contrast-minimum.

    The marks of a status are large and bold, and are repeated in words.
    """
    tab.open(pages["full"], DESK, scheme)
    tab.evaluate(OPEN_ALL)
    found = tab.evaluate(CONTRASTS)
    assert len(found) > 100
    assert [one for one in found if one[0] < (3 if "square" in one[1] else 4.5)] == []


def test_the_schemes_differ(tab: Tab, pages: dict[str, Path]) -> None:
    """A dark page is dark."""
    lightness = {}
    for scheme in ("light", "dark"):
        tab.open(pages["run"], DESK, scheme)
        color = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        lightness[scheme] = sum(map(int, color[4:-1].split(",")))
    assert lightness["dark"] < 100
    assert lightness["light"] > 600


def test_what_failed_is_open(tab: Tab, pages: dict[str, Path]) -> None:
    """A reader sees first what is wrong, and how to repeat it."""
    tab.open(pages["run"], PHONE, "light")
    opened = tab.evaluate(
        "[...document.querySelectorAll('details[open] b')].map(one => one.textContent)"
    )
    assert opened == ["capital"]
