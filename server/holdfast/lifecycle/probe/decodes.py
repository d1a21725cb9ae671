"""The steps about requests that decode together, alone and beside a long prefill."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import httpx

from holdfast.errors import ProbeFailedError
from holdfast.lifecycle.probe import measure, sizes, wire
from holdfast.lifecycle.probe.bench import Bench
from holdfast.lifecycle.probe.finding import Finding
from holdfast.records import EngineStep, RankStats

TOP_LOGPROBS = 5
MIXED_ATTEMPTS = 3
STRUCTURE: wire.Body = {"structured_outputs": {"regex": "[0-9]{4096,}"}}
"""A text that the grammar lets nobody end within the few tokens that are asked for."""


async def widest_decode(bench: Bench) -> Finding:
    """Prove as many requests decoding together as the engine takes, with all that sampling offers.

    Log-probs are left out where the server allows none, and the structured output where it refuses
    one; the reason says so.
    """
    plans = sizes.widest_decodes(bench.allowed)
    if not plans:
        return Finding(is_skipped=True, reason="no request has room to decode")
    tokens = plans[0].requests * plans[0].prompt_tokens
    if obstacle := bench.budget.time_obstacle(tokens, least_seconds=bench.steps_seconds(2)):
        return Finding(is_skipped=True, limited=True, reason=obstacle)
    bench.trying("one structured output", 1)
    refused = await bench.guarded(_structure_refusal(bench))
    for plan in plans:
        bench.trying(f"{plan.requests} requests decoding together", plan.requests)
        if await _decode_together(bench, plan, has_structure=not refused):
            return Finding(tokens=plan.requests, reason=_left_out(bench, refused))
    raise ProbeFailedError(
        f"no engine step with {plans[0].requests} decoding requests was seen on every rank."
    )


def _left_out(bench: Bench, refused: str) -> str:
    parts = [f"without a structured output: {refused}"] if refused else []
    if not bench.facts.max_logprobs:
        parts.append("without log-probs: the server allows none")
    return "; ".join(parts)


async def _structure_refusal(bench: Bench) -> str:
    """Why the server takes no structured output; empty if it does."""
    if not bench.facts.has_tokenizer:
        return "there is no tokenizer"
    for engine in bench.engines:
        message = bench.message(engine, [bench.prompts.fresh(1)], 1, STRUCTURE)
        response = await wire.post(bench.client, message)
        if response.status_code == httpx.codes.BAD_REQUEST:
            return wire.refusal(message, response.status_code, response.text)
        wire.read(message, response)
    return ""


async def _decode_together(bench: Bench, plan: sizes.DecodePlan, *, has_structure: bool) -> bool:
    """Whether all requests of the plan were served and seen decoding in one step.

    The requests share their first step, which is a prefill, so the second with all of them decodes.
    """
    free = plan.requests - 1 if has_structure else plan.requests
    extra = _sampling(bench)
    messages = bench.messages(
        (plan.prompt_tokens,) * free, bench.prompts.fresh, plan.output_tokens, extra
    )
    if has_structure:
        messages += bench.messages(
            (plan.prompt_tokens,), bench.prompts.fresh, plan.output_tokens, extra | STRUCTURE
        )
    since = bench.mark()

    def is_shown(rank: RankStats) -> bool:
        steps = [step for step in since.new_steps(rank) if step.requests == plan.requests]
        return len(steps) >= 2

    await bench.guarded(bench.together(messages))
    return await bench.is_seen(is_shown)


def _sampling(bench: Bench) -> wire.Body:
    allowed = bench.facts.max_logprobs
    body: wire.Body = {
        "temperature": 1.0,
        "top_p": 0.9,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
    }
    if allowed:
        top = TOP_LOGPROBS if allowed < 0 else min(TOP_LOGPROBS, allowed)
        body |= {"logprobs": top, "return_tokens_as_token_ids": True}
    return body


async def mixed(bench: Bench) -> Finding:
    """Prove an engine step in which a long prompt is prefilled while others decode."""
    plan = sizes.mixed(bench.allowed)
    if plan is None:
        reason = "no prompt has room beside a request that decodes"
        return Finding(is_skipped=True, reason=reason)
    prefill, obstacle = plan.prefill_tokens, ""
    # The decoders' prompts, the prefill beside them, and a decode before it.
    least_seconds = bench.steps_seconds(3)
    while prefill and (found := bench.budget.time_obstacle(prefill, least_seconds=least_seconds)):
        obstacle, prefill = obstacle or found, prefill // 2
    if prefill < 2:
        return Finding(is_skipped=True, limited=True, reason=obstacle)
    decoders = plan.decoders
    bench.trying(f"a prompt of {prefill} tokens beside {decoders.requests} decodes", prefill)
    since = await _prefill_beside(bench, decoders, prefill)

    def is_mixed(step: EngineStep) -> bool:
        # The prompt makes one token, in the step that ends its prefill: it never decodes.
        return step.scheduled_tokens > step.requests == decoders.requests + 1

    missing = f"no step with {decoders.requests} decodes and a prefill was seen on every rank."
    await bench.prove_step(since, is_mixed, missing)
    return Finding(tokens=prefill, limited=bool(obstacle), reason=obstacle)


async def _prefill_beside(
    bench: Bench, decoders: sizes.DecodePlan, prefill_tokens: int
) -> measure.Mark:
    """Serve the prompt while the decoders run, and return where the ranks stood before it."""
    for _ in range(MIXED_ATTEMPTS):
        since = await bench.guarded(_overlap(bench, decoders, prefill_tokens))
        if since is not None:
            return since
    raise ProbeFailedError("the decodes ended each time before a prompt could join them.")


async def _overlap(
    bench: Bench, decoders: sizes.DecodePlan, prefill_tokens: int
) -> measure.Mark | None:
    """One attempt; None if the decoders were done before the engine could be held."""
    running = decoders.requests * len(bench.engines)
    async with AsyncExitStack() as stack:
        for message in _decoder_messages(bench, decoders):
            events = await stack.enter_async_context(wire.stream(bench.client, message))
            await events.until_all_began()
        since = await _send_beside(bench, running, prefill_tokens)
    await bench.until_queued(0)
    return since


async def _send_beside(bench: Bench, running: int, prefill_tokens: int) -> measure.Mark | None:
    messages = bench.messages((prefill_tokens,), bench.prompts.fresh)
    async with asyncio.TaskGroup() as group, bench.engine.scheduling_held():
        if await bench.engine.queued_requests() != running:
            return None
        since = bench.mark()
        for message in messages:
            group.create_task(wire.exchange(bench.client, message))
        await bench.until_queued(running + len(messages))
    return since


def _decoder_messages(bench: Bench, decoders: sizes.DecodePlan) -> list[wire.Message]:
    lengths = (decoders.prompt_tokens,) * decoders.requests
    return [
        wire.Message(m.path, wire.streamed(m.body), m.prompts, m.engine, m.output_tokens)
        for m in bench.messages(lengths, bench.prompts.fresh, decoders.output_tokens)
    ]
