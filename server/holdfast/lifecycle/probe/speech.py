"""A transcription of silence: what a model is asked that takes audio in place of tokens."""

from __future__ import annotations

import io
import wave
from functools import cache
from importlib.util import find_spec

import httpx

from holdfast.errors import ProbeFailedError
from holdfast.lifecycle.probe import wire
from holdfast.records import EngineFacts

TRANSCRIPTIONS = "/v1/audio/transcriptions"
CLIP_SECONDS = 30
"""vLLM cuts what is longer into clips of this length, so that no encoder is given more (0.32)."""
_SAMPLES_A_SECOND = 16_000
_DECODERS = ("soundfile", "av", "torchcodec")
"""The packages by one of which vLLM reads audio; none of them comes with vLLM itself."""


async def transcribe(client: httpx.AsyncClient, facts: EngineFacts, tokens: int) -> None:
    """Have the longest clip of silence transcribed, in at most so many tokens.

    Raises:
        ProbeFailedError: there is no whole answer.
    """
    message = wire.Message(TRANSCRIPTIONS, {})
    form = {"model": facts.model, "max_completion_tokens": str(tokens), "temperature": "0"}
    clip = {"file": ("silence.wav", silence(), "audio/wav")}
    try:
        response = await client.post(message.path, data=form, files=clip, timeout=None)
    except httpx.HTTPError as error:
        raise ProbeFailedError(wire.broken(message, error)) from error
    if response.status_code != httpx.codes.OK:
        refusal = wire.refusal(message, response.status_code, response.text)
        raise ProbeFailedError(refusal + _missing_decoder())
    if not isinstance(wire.parsed(message, response.text).get("text"), str):
        raise ProbeFailedError(f"{message.path} answered without text.")


@cache
def silence() -> bytes:
    """A WAV file of `CLIP_SECONDS` of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(_SAMPLES_A_SECOND)
        audio.writeframes(bytes(2 * _SAMPLES_A_SECOND * CLIP_SECONDS))
    return file.getvalue()


def _missing_decoder() -> str:
    if any(map(find_spec, _DECODERS)):
        return ""
    return " (no installed package decodes audio: pip install 'vllm[audio]')"
