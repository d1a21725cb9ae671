"""Bounds how much sound of realtime transcriptions waits in the front end, and for how long.

vLLM 0.32 keeps what a client appends until the model has heard it, without a bound: a WebSocket
that appends and never commits would take all memory. Neither does it end a transcription whose
client says nothing more: the place in the engine is for others then.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from vllm.entrypoints.speech_to_text.realtime.connection import RealtimeConnection

from holdfast.patches.absence import away_from_engine
from holdfast.patches.replaced import original, replace
from holdfast.request_context import current_request

CLIPS_OF_ALL = 8
"""How many of the longest clips may wait, for all clients together."""
PATIENCE_SECONDS = 2.0
"""How long a transcription waits for more sound before others get its place. Clients send sound
every tenth of a second, and a speaker's pause is shorter."""


def bound_realtime_audio() -> None:
    """Have a connection refuse what is more than `VLLM_MAX_AUDIO_CLIP_FILESIZE_MB` has room for.

    Again changes nothing.
    """
    begin_as_vllm = original(RealtimeConnection, "__init__")
    end_as_vllm = original(RealtimeConnection, "cleanup")
    sounds = _Sounds()

    def begin(self: Any, *args: Any, **options: Any) -> None:
        begin_as_vllm(self, *args, **options)
        # As vLLM counts those of one message.
        self.audio_queue = _Sound(sounds, self._max_audio_filesize_mb * 1024**2)

    async def end(self: Any) -> None:
        try:
            await end_as_vllm(self)
        finally:
            self.audio_queue.forget()

    replace(RealtimeConnection, "__init__", begin)
    replace(RealtimeConnection, "cleanup", end)


class _Sounds:
    """Of all connections. A key may have no more than it leaves free, so that others have some."""

    def __init__(self) -> None:
        self._samples: Counter[str] = Counter()

    def has_taken(self, key: str, samples: int, most_samples: int) -> bool:
        """Take this many more if there is room, and tell whether; they count until given back."""
        free_samples = CLIPS_OF_ALL * most_samples - self._samples.total() - samples
        has_room = self._samples[key] + samples <= free_samples
        self._samples[key] += samples if has_room else 0
        return has_room

    def give_back(self, key: str, samples: int) -> None:
        self._samples[key] -= samples
        if not self._samples[key]:
            del self._samples[key]


class _Sound(asyncio.Queue[Any]):
    """Arrays of samples, and None after the last one."""

    def __init__(self, sounds: _Sounds, most_samples: int) -> None:
        super().__init__()
        self._sounds = sounds
        self._key = current_request().key
        self._most_samples = most_samples
        self._samples = 0

    def put_nowait(self, item: Any) -> None:
        """Keep it; a ValueError, which vLLM tells the client, if it is too much."""
        samples = _samples_of(item)
        if self._samples + samples > self._most_samples:
            raise ValueError(
                f"more than {self._most_samples} audio samples are waiting to be processed"
            )
        if samples and not self._sounds.has_taken(self._key, samples, self._most_samples):
            raise ValueError("too much audio from all clients is waiting to be processed")
        self._samples += samples
        super().put_nowait(item)

    async def get(self) -> Any:
        """The next; while none comes for long, others have the place in the engine.

        Raises:
            GracefulHTTPError: there was no place any more when it came.
        """
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await super().get()
        except TimeoutError:
            async with away_from_engine():
                return await super().get()

    def forget(self) -> None:
        """Nobody will hear what is left."""
        while not self.empty():
            self.get_nowait()

    def _get(self) -> Any:
        item = super()._get()
        samples = _samples_of(item)
        self._samples -= samples
        self._sounds.give_back(self._key, samples)
        return item


def _samples_of(item: Any) -> int:
    return 0 if item is None else len(item)
