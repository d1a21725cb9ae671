"""Opens a page in Chromium, and says what a reader would meet there.

Chromium is driven by its own protocol: https://chromedevtools.github.io/devtools-protocol/.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
from websockets.sync.client import ClientConnection, connect

from servers import wait_until

NAME = "chromium"
Scheme = Literal["light", "dark"]
DEADLINE_SECONDS = 60.0
_COMPLAINTS = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")


class Tab:
    """One page that is open."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._events: list[dict[str, Any]] = []

    def open(self, page: Path, width: int, scheme: Scheme) -> None:
        """Load a file as a screen of this width, in CSS pixels, and this colour scheme has it."""
        self._events.clear()
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=page.as_uri())
        while not self._named("Page.loadEventFired"):
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in JavaScript, which stands outside of the page."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    @property
    def loaded(self) -> list[str]:
        """The address of everything that was asked for."""
        sent = self._named("Network.requestWillBeSent")
        return [one["params"]["request"]["url"] for one in sent]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """What the console shows."""
        return self._named(*_COMPLAINTS)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (told := self._receive()).get("id") != number:
            pass
        assert "error" not in told, told
        return dict(told["result"])

    def _named(self, *methods: str) -> list[dict[str, Any]]:
        return [one for one in self._events if one["method"] in methods]

    def _receive(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self._socket.recv(timeout=DEADLINE_SECONDS))
        if "method" in told:
            self._events.append(told)
        return told


@contextmanager
def tab(directory: Path) -> Iterator[Tab]:
    """An empty page of a Chromium of its own, which keeps its files in `directory`."""
    command = [
        *(NAME, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--remote-debugging-port=0", f"--user-data-dir={directory}", "about:blank"),
    ]
    silent = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=silent, stderr=silent) as browser:
        try:
            with connect(_address(directory), max_size=None) as socket:
                yield Tab(socket)
        finally:
            browser.kill()


def _address(directory: Path) -> str:
    """Where the first page of a browser listens, once it does."""
    told = directory / "DevToolsActivePort"

    def found() -> str:
        if not told.is_file() or not (lines := told.read_text().splitlines()):
            return ""
        try:
            pages = httpx.get(f"http://127.0.0.1:{lines[0]}/json/list", trust_env=False).json()
        except httpx.TransportError:
            return ""
        return next((one["webSocketDebuggerUrl"] for one in pages if one["type"] == "page"), "")

    return wait_until(found, deadline_seconds=DEADLINE_SECONDS, what=lambda: "no browser answers")
