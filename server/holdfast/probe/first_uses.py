"""The steps that prove what only some requests use: ways to sample, an image, an adapter, speech.

Their kernels compile and allocate at first use, which should not be the use of a client.
"""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import wave
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from random import Random
from types import MappingProxyType
from typing import Any

import httpx

from holdfast.errors import ProbeFailedError
from holdfast.probe import client, measure
from holdfast.probe.client import ProbeRequestBody
from holdfast.probe.session import ProbeSession, StepResult
from holdfast.probe.sizes import full_prompt_tokens
from holdfast.records import EngineFacts

TRANSCRIPTIONS = "/v1/audio/transcriptions"
CLIP_SECONDS = 30
"""The length of the clips into which vLLM cuts longer audio for most models.

For others, a clip has another length or none (`SpeechToTextConfig.max_audio_clip_s`, 0.32).
"""
SAMPLED_PROMPT_TOKENS, SAMPLED_OUTPUT_TOKENS = 8, 2
IMAGE_OUTPUT_TOKENS = 2
ADAPTER_PROMPT_TOKENS = 8
ADAPTER_OUTPUT_TOKENS = 8

_DRAWN: Mapping[str, ProbeRequestBody] = MappingProxyType(
    {
        "top_p": {"temperature": 1.0, "top_p": 0.9},
        "top_k": {"temperature": 1.0, "top_k": 5},
        "top_k and top_p": {"temperature": 1.0, "top_k": 5, "top_p": 0.9},
    }
)
_TOP_LOGPROBS = (0, 2, 5, 10, 15, 20)
"""With the sampled token: one, a multiple of 16, and one for each greater power of two.

Triton compiles vLLM's kernel for each of them (0.32 `_topk_log_softmax_kernel`).
"""
_SAMPLES_PER_SECOND = 16_000
_DECODERS = ("soundfile", "av", "torchcodec")
"""The packages that vLLM can read audio with. vLLM installs none of them."""
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_BIT_DEPTH, _PNG_RGB = 8, 2


async def transcribe(http: httpx.AsyncClient, facts: EngineFacts, tokens: int) -> None:
    """Have a clip of silence transcribed, in at most `tokens` tokens.

    Raises:
        ProbeFailedError: the answer is not whole.
    """
    message = client.Message(TRANSCRIPTIONS, {})
    form = {"model": facts.model, "max_completion_tokens": str(tokens), "temperature": "0"}
    clip = {"file": ("silence.wav", silence(), "audio/wav")}
    try:
        response = await http.post(message.path, data=form, files=clip, timeout=None)
    except httpx.HTTPError as error:
        raise ProbeFailedError(client.broken(message, error)) from error
    if response.status_code != httpx.codes.OK:
        refusal = client.refusal(message, response.status_code, response.text)
        raise ProbeFailedError(refusal + _missing_decoder())
    if not isinstance(client.parsed(message, response.text).get("text"), str):
        raise ProbeFailedError(f"{message.path} answered without text.")


