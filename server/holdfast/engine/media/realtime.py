"""Bounds how much audio of realtime transcriptions waits in the front end, and for how long.

vLLM 0.32 keeps what a client appends until the model has processed it, without a bound: a WebSocket
that appends and never commits would take all memory. Nor does it end a transcription that gets no
more audio, so here such a one lends its capacity to other requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from vllm.entrypoints.speech_to_text.realtime.connection import RealtimeConnection

from holdfast.engine.vllm_errors import capacity_lent
from holdfast.patches.patch import original, replace
from holdfast.request_context import current_request

CLIPS_OF_ALL = 8
"""All clients together may have as much audio waiting as this many of the longest clips."""
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

    def put_nowait(self, item: Any) -> None:
        """Keep an item; ValueError, which vLLM reports to the client, if it is too much."""
        samples = _samples_of(item)
        if self._samples + samples > self._most_samples:
            raise ValueError(
                f"more than {self._most_samples} audio samples are waiting to be processed"
            )
        if samples and not self._budget.try_take(self._key, samples, self._most_samples):
            raise ValueError("too much audio from all clients is waiting to be processed")
        self._samples += samples
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
    return 0 if item is None else len(item)
