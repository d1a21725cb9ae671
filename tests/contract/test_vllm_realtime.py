"""What a realtime transcription keeps of a client that says more than the model hears."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from vllm.entrypoints.speech_to_text.realtime.connection import RealtimeConnection

from holdfast.engine.realtime import bound_realtime_audio

SAMPLES = 1024**2


class Client:
    """A WebSocket whose client appends half a megasample at a time."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def send_text(self, text: str) -> None:
        """What vLLM answers."""
        self.told.append(json.loads(text))


def append() -> dict[str, str]:
    """An event with sound."""
    sound = base64.b64encode(bytes(SAMPLES))  # two bytes for each
    return {"type": "input_audio_buffer.append", "audio": sound.decode()}


def test_sound_that_nobody_hears_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too much is an error for the client; what was heard makes room again."""
    monkeypatch.setenv("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", "1")
    bound_realtime_audio()
    bound_realtime_audio()

    async def scene() -> tuple[int, int, int]:
        client = Client()
        connection = RealtimeConnection(client, None)
        for _ in range(5):
            await connection.handle_event(append())
        kept, refused = connection.audio_queue.qsize(), len(client.told)
        connection.audio_queue.get_nowait()
        await connection.handle_event(append())
        await connection.cleanup()  # it ends the stream, however full that is
        return kept, refused, connection.audio_queue.qsize()

    assert asyncio.run(scene()) == (2, 3, 3)
