"""What a realtime transcription keeps of a client that says more than the model hears."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.websockets import WebSocketDisconnect
from vllm.entrypoints.speech_to_text.realtime.connection import RealtimeConnection
from vllm.sampling_params import SamplingParams

from holdfast.engine.media import realtime
from holdfast.engine.media.realtime import (
    CLIPS_OF_ALL,
    LEAST_SAMPLES,
    bound_realtime_audio,
    report_wrong_events,
)
from holdfast.engine.proxy import EngineProxy
from holdfast.request_context import REQUEST, RequestContext
from scripted_capacity import ScriptedCapacity, ScriptedSession

SAMPLES = 1024**2


class Client:
    """A WebSocket whose client says what it is given, and leaves."""

    def __init__(self, says: Iterable[str] = ()) -> None:
        self.told: list[Any] = []
        self._says = iter(says)

    async def accept(self) -> None:
        """Its handshake is done."""

    async def receive_text(self) -> str:
        """What it says next."""
        for text in self._says:
            return text
        raise WebSocketDisconnect

    async def send_text(self, text: str) -> None:
        """What vLLM answers."""
        self.told.append(json.loads(text))


def append(samples: int = SAMPLES // 2) -> dict[str, str]:
    """An event with sound."""
    sound = base64.b64encode(bytes(2 * samples))
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


def test_many_short_sounds_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is an array, however few samples it has; and the end of the sound is kept once."""
    monkeypatch.setenv("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", "1")
    bound_realtime_audio()

    async def scene() -> tuple[int, int, int]:
        connection = RealtimeConnection(Client(), None)
        connection._is_model_validated = True
        await connection.handle_event(append(SAMPLES - 2 * LEAST_SAMPLES))
        for _ in range(5):
            await connection.handle_event(append(1))
        kept = connection.audio_queue.qsize()
        for _ in range(5):
            await connection.handle_event({"type": "input_audio_buffer.commit", "final": True})
        ended = connection.audio_queue.qsize()
        await connection.cleanup()
        return kept, ended, connection.audio_queue.qsize()

    assert asyncio.run(scene()) == (3, 4, 0)


@pytest.mark.parametrize(
    "message", ["[]", "7", "null", '{"type": "input_audio_buffer.append"}', "no JSON"]
)
def test_a_wrong_event_is_told_and_not_logged(
    message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that sends them all day would fill the log with tracebacks."""
    monkeypatch.setattr("vllm.entrypoints.speech_to_text.realtime.connection.logger", logging.root)
    report_wrong_events()
    report_wrong_events()
    client = Client([message])
    asyncio.run(RealtimeConnection(client, None).handle_connection())
    assert [one["type"] for one in client.told] == ["session.created", "error"]
    assert caplog.records == []


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
