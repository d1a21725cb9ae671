"""What a realtime transcription keeps of a client that says more than the model hears."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.speech_to_text.realtime.connection import RealtimeConnection
from vllm.sampling_params import SamplingParams

from holdfast.engine.media import realtime
from holdfast.engine.media.realtime import CLIPS_OF_ALL, bound_realtime_audio
from holdfast.engine.proxy import EngineProxy
from holdfast.request_context import REQUEST, RequestContext
from scripted_capacity import ScriptedCapacity, ScriptedSession

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

    assert asyncio.run(scene()) == (2, 3, 0)


def test_the_sound_of_all_clients_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is some left for another key, and for the next when a client leaves."""
    monkeypatch.setenv("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", "1")
    bound_realtime_audio()

    async def begun(key: str) -> RealtimeConnection:
        REQUEST.set(RequestContext(key=key))
        connection = RealtimeConnection(Client(), None)
        for _ in range(2):
            await connection.handle_event(append())
        return connection

    async def scene() -> tuple[int, int, int]:
        many = [await asyncio.create_task(begun("many")) for _ in range(CLIPS_OF_ALL)]
        kept = sum(one.audio_queue.qsize() for one in many)
        other = await asyncio.create_task(begun("other"))
        for one in many:
            await one.cleanup()
        again = await asyncio.create_task(begun("many"))
        return kept, other.audio_queue.qsize(), again.audio_queue.qsize()

    assert asyncio.run(scene()) == (CLIPS_OF_ALL, 2, 2)


def test_a_transcription_whose_client_says_nothing_has_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until it says something; sound that is there already is taken at once."""
    monkeypatch.setattr(realtime, "PATIENCE_SECONDS", 0.05)
    bound_realtime_audio()

    async def scene() -> list[str]:
        capacity = ScriptedCapacity()
        REQUEST.set(RequestContext(capacity=capacity))
        connection = RealtimeConnection(Client(), None)
        await connection.handle_event(append())
        sound = connection.audio_stream_generator()
        await anext(sound)
        assert not capacity.said
        waiting = asyncio.create_task(anext(sound))
        await capacity.given.wait()
        await connection.handle_event(append())
        await waiting
        return capacity.said

    assert asyncio.run(scene()) == ["given", "taken"]


def test_a_call_of_a_session_has_capacity_until_it_ends() -> None:
    """Also when its caller leaves it."""

    class Engine:
        """It answers twice."""

        vllm_config: Any = None
        renderer = input_processor = vllm_config
        model_config = SimpleNamespace(max_model_len=64)

        async def generate(self, **_arguments: Any) -> AsyncIterator[Any]:
            for _ in range(2):
                yield SimpleNamespace(finished=False, outputs=[], prompt_token_ids=[1])

    async def scene() -> list[str]:
        session = ScriptedSession()
        REQUEST.set(RequestContext(session=session))
        proxy, engine = EngineProxy(), Engine()
        proxy.use(engine)
        proxy.requests.engine_started(engine, 1)
        proxy.requests.open()
        outputs = proxy.generate(prompt=None, sampling_params=SamplingParams(), request_id="one")
        await anext(outputs)
        session.said.append("answered")
        await outputs.aclose()  # type: ignore[attr-defined]  # it is a generator
        return session.said

    assert asyncio.run(scene()) == ["called", "answered", "done"]
