"""A status page behind all layers of the front end, and viewers of it on real sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from holdfast.api.admission import Admission
from holdfast.api.auth import KeyCheck, Keys
from holdfast.api.gate import Gate
from holdfast.api.limits import Limits
from holdfast.api.metrics import HttpCounts
from holdfast.api.request_log import RequestLog
from holdfast.api.router import OwnRoutes
from holdfast.records import Status
from holdfast.remote_server import server_verification
from holdfast.settings import KeySettings, LimitSettings, PageSettings
from holdfast.status_page import feed as feeds
from holdfast.status_page.page import StatusPage
from holdfast.status_page.sources import Sources
from holdfast.telemetry.counters import Refusals
from holdfast.telemetry.progress import LogProgress
from holdfast.top.reader import EventParser, Mirror, StatusEvent
from inner_app import InnerApp, View
from keep_alive import NO_KEEP_ALIVE
from listening import DEADLINE_SECONDS, Listening, listening
from sample_status import a_status

API_KEY = "the-api-key-of-these-tests"
HEADERS = {"authorization": f"Bearer {API_KEY}"}


class Viewer:
    """One that reads the stream, and what the stream has told so far."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.mirror = Mirror()
        self.events: list[StatusEvent] = []
        """All events in their order."""
        self.received = b""
        self._parts = response.aiter_raw()
        self._parser = EventParser()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Read until a condition holds.

        Raises:
            StopAsyncIteration: the stream ended before.
        """
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not condition():
                part = await anext(self._parts)
                self.received += part
                for event in self._parser.events(part):
                    self.events.append(event)
                    self.mirror.take(event)

    async def until_document(self, **members: Any) -> None:
        """Read until the document has these members."""
        await self.until(lambda: members.items() <= dict(self.mirror.document).items())

    async def until_end(self) -> None:
        """Read until the server ends the stream."""
        try:
            await self.until(lambda: False)
        except StopAsyncIteration:
            return


class ShownPage:
    """The page of a server whose status a test sets."""

    def __init__(
        self,
        *,
        has_key: bool = False,
        is_on: bool = True,
        root_path: str = "",
        limits: LimitSettings | None = None,
        **sources: Any,
    ) -> None:
        self.status: Status = a_status()
        self.limits = limits or LimitSettings()
        self.counts = HttpCounts()
        self.refusals = Refusals()
        self.page = StatusPage(
            PageSettings(is_on=is_on),
            LogProgress(logging.getLogger("test")),
            lambda: Sources(
                status=lambda: self.status,
                generation=lambda: self.status.engine.generation,
                restarts_left=lambda: 3,
                **sources,
            ),
            root_path=root_path,
        )
        # It stands, so no point of the curves changes the document in the middle of a test.
        self.page.history._clock = lambda: 0.0
        view = View()
        self.admission = Admission(view, probe_token="", refusals=self.refusals)
        never: Callable[[Any], bool] = lambda _: False  # noqa: E731 - nobody is the probe
        app = InnerApp()
        self.counts.add_routes(app.routes)
        inner = Limits(
            Gate(app, self.admission, root_path=root_path),
            self.limits,
            self.refusals,
            is_probe=never,
        )
        check = KeyCheck(
            OwnRoutes(self.page.routes(), inner, root_path=root_path),
            Keys.read((API_KEY,) if has_key else (), KeySettings()),
            self.refusals,
            is_probe=never,
            is_shell=self.page.is_shell,
            root_path=root_path,
        )
        self.app = RequestLog(check, is_on=False, on_finished=self.counts.count)

    @property
    def feed(self) -> feeds.Feed:
        """What serves the viewers."""
        return self.page._feed

    @asynccontextmanager
    async def served(self) -> AsyncIterator[tuple[Listening, httpx.AsyncClient]]:
        """While entered, the page is served; at the end its viewers are told, as in a server."""
        async with listening(self.app, self.limits, self.refusals) as server:
            base_url = f"http://127.0.0.1:{server.port}"
            async with (
                httpx.AsyncClient(
                    base_url=base_url,
                    timeout=DEADLINE_SECONDS,
                    verify=server_verification(base_url),
                    limits=NO_KEEP_ALIVE,
                ) as client,
                self.page.running(),
            ):
                yield server, client


@asynccontextmanager
async def viewing(
    client: httpx.AsyncClient, headers: Mapping[str, str] | None = None
) -> AsyncIterator[Viewer]:
    """While entered, the stream is open; its first event need not have come."""
    async with client.stream("GET", "/statusz/stream", headers=headers) as response:
        yield Viewer(response)
