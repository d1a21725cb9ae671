"""What the media of one request may take: pixels, downloaded bytes, time, and fetches at once.

The budgets are those of the request that is served, and not of a connector of vLLM's: it makes one
for each message of a chat, and one for all requests to `/v1/systemone` (0.32, 0.33).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from vllm import envs

from holdfast.request_context import current_request

FRAMES_OF_PIXELS = 2
"""One request may hold this many of the largest images: 1 GiB, or 32 frames of 4K."""
MAX_CONCURRENT = 8
"""Concurrent fetches for one request."""
MIB = 1024 * 1024


class MediaBudget:
    """A number of pixels or bytes; any thread may use it."""

    def __init__(self, most: int) -> None:
        """Allow at most `most`; without a bound if that is 0 or less."""
        self.most = most
        self._held = 0
        self._lock = threading.Lock()

    def try_take(self, amount: int) -> bool:
        """Take this many if the budget allows, and return whether it does."""
        with self._lock:
            has_room = self.most <= 0 or self._held + amount <= self.most
            self._held += amount if has_room else 0
            return has_room

    def give_back(self, amount: int) -> None:
        with self._lock:
            self._held -= amount


class MediaBudgets:
    """The budgets of one request."""

    def __init__(self) -> None:
        self.pixels = MediaBudget(pixels_a_request())
        self.bytes = MediaBudget(max(envs.VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB, 1) * MIB)
        self.slots = asyncio.Semaphore(MAX_CONCURRENT)
        """For fetches on the event loop; a thread fetches one after another."""
        self.first_fetched: tuple[str, bytes] | None = None
        """The URL and the body of the first medium that a thread has fetched."""
        self._lock = threading.Lock()
        self._fetches = 0
        self._since_seconds = 0.0
        self._fetched_seconds = 0.0

    @contextmanager
    def fetching(self, most_seconds: float) -> Iterator[float]:
        """Count the time while entered, concurrent fetches once; yield what is left of the most."""
        with self._lock:
            now_seconds = time.monotonic()
            if not self._fetches:
                self._since_seconds = now_seconds
            self._fetches += 1
            taken_seconds = self._fetched_seconds + now_seconds - self._since_seconds
        try:
            yield most_seconds - taken_seconds
        finally:
            with self._lock:
                self._fetches -= 1
                if not self._fetches:
                    self._fetched_seconds += time.monotonic() - self._since_seconds


def budgets_of_request() -> MediaBudgets:
    """Return the budgets of the request that the running task serves, made at its first medium."""
    context = current_request()
    if context.media is None:
        context.media = MediaBudgets()
    budgets: MediaBudgets = context.media
    return budgets


def pixels_a_request() -> int:
    """Return how many decoded pixels a request may hold."""
    return FRAMES_OF_PIXELS * int(envs.VLLM_MAX_IMAGE_PIXELS)
