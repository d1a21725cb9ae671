"""The page as text for clients that ask once: rendered beside the event loop, and shared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from holdfast.status_page.patch import StatusDocument
from holdfast.status_page.screen import as_text

REUSED_SECONDS = 1.0
"""Rendering takes up to a third of a second of a core, however many ask for it."""


class SharedText:
    """Renders one text at a time, in a thread. Belongs to one event loop."""

    def __init__(self, build: Callable[[], StatusDocument]) -> None:
        """Take what builds the document; it is called on the event loop."""
        self._build = build
        self._rendering: asyncio.Task[str] | None = None
        self._until_seconds = 0.0
        """When the last text is too old."""

    async def text(self) -> str:
        """Return the page as of now, or of at most a second before."""
        task = self._rendering
        if task is None or (task.done() and time.monotonic() >= self._until_seconds):
            task = asyncio.create_task(self._render(), name="page as text")
            self._rendering = task
        # A client that leaves must not end what others wait for.
        return await asyncio.shield(task)

    async def _render(self) -> str:
        rendered = await asyncio.to_thread(as_text, self._build(), time.time())
        self._until_seconds = time.monotonic() + REUSED_SECONDS
        return rendered
