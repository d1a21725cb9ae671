"""A real Chromium for the tests of pages, driven by Playwright: see `make browser-tools`."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from servers import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Scheme = Literal["light", "dark"]
PHONE_WIDTH, DESK_WIDTH = 375, 1440
DEADLINE_SECONDS = 180.0
PICTURES = "PICTURES"
"""The variable that names the directory for pictures of pages, such as docs/images."""
_STREAM = "/statusz/stream"
_BESIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_SERIOUS = {"serious", "critical"}

needs_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(
        shutil.which("chromium") is None or importlib.util.find_spec("playwright") is None,
        reason="there is no Chromium with Playwright: make browser-tools",
    ),
]


@dataclass(frozen=True, slots=True)
class Tab:
    """One page of a browser, and what its console says against it."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings, such as a violation of the content security policy. That the stream is
    refused or breaks off is not one: Chromium prints it whatever a page does."""

    def text(self, selector: str) -> str:
        """The text of the one element that a selector finds, as a reader sees it."""
        return str(self.page.locator(selector).inner_text())

    def texts(self, selector: str) -> list[str]:
        """The text of every element that a selector finds."""
        return [str(text) for text in self.page.locator(selector).all_inner_texts()]

    def until(self, condition: str, argument: object = None) -> None:
        """Wait until a function in JavaScript returns true.

        Playwright's own `wait_for_function` needs `eval` within the page, which the policy of the
        page forbids: https://github.com/microsoft/playwright/pull/36982.
        """
        wait_until(
            lambda: bool(self.page.evaluate(condition, argument)),
            deadline_seconds=DEADLINE_SECONDS,
            what=lambda: f"not {condition} with {argument} of:\n{self.text('body')}",
        )

    def until_text(self, selector: str, wanted: str) -> None:
        """Wait until the first element of a selector contains a text."""
        self.until(
            "([where, what]) => document.querySelector(where)?.textContent.includes(what)",
            [selector, wanted],
        )

    def retry(self) -> None:
        """Have the page connect now, unless it has done so by itself."""
        self.page.locator("#retry").dispatch_event("click")

    @property
    def pixels_beside(self) -> int:
        """How much wider than the screen the page is."""
        return int(self.page.evaluate(_BESIDE))

    def serious_findings(self) -> list[str]:
        """What axe finds that keeps people from using the page: https://www.deque.com/axe/."""
        from axe_playwright_python.sync_playwright import Axe

        found: list[dict[str, Any]] = Axe().run(self.page).response["violations"]
        return [
            f"{one['id']}: {node['html']}"
            for one in found
            if one["impact"] in _SERIOUS
            for node in one["nodes"]
        ]


def picture_directory(otherwise: Path) -> Path:
    """Where pictures are kept: where `PICTURES` says, or else."""
    return Path(os.environ.get(PICTURES) or otherwise)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser that ends with the block; while it runs, this thread can run no event loop."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox"],  # as root, Chromium starts only without it
            timeout=1000 * DEADLINE_SECONDS,
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def new_tab(
    browser: Browser, *, width: int = DESK_WIDTH, height: int = 900, scheme: Scheme = "light"
) -> Iterator[Tab]:
    """An empty page with storage of its own."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        timezone_id="UTC",
        reduced_motion="reduce",
    )
    try:
        page = context.new_page()
        page.set_default_timeout(1000 * DEADLINE_SECONDS)
        tab = Tab(page)
        page.on("console", lambda message: _note(tab, message))
        page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        yield tab
    finally:
        context.close()


def _note(tab: Tab, message: Any) -> None:
    is_of_stream = message.location.get("url", "").endswith(_STREAM)
    if message.type in {"error", "warning"} and not is_of_stream:
        tab.complaints.append(message.text)
