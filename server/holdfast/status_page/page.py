"""The status page of one server: what it records, serves and shows, made and ended together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cached_property

from starlette.routing import Route
from starlette.types import Scope

from holdfast.api.router import route_path
from holdfast.settings import PageSettings
from holdfast.status_page.activity import WatchedProgress
from holdfast.status_page.document import DocumentBuilder
from holdfast.status_page.feed import Feed
from holdfast.status_page.history import History, Sample
from holdfast.status_page.shell import StaticFiles, asks_for_text, shell_routes
from holdfast.status_page.sources import Sources
from holdfast.status_page.stream import stream_route
from holdfast.status_page.text import SharedText
from holdfast.telemetry.progress import Progress

_READING_METHODS = frozenset({"GET", "HEAD"})


class StatusPage:
    """Records what happens, and shows it to those that look. Belongs to one event loop.

    `progress` and `history` are to be told what happens, whether or not the page is on.
    """

    def __init__(
        self,
        settings: PageSettings,
        progress: Progress,
        sources: Callable[[], Sources],
        *,
        root_path: str = "",
    ) -> None:
        """Take the progress that shows a start; `sources` is called once, at its first use."""
        self._is_on = settings.is_on
        self._root_path = root_path
        self._make_sources = sources
        self.history = History(lambda: self._sources.generation())  # noqa: PLW0108 - made later
        self.progress = WatchedProgress(progress, self.history.state_changed)

    def routes(self) -> list[Route]:
        """Return the routes of the page and of its stream; none if it is off."""
        if not self._is_on:
            return []
        return [stream_route(self._feed), *shell_routes(self._shell, self._text.text)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Record what happens while entered; on leaving, say goodbye to all viewers."""
        status = self._sources.status()
        self.history.state_changed(status.state, status.reason)
        if not self._is_on:
            yield
            return
        async with self.history.sampled(self._sample), self._feed.running():
            yield

    def is_shell(self, scope: Scope) -> bool:
        """Whether a request is for a file of the page, which has no data and so needs no key."""
        if not self._is_on or scope["type"] != "http" or scope["method"] not in _READING_METHODS:
            return False
        path = route_path(scope["path"], self._root_path)
        return self._shell.is_shell(path, is_text=asks_for_text(scope["headers"]))

    @cached_property
    def _sources(self) -> Sources:
        return self._make_sources()

    @cached_property
    def _feed(self) -> Feed:
        return Feed(DocumentBuilder(self._sources, self.history, self.progress).build)

    @cached_property
    def _shell(self) -> StaticFiles:
        return StaticFiles.read()

    @cached_property
    def _text(self) -> SharedText:
        return SharedText(self._feed.current)

    def _sample(self) -> Sample:
        sources = self._sources
        running, _ = sources.queue()
        traffic = sources.traffic()
        return Sample(
            ranks=sources.status().ranks,
            prompt_tokens=traffic.prompt_tokens if traffic else 0,
            output_tokens=traffic.output_tokens if traffic else 0,
            first_token_seconds=traffic.take_first_tokens() if traffic else (),
            running=running,
            waiting=sources.requests().waiting,
            kv_used_ratio=max(sources.kv_used().values(), default=None),
            canary=sources.baseline.last().get("canary") if sources.baseline else None,
        )
