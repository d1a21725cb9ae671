"""The steps about one prompt: that the engine answers at all, and how long a context it serves."""

from __future__ import annotations

from holdfast.errors import ProbeFailedError, ProbeTooSlowError
from holdfast.probe import client, first_uses
from holdfast.probe.session import Bench, Finding
from holdfast.probe.sizes import (
    FIRST_CONTEXT_TOKENS,
    TAIL_TOKENS,
    context_sizes,
    full_prompt_tokens,
    hears_alone,
    is_pooling,
)
from holdfast.records import RankStats

FIRST_PROMPT_TOKENS = 8
FIRST_OUTPUT_TOKENS = 8
RATE_STEPS = 4
"""So many steps of one prompt tell from one step what attention to a longer context costs."""


async def first_token(bench: Bench) -> Finding:
    """Prove that every engine answers: by a streamed chat where the model has one.

    A model that takes audio alone transcribes silence.
    """
    if hears_alone(bench.facts):
        return await _first_transcription(bench)
    tokens = min(FIRST_PROMPT_TOKENS, bench.limits.prompt_tokens)
    bench.trying("one short request", tokens)
    since = bench.mark()
    for engine in bench.engines:
        await bench.guarded(_answer(bench, engine, tokens))
    await bench.prove(lambda rank: since.new_tokens(rank) > 0, "no rank ran an engine step for it.")
    return Finding(tokens=tokens)


async def _first_transcription(bench: Bench) -> Finding:
    bench.trying(f"{first_uses.CLIP_SECONDS} s of silence to transcribe", 0)
    since = bench.mark()
    await bench.guarded(first_uses.transcribe(bench.client, bench.facts, FIRST_OUTPUT_TOKENS))
    await bench.prove(lambda rank: since.new_tokens(rank) > 0, "no rank ran an engine step for it.")
    return Finding(reason=f"{first_uses.CLIP_SECONDS} s of silence were transcribed")


async def _answer(bench: Bench, engine: int | None, prompt_tokens: int) -> None:
    facts = bench.facts
    prompt = bench.prompts.fresh(prompt_tokens)
    if is_pooling(facts):
        await client.exchange(bench.client, bench.message(engine, [prompt]))
        return
    output_tokens = min(FIRST_OUTPUT_TOKENS, facts.max_model_len - prompt_tokens)
    if facts.has_tokenizer and facts.has_chat_template:
        path, body = client.CHAT, client.chat(facts, output_tokens)
    else:
        path, body = client.COMPLETIONS, client.completion(facts, [prompt], output_tokens)
    message = client.Message(path, client.streamed(body), engine=bench.address(engine))
    async with client.stream(bench.client, message) as events:
        await events.to_its_end()


async def context_sweep(bench: Bench) -> Finding:
    """Prove contexts that double up to the longest; stop where one is better not tried."""
    proven, obstacle = 0, ""
    for size in context_sizes(bench.limits):
        cached = proven if bench.facts.has_prefix_caching else 0
        obstacle = bench.budget.context_obstacle(size, size - cached)
        if obstacle:
            bench.ceiling_tokens = proven
            break
        try:
            await _serve(bench, size, cached)
        except ProbeTooSlowError as error:
            bench.ceiling_tokens, obstacle = proven, f"{bench.tried}: {error.cause}"
            break
        proven = size
    return Finding(tokens=proven, limited=bool(obstacle), reason=obstacle, is_skipped=not proven)


async def _serve(bench: Bench, size: int, kept: int = 0) -> None:
    """Serve a prompt of `size` tokens that begins with `kept` tokens of the last one."""
    bench.trying(f"a prompt of {size} tokens", size)
    prompts = {
        engine: bench.served.get(engine, [])[:kept] + bench.prompts.fresh(size - kept)
        for engine in bench.engines
    }
    messages = [bench.message(engine, [prompt]) for engine, prompt in prompts.items()]
    with bench.budget.attempt(size, size - kept):
        since = bench.mark()
        seconds = bench.budget.seconds_of_an_attempt()
        await bench.guarded(bench.exchange_all(messages), seconds)
        await bench.prove(
            lambda rank: since.new_tokens(rank) >= max(1, size - kept),
            f"the ranks did not schedule {size - kept} new tokens for it.",
        )
    bench.served = prompts


async def full_context(bench: Bench) -> Finding:
    """Prove one prompt of the longest length, computed from its first token."""
    await _measure_rate(bench)
    wanted = full_prompt_tokens(bench.facts)
    size, reason = _longest_that_may_be_tried(bench)
    if size:
        await _serve(bench, size)
    if size < wanted and not reason:
        reason = f"prompts are capped at {bench.limits.prompt_tokens} of {wanted} tokens"
    return Finding(tokens=size, limited=size < wanted, reason=reason, is_skipped=not size)


async def _measure_rate(bench: Bench) -> None:
    """Without a sweep before, learn from small prompts whether the full one can be afforded."""
    limits = bench.limits
    if bench.budget.is_rate_known or limits.prompt_tokens <= limits.step_tokens:
        return
    step = limits.step_tokens
    for size in (min(FIRST_CONTEXT_TOKENS, step), step, RATE_STEPS * step):
        is_longer = size >= limits.prompt_tokens
        if not is_longer and not bench.budget.context_obstacle(size, size):
            await _serve(bench, size)


def _longest_that_may_be_tried(bench: Bench) -> tuple[int, str]:
    """The longest prompt that nothing forbids, and why a longer one was left out."""
    reason = ""
    for size in sorted(context_sizes(bench.limits), reverse=True):
        obstacle = bench.budget.context_obstacle(size, size)
        if bench.ceiling_tokens is not None and size > bench.ceiling_tokens:
            obstacle = obstacle or f"the context sweep ended at {bench.ceiling_tokens} tokens"
        if not obstacle:
            return size, reason
        reason = reason or obstacle
    return 0, reason


async def prefix_continuation(bench: Bench) -> Finding:
    """Prove that a cached prefix is continued by a new tail, and is not computed again."""
    limit = bench.longest_allowed_tokens
    prefix = limit - TAIL_TOKENS
    if prefix <= bench.limits.block_tokens:
        reason = f"a prompt of {limit} tokens has no room for a cached block and a new tail"
        return Finding(is_skipped=True, reason=reason)
    cached = min(prefix, min(map(len, bench.served.values()), default=0))
    if obstacle := bench.budget.context_obstacle(prefix, prefix - cached):
        return Finding(is_skipped=True, limited=True, reason=obstacle)
    await _serve(bench, prefix, cached)
    bench.trying(f"a tail of {TAIL_TOKENS} tokens after {prefix} cached ones", limit)
    messages = [
        bench.message(engine, [prompt + bench.prompts.fresh(TAIL_TOKENS)])
        for engine, prompt in bench.served.items()
    ]
    since = bench.mark()
    await bench.guarded(bench.exchange_all(messages))

    def is_computed(rank: RankStats) -> bool:
        return since.new_tokens(rank) >= TAIL_TOKENS

    await bench.prove(is_computed, f"the ranks did not schedule {TAIL_TOKENS} tokens for the tail.")
    again = [rank for rank in bench.engine.ranks() if since.new_tokens(rank) >= limit]
    if again:
        raise ProbeFailedError(
            "the engine computed the prefix again, although it had just been cached."
        )
    return Finding(tokens=limit)
