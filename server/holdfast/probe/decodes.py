"""The steps that prove requests decoding together, alone and beside a long prefill."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from holdfast.probe import client, decode_sizes, measure
from holdfast.probe.session import ProbeSession, StepResult
from holdfast.records import EngineStep, RankStats

TOP_LOGPROBS = 5
MIXED_ATTEMPTS = 3
STRUCTURE: client.ProbeRequestBody = {"structured_outputs": {"regex": "[0-9]{4096,}"}}
"""A grammar with no text that ends within the few tokens that are asked for."""


async def widest_decode(session: ProbeSession) -> StepResult:
    """Prove the most requests that can decode together, with all that sampling offers.

    Log-probs are left out if the server allows none, and the structured output if the server
    refuses it; the reason says so.
    """
    plans = decode_sizes.widest_decodes(session.allowed)
    if not plans:
        return StepResult(is_skipped=True, reason="no request has room to decode")
    tokens = plans[0].requests * plans[0].prompt_tokens
    if obstacle := session.budget.time_obstacle(tokens, least_seconds=session.steps_seconds(2)):
        return StepResult(is_skipped=True, limited=True, reason=obstacle)
    session.begin_attempt("one structured output", 1)
    refused = await session.run_bounded(_structure_refusal(session))
    widest = 0
    for plan in plans:
        session.begin_attempt(f"{plan.requests} requests decoding together", plan.requests)
        widest = max(widest, await _decode_together(session, plan, has_structure=not refused))
        if widest == plan.requests:
            break
    reasons = (*_fewer(session, plans[0].requests, widest), *_left_out(session, refused))
    return StepResult(tokens=widest, reason="; ".join(reasons))


def _fewer(session: ProbeSession, planned: int, widest: int) -> Iterator[str]:
    limits = session.limits
    if limits.decoding_requests < limits.step_requests:
        slots = f" and {limits.draft_slots} draft slots" if limits.draft_slots else ""
        yield (
            f"{limits.decoding_requests} of {limits.step_requests} requests decode together, since "
            f"each takes {limits.decode_tokens} tokens{slots} of a step's "
            f"{session.facts.max_num_batched_tokens}"
        )
    if widest < planned:
        yield f"the scheduler ran {widest} of {planned} requests together"


def _left_out(session: ProbeSession, refused: str) -> Iterator[str]:
    if refused:
        yield f"without a structured output: {refused}"
    if not session.facts.max_logprobs:
        yield "without log-probs: the server allows none"


async def _structure_refusal(session: ProbeSession) -> str:
    """Return why the server refuses structured outputs; empty if it accepts them."""
    if not session.facts.has_tokenizer:
        return "there is no tokenizer"
    return await session.refusal(session.messages((1,), session.prompts.fresh, 1, STRUCTURE))


async def _decode_together(
    session: ProbeSession, plan: decode_sizes.DecodePlan, *, has_structure: bool
) -> int:
    """Serve all requests of the plan, and return how many decoded in one step.

    Their first common step is a prefill, so the second step with all of them decodes.
    """
    free = plan.requests - 1 if has_structure else plan.requests
    extra = _sampling(session)
    messages = session.messages(
        (plan.prompt_tokens,) * free, session.prompts.fresh, plan.output_tokens, extra
    )
    if has_structure:
        messages += session.messages(
            (plan.prompt_tokens,), session.prompts.fresh, plan.output_tokens, extra | STRUCTURE
        )
    since = session.mark()

    def is_shown(rank: RankStats) -> bool:
        steps = [step for step in since.new_steps(rank) if step.requests == plan.requests]
        return len(steps) >= 2

    await session.run_bounded(session.exchange_in_one_step(messages))
    tokens = plan.requests * (plan.prompt_tokens + plan.output_tokens - 1)
    missing = f"not every rank ran an engine step with {plan.requests} decoding requests."
    if await session.is_formed(since, tokens, is_shown, missing):
        return plan.requests
    return min(plan.requests, since.widest_steps(session.engine.ranks()))


def _sampling(session: ProbeSession) -> client.ProbeRequestBody:
    return {
        "temperature": 1.0,
        "top_p": 0.9,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        **client.top_logprobs(session.facts, TOP_LOGPROBS),
    }


async def mixed(session: ProbeSession) -> StepResult:
    """Prove an engine step in which a long prompt is prefilled while others decode."""
    plans, has_overlapped = decode_sizes.mixed(session.allowed), False
    for plan in plans:
        prefill, obstacle = _affordable(session, plan)
        if prefill < 2:
            return StepResult(is_skipped=True, limited=True, reason=obstacle)
        decoders = plan.decoders.requests
        session.begin_attempt(f"a prompt of {prefill} tokens beside {decoders} decodes", prefill)
        prompts = (*plan.leading, prefill)
        since = await _prefill_beside(session, plan.decoders, prompts)
        has_overlapped = has_overlapped or since is not None
        if since is not None:
            is_mixed = await _is_mixed(session, since, decoders, sum(prompts))
        else:
            is_mixed = await _is_mixed_behind(session, replace(plan, prefill_tokens=prefill))
        if is_mixed:
            return StepResult(tokens=prefill, limited=bool(obstacle), reason=obstacle)
    if not plans:
        return StepResult(is_skipped=True, reason="no prompt fits beside a request that decodes")
    if has_overlapped:
        reason = "the scheduler formed no step of a prompt beside requests that decode"
        return StepResult(is_skipped=True, reason=reason)
    reason = "the decodes ended each time before a prompt could join them"
    return StepResult(is_skipped=True, limited=True, reason=reason)


def _affordable(session: ProbeSession, plan: decode_sizes.MixedPlan) -> tuple[int, str]:
    """Return the longest prompt that the time left allows, and why it is shorter than wanted."""
    prefill, obstacle, others = plan.prefill_tokens, "", sum(plan.leading)
    # The decoders' prompts, the prefill beside them, and a decode before it.
    seconds = session.steps_seconds(3)
    while prefill and (
        found := session.budget.time_obstacle(prefill + others, prefill, least_seconds=seconds)
    ):
        obstacle, prefill = obstacle or found, prefill // 2
    return prefill, obstacle


async def _is_mixed(
    session: ProbeSession, since: measure.Mark, decoders: int, tokens: int, first_step: int = 0
) -> bool:
    def is_mixed(step: EngineStep) -> bool:
        # A prompt gets one token, in the step that ends its prefill, so it never decodes.
        return step.scheduled_tokens > step.requests > decoders

    def is_shown(rank: RankStats) -> bool:
        steps = [step for step in since.new_steps(rank) if step.requests]
        return any(map(is_mixed, steps[first_step:]))

    missing = f"not every rank ran a step with {decoders} decodes and a prefill."
    return await session.is_formed(since, tokens, is_shown, missing)


async def _is_mixed_behind(session: ProbeSession, plan: decode_sizes.MixedPlan) -> bool:
    """Queue the decoders and the prompts together: for answers that end before a prompt can join.

    The first step prefills the decoders, so it does not count.
    """
    prompts = decode_sizes.prompts_behind(session.allowed, plan)
    seconds = session.steps_seconds(len(prompts) + 2)
    total = sum(prompts)
    if not total or session.budget.time_obstacle(total, max(prompts), least_seconds=seconds):
        return False
    decoders = plan.decoders
    since = await session.run_bounded(_queue_behind(session, decoders, prompts))
    tokens = total + decoders.requests * decoders.prompt_tokens
    return await _is_mixed(session, since, decoders.requests, tokens, first_step=1)


async def _queue_behind(
    session: ProbeSession, decoders: decode_sizes.DecodePlan, prompts: Sequence[int]
) -> measure.Mark:
    lengths = (decoders.prompt_tokens,) * decoders.requests
    ahead = session.messages(lengths, session.prompts.fresh, decoders.output_tokens)
    queued = 0
    async with asyncio.TaskGroup() as group, session.engine.scheduling_paused():
        since = session.mark()
        for messages in (ahead, session.messages(prompts, session.prompts.fresh)):
            for message in messages:
                group.create_task(client.exchange(session.client, message))
            queued += sum(message.prompts for message in messages)
            await session.until_queued(queued)
    return since


async def _prefill_beside(
    session: ProbeSession, decoders: decode_sizes.DecodePlan, prompts: Sequence[int]
) -> measure.Mark | None:
    """Serve prompts while the decoders run, and return how far the ranks were before the prompts.

    None if the decoders ended before the prompts could join them in every attempt, for example
    because the KV cache has no room for all of them.
    """
    for _ in range(MIXED_ATTEMPTS):
        since = await session.run_bounded(_overlap(session, decoders, prompts))
        if since is not None:
            return since
    return None


async def _overlap(
    session: ProbeSession, decoders: decode_sizes.DecodePlan, prompts: Sequence[int]
) -> measure.Mark | None:
    """Try once; None if the decoders were done before scheduling could be held."""
    running = decoders.requests * len(session.engines)
    async with AsyncExitStack() as stack:
        for message in _decoder_messages(session, decoders):
            events = await stack.enter_async_context(client.stream(session.client, message))
            await events.until_all_began()
        since = await _send_beside(session, running, prompts)
    await session.until_queued(0)
    return since


async def _send_beside(
    session: ProbeSession, running: int, prompts: Sequence[int]
) -> measure.Mark | None:
    messages = session.messages(prompts, session.prompts.fresh)
    async with asyncio.TaskGroup() as group, session.engine.scheduling_paused():
        if await session.engine.queued_requests() != running:
            return None
        since = session.mark()
        for message in messages:
            group.create_task(client.exchange(session.client, message))
        await session.until_queued(running + sum(message.prompts for message in messages))
    return since


def _decoder_messages(
    session: ProbeSession, decoders: decode_sizes.DecodePlan
) -> list[client.Message]:
    lengths = (decoders.prompt_tokens,) * decoders.requests
    return [
        client.Message(m.path, client.streamed(m.body), m.prompts, m.engine, m.output_tokens)
        for m in session.messages(lengths, session.prompts.fresh, decoders.output_tokens)
    ]
