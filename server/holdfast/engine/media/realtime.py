"""Bounds how much audio of realtime transcriptions waits in the front end, and for how long.

vLLM 0.32 keeps what a client appends until the model has processed it, without a bound: a WebSocket
that appends and never commits would take all memory. Nor does it end a transcription that gets no
more audio, so here such a one lends its capacity to other requests. It logs a traceback for each
event that it cannot read, which a client may send as often as it likes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.speech_to_text.realtime.connection import RealtimeConnection

from holdfast.engine.vllm_errors import capacity_lent
from holdfast.patches.patch import original, replace
from holdfast.request_context import current_request

CLIPS_OF_ALL = 8
"""All clients together may have as much audio waiting as this many of the longest clips."""
LEAST_SAMPLES = 64
"""What a piece of audio counts at least: an array takes as much memory as this many samples."""
PATIENCE_SECONDS = 2.0
"""How long a transcription waits for more audio before it lends its capacity. Clients send audio
every tenth of a second, and a speaker's pause is shorter."""


def bound_realtime_audio() -> None:
    """Have a connection refuse more audio than `VLLM_MAX_AUDIO_CLIP_FILESIZE_MB` has room for.

    A second call changes nothing.
    """
    begin_as_vllm = original(RealtimeConnection, "__init__")
    end_as_vllm = original(RealtimeConnection, "cleanup")
    budget = _AudioBudget()

    def begin(self: Any, *args: Any, **options: Any) -> None:
        begin_as_vllm(self, *args, **options)
        # vLLM counts the samples of one message in the same way.
        self.audio_queue = _AudioQueue(budget, self._max_audio_filesize_mb * 1024**2)

    async def end(self: Any) -> None:
        try:
            await end_as_vllm(self)
        finally:
            self.audio_queue.forget()

    replace(RealtimeConnection, "__init__", begin)
    replace(RealtimeConnection, "cleanup", end)


def report_wrong_events() -> None:
    """Tell the client about an event that cannot be read, and do not log it.

    A second call changes nothing.
    """
    handle_as_vllm = original(RealtimeConnection, "handle_event")

    async def handle(self: Any, event: Any) -> None:
        if not isinstance(event, dict):
            await self.send_error("An event must be an object", "invalid_event")
            return
        try:
            await handle_as_vllm(self, event)
        except ValidationError:
            await self.send_error("A field of the event is missing or wrong", "invalid_event")

    replace(RealtimeConnection, "handle_event", handle)


class _AudioBudget:
    """A budget for the samples of all connections. A key may have no more than remains free."""

    def __init__(self) -> None:
        self._samples: Counter[str] = Counter()

    def try_take(self, key: str, samples: int, most_samples: int) -> bool:
        """Take this many if the budget allows, and return whether it does."""
        free_samples = CLIPS_OF_ALL * most_samples - self._samples.total() - samples
        has_room = self._samples[key] + samples <= free_samples
        self._samples[key] += samples if has_room else 0
        return has_room

    def give_back(self, key: str, samples: int) -> None:
        self._samples[key] -= samples
        if not self._samples[key]:
            del self._samples[key]


class _AudioQueue(asyncio.Queue[Any]):
    """A queue of arrays of samples, and None after the last one."""

    def __init__(self, budget: _AudioBudget, most_samples: int) -> None:
        super().__init__()
        self._budget = budget
        self._key = current_request().key
        self._most_samples = most_samples
        self._samples = 0
        self._is_ended = False
        """Whether the latest item was None."""

    def put_nowait(self, item: Any) -> None:
        """Keep an item; ValueError, which vLLM reports to the client, if it is too much."""
        if item is None and self._is_ended and not self.empty():
            return  # vLLM stops at the None that waits
        samples = _samples_of(item)
        if self._samples + samples > self._most_samples:
            raise ValueError(
                f"more than {self._most_samples} audio samples are waiting to be processed"
            )
        if samples and not self._budget.try_take(self._key, samples, self._most_samples):
            raise ValueError("too much audio from all clients is waiting to be processed")
        self._samples += samples
        self._is_ended = item is None
        super().put_nowait(item)

    async def get(self) -> Any:
        """Return the next item; while none comes for long, lend the capacity to other requests.

        Raises:
            GracefulHTTPError: there was no capacity any more when it came.
        """
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await super().get()
        except TimeoutError:
            async with capacity_lent():
                return await super().get()

    def forget(self) -> None:
        """Drop what is left."""
        while not self.empty():
            self.get_nowait()

    def _get(self) -> Any:
        item = super()._get()
        samples = _samples_of(item)
        self._samples -= samples
        self._budget.give_back(self._key, samples)
        return item


def _samples_of(item: Any) -> int:
    return 0 if item is None else max(len(item), LEAST_SAMPLES)
