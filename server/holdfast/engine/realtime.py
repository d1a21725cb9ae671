"""How much sound of a realtime transcription waits in the front end? No more than one clip has.

vLLM 0.32 keeps what a client appends until the model has heard it, without a bound: a WebSocket
that appends and never commits would take all memory.
"""

from __future__ import annotations

import asyncio
from typing import Any

from vllm.entrypoints.speech_to_text.realtime.connection import RealtimeConnection

_MARK = "is_bounded"


def bound_realtime_audio() -> None:
    """Have a connection refuse what is more than `VLLM_MAX_AUDIO_CLIP_FILESIZE_MB` has room for.

    Again changes nothing.
    """
    original = RealtimeConnection.__init__
    if hasattr(original, _MARK):
        return

    def begin(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        # As vLLM counts those of one message.
        self.audio_queue = _Sound(self._max_audio_filesize_mb * 1024**2)

    setattr(begin, _MARK, True)
    RealtimeConnection.__init__ = begin


class _Sound(asyncio.Queue[Any]):
    """Arrays of samples, and None after the last one."""

    def __init__(self, most_samples: int) -> None:
        super().__init__()
        self._most_samples = most_samples
        self._samples = 0

    def put_nowait(self, item: Any) -> None:
        """Keep it; a ValueError, which vLLM tells the client, if it is too much."""
        samples = 0 if item is None else len(item)
        if self._samples + samples > self._most_samples:
            raise ValueError(f"more than {self._most_samples} samples wait to be heard")
        self._samples += samples
        super().put_nowait(item)

    def _get(self) -> Any:
        item = super()._get()
        self._samples -= 0 if item is None else len(item)
        return item
