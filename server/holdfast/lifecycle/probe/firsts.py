"""The steps about what an engine meets in some requests alone: an image, an adapter.

Their kernels compile and allocate at first use, which then is not a client's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx

from holdfast.errors import ProbeFailedError
from holdfast.lifecycle.probe import images, measure, wire
from holdfast.lifecycle.probe.bench import Bench
from holdfast.lifecycle.probe.finding import Finding

IMAGE_OUTPUT_TOKENS = 2
ADAPTER_PROMPT_TOKENS = 8
ADAPTER_OUTPUT_TOKENS = 8


async def first_image(bench: Bench) -> Finding:
    """Prove the largest image that the model takes and that fits in its context."""
    refused = ""
    for width, height in _halved(bench.facts.largest_image):
        if obstacle := bench.budget.time_obstacle(1, least_seconds=bench.steps_seconds(1)):
            return Finding(is_skipped=True, limited=True, reason=obstacle)
        bench.trying(f"an image of {width} x {height}", 0)
        since = bench.mark()
        tokens, refused = await bench.guarded(_show(bench, width, height))
        if tokens:
            await _prove_ran(bench, since)
            return Finding(tokens=tokens, reason=f"an image of {width} x {height}")
    return Finding(is_skipped=True, limited=True, reason=f"no image was accepted: {refused}")


def _halved(largest: tuple[int, int] | None) -> Iterator[tuple[int, int]]:
    width, height = largest or (0, 0)
    while width and height:
        yield width, height
        width, height = width // 2, height // 2


async def _show(bench: Bench, width: int, height: int) -> tuple[int, str]:
    """The tokens of a prompt with the image in it; 0 and the reason if the server takes none."""
    prompt_tokens = 0
    for engine in bench.engines:
        random = bench.prompts.random
        # In a thread: to pack a large image takes longer than the loop may be held.
        body = await asyncio.to_thread(
            images.image_chat, bench.facts, width, height, random, IMAGE_OUTPUT_TOKENS
        )
        message = wire.Message(wire.CHAT, body, engine=bench.address(engine))
        response = await wire.post(bench.client, message)
        if response.status_code == httpx.codes.BAD_REQUEST:
            return 0, wire.refusal(message, response.status_code, response.text)
        usage: Any = wire.read(message, response)["usage"]
        prompt_tokens = int(usage.get("prompt_tokens") or 1)
    return prompt_tokens, ""


async def first_adapter(bench: Bench) -> Finding:
    """Prove a LoRA adapter: with a short prompt and its answer, and with a step full of tokens."""
    name = await bench.guarded(_first_adapter(bench))
    if not name:
        return Finding(is_skipped=True, reason="no LoRA adapter is listed")
    short = min(ADAPTER_PROMPT_TOKENS, bench.allowed.prompt_tokens)
    answer = min(ADAPTER_OUTPUT_TOKENS, bench.facts.max_model_len - short)
    full = min(bench.allowed.prompt_tokens, bench.allowed.step_tokens)
    if obstacle := bench.budget.time_obstacle(full, full, least_seconds=bench.steps_seconds(2)):
        return Finding(is_skipped=True, limited=True, reason=obstacle)
    for prompt_tokens, output_tokens in ((short, answer), (full, 1)):
        bench.trying(f"a prompt of {prompt_tokens} tokens to the adapter {name}", prompt_tokens)
        messages = bench.messages(
            (prompt_tokens,), bench.prompts.fresh, output_tokens, {"model": name}
        )
        since = bench.mark()
        await bench.guarded(bench.exchange_all(messages))
        await _prove_ran(bench, since)
    return Finding(tokens=full, reason=f"with the adapter {name}")


async def _prove_ran(bench: Bench, since: measure.Mark) -> None:
    await bench.prove(lambda rank: since.new_tokens(rank) > 0, "no rank ran an engine step for it.")


async def _first_adapter(bench: Bench) -> str:
    """The adapter that was listed first; empty if none is."""
    try:
        response = await bench.client.get(wire.MODELS, timeout=None)
    except httpx.HTTPError as error:
        raise ProbeFailedError(wire.broken(wire.Message(wire.MODELS, {}), error)) from error
    answer = wire.parsed(wire.Message(wire.MODELS, {}), response.text)
    listed = answer.get("data")
    cards = listed if isinstance(listed, list) else []
    return next((str(card["id"]) for card in cards if card.get("parent")), "")