@cache
def silence() -> bytes:
    """Make a WAV file of `CLIP_SECONDS` of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(_SAMPLES_PER_SECOND)
        audio.writeframes(bytes(2 * _SAMPLES_PER_SECOND * CLIP_SECONDS))
    return file.getvalue()


def _missing_decoder() -> str:
    if any(map(find_spec, _DECODERS)):
        return ""
    return " (no installed package decodes audio: pip install 'vllm[audio]')"


def image_chat(
    facts: EngineFacts, width: int, height: int, random: Random, tokens: int
) -> ProbeRequestBody:
    """Make a chat about a unique image, so that no cache of encoded images shortcuts it."""
    encoded = base64.b64encode(png(width, height, random.randbytes(3))).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        {"type": "text", "text": "Say one word."},
    ]
    return {
        "model": facts.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0.0,
    }


def png(width: int, height: int, colour: bytes) -> bytes:
    """Make a PNG file of one colour (https://www.w3.org/TR/png-3/)."""
    header = struct.pack(">IIBBBBB", width, height, _PNG_BIT_DEPTH, _PNG_RGB, 0, 0, 0)
    packer = zlib.compressobj(1)
    row = b"\0" + colour * width
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    return _PNG_SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


async def first_sampling(session: ProbeSession) -> StepResult:
    """Prove requests that are alone, with every way to draw a token and to report log-probs.

    vLLM compiles kernels at the first use of each, and all other requests wait: on an H200, three
    seconds for `top_p` without FlashInfer, and 0.3 s for log-probs of another number of tokens.
    What the server refuses is left out, and the reason says so.
    """
    tokens = min(SAMPLED_PROMPT_TOKENS, session.limits.prompt_tokens)
    answer = min(SAMPLED_OUTPUT_TOKENS, session.limits.longest_answer(tokens))
    since, refusals = session.mark(), list[str]()
    for name, extra in dict(_ways_to_sample(session.facts)).items():
        seconds = session.steps_seconds(answer)
        if obstacle := session.budget.time_obstacle(tokens, least_seconds=seconds):
            reasons = (f"not with {name}: {obstacle}", *refusals)
            return StepResult(tokens=tokens, limited=True, reason="; ".join(reasons))
        session.begin_attempt(f"a request with {name}", tokens)
        messages = session.messages((tokens,), session.prompts.fresh, answer, extra)
        if refused := await session.run_bounded(session.refusal(messages)):
            refusals.append(f"without {name}: {refused}")
    await _prove_ran(session, since)
    return StepResult(tokens=tokens, reason="; ".join(refusals))


def _ways_to_sample(facts: EngineFacts) -> Iterator[tuple[str, ProbeRequestBody]]:
    yield from _DRAWN.items()
    for wanted in _TOP_LOGPROBS:
        if extra := client.top_logprobs(facts, wanted):
            yield f"{extra['logprobs']} log-probs", extra


async def first_image(session: ProbeSession) -> StepResult:
    """Prove the largest image that the model accepts, with a prompt that may be tried.

    Only the server knows how many tokens an image has, so it refuses those that have too many.
    """
    longest, refused, forbidden = session.longest_allowed_tokens, "", ""
    if longest < 1:
        return StepResult(is_skipped=True, limited=True, reason="no context may be tried")
    for width, height in _halved(session.facts.largest_image):
        if obstacle := session.budget.image_obstacle(width * height):
            forbidden = obstacle
            continue
        if obstacle := _image_obstacle(session, longest):
            return StepResult(is_skipped=True, limited=True, reason=obstacle)
        session.begin_attempt(f"an image of {width} x {height}", 0)
        since = session.mark()
        with _limited_to(session, longest), session.budget.image_attempt(width * height):
            tokens, refused = await session.run_bounded(_show(session, width, height))
        if tokens:
            await _prove_ran(session, since)
            is_smaller = (width, height) != session.facts.largest_image
            is_cut = is_smaller and longest < full_prompt_tokens(session.facts)
            reasons = filter(None, (f"an image of {width} x {height}", forbidden))
            return StepResult(
                tokens=tokens, limited=is_cut or bool(forbidden), reason="; ".join(reasons)
            )
    reasons = filter(None, (f"no image was accepted: {refused}" if refused else "", forbidden))
    return StepResult(is_skipped=True, limited=True, reason="; ".join(reasons))


def _image_obstacle(session: ProbeSession, tokens: int) -> str:
    least_seconds = session.steps_seconds(1)
    return session.budget.context_obstacle(tokens, 1) or session.budget.time_obstacle(
        1, least_seconds=least_seconds
    )


@contextmanager
def _limited_to(session: ProbeSession, prompt_tokens: int) -> Iterator[None]:
    """While entered, the server refuses longer prompts."""
    session.engine.limit_context(prompt_tokens + 1)
    try:
        yield
    finally:
        session.engine.limit_context(None)


def _halved(largest: tuple[int, int] | None) -> Iterator[tuple[int, int]]:
    width, height = largest or (0, 0)
    while width and height:
        yield width, height
        width, height = width // 2, height // 2


async def _show(session: ProbeSession, width: int, height: int) -> tuple[int, str]:
    """Return the tokens of a prompt with the image; 0 and the reason if the server refuses it."""
    prompt_tokens = 0
    for engine in session.engines:
        random = session.prompts.random
        # In a thread, since packing a large image would block the loop for too long.
        body = await asyncio.to_thread(
            image_chat, session.facts, width, height, random, IMAGE_OUTPUT_TOKENS
        )
        message = client.Message(client.CHAT, body, engine=session.address(engine))
        response = await client.post(session.client, message)
        if response.status_code == httpx.codes.BAD_REQUEST:
            return 0, client.refusal(message, response.status_code, response.text)
        usage: Any = client.read(message, response)["usage"]
        prompt_tokens = int(usage.get("prompt_tokens") or 1)
    return prompt_tokens, ""


async def first_adapter(session: ProbeSession) -> StepResult:
    """Prove a LoRA adapter, with a short prompt and its answer, and with a full step."""
    name = await session.run_bounded(_first_adapter(session))
    if not name:
        return StepResult(is_skipped=True, reason="no LoRA adapter is listed")
    # A short prompt may always be tried, as in the first step; perhaps no context may.
    short = min(ADAPTER_PROMPT_TOKENS, session.limits.prompt_tokens)
    answer = min(ADAPTER_OUTPUT_TOKENS, session.limits.longest_answer(short))
    full = min(session.allowed.prompt_tokens, session.allowed.step_tokens)
    if obstacle := session.budget.time_obstacle(full, full, least_seconds=session.steps_seconds(2)):
        return StepResult(is_skipped=True, limited=True, reason=obstacle)
    sizes = ((short, answer), (full, 1)) if full else ((short, answer),)
    for prompt_tokens, output_tokens in sizes:
        session.begin_attempt(
            f"a prompt of {prompt_tokens} tokens to the adapter {name}", prompt_tokens
        )
        messages = session.messages(
            (prompt_tokens,), session.prompts.fresh, output_tokens, {"model": name}
        )
        since = session.mark()
        await session.run_bounded(session.exchange_all(messages))
        await _prove_ran(session, since)
    reason = f"with the adapter {name}"
    if not full:
        reason += ", without a full step, since no context may be tried"
    return StepResult(tokens=full or short, limited=not full, reason=reason)


async def _prove_ran(session: ProbeSession, since: measure.Mark) -> None:
    await session.require(
        lambda rank: since.new_tokens(rank) > 0, "no rank ran an engine step for it."
    )


async def _first_adapter(session: ProbeSession) -> str:
    """Return the adapter that is listed first; empty if none is."""
    try:
        response = await session.client.get(client.MODELS, timeout=None)
    except httpx.HTTPError as error:
        raise ProbeFailedError(client.broken(client.Message(client.MODELS, {}), error)) from error
    answer = client.parsed(client.Message(client.MODELS, {}), response.text)
    listed = answer.get("data")
    cards = listed if isinstance(listed, list) else []
    return next((str(card["id"]) for card in cards if card.get("parent")), "")
