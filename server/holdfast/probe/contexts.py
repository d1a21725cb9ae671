"""The steps that prove one prompt: the first answer, and contexts up to the longest."""

from __future__ import annotations

from holdfast.errors import ProbeFailedError, ProbeTooSlowError
from holdfast.probe import client, first_uses
from holdfast.probe.session import ProbeSession, StepResult
from holdfast.probe.sizes import (
    FIRST_CONTEXT_TOKENS,
    TAIL_TOKENS,
    context_sizes,
    full_prompt_tokens,
    is_pooling,
    is_transcribing,
)
from holdfast.records import RankStats

FIRST_PROMPT_TOKENS = 8
FIRST_OUTPUT_TOKENS = 8
RATE_STEPS = 4
"""Steps of one prompt, which compared with one step tell the cost of a longer context."""


async def first_token(session: ProbeSession) -> StepResult:
    """Prove that every engine answers, by a streamed chat if the model supports it.

    A token with its log-prob follows: every process of an engine compiles its rank at first use,
    with all other requests waiting for seconds (vLLM 0.32 `batched_count_greater_than`). A model
    that takes only audio transcribes silence.
    """
    if is_transcribing(session.facts):
        return await _first_transcription(session)
    tokens = min(FIRST_PROMPT_TOKENS, session.limits.prompt_tokens)
    session.begin_attempt("one short request", tokens)
    since = session.mark()
    for engine in session.engines:
        await session.run_bounded(_answer(session, engine, tokens))
        if extra := client.top_logprobs(session.facts, 1):
            message = session.message(engine, [session.prompts.fresh(tokens)], 1, extra)
            await session.run_bounded(client.exchange(session.client, message))
    await session.require(
        lambda rank: since.new_tokens(rank) > 0, "no rank ran an engine step for it."
    )
    return StepResult(tokens=tokens)


async def _first_transcription(session: ProbeSession) -> StepResult:
    session.begin_attempt(f"{first_uses.CLIP_SECONDS} s of silence to transcribe", 0)
    since = session.mark()
    await session.run_bounded(
        first_uses.transcribe(session.client, session.facts, FIRST_OUTPUT_TOKENS)
    )
    await session.require(
        lambda rank: since.new_tokens(rank) > 0, "no rank ran an engine step for it."
    )
    return StepResult(reason=f"{first_uses.CLIP_SECONDS} s of silence were transcribed")


async def _answer(session: ProbeSession, engine: int | None, prompt_tokens: int) -> None:
    facts = session.facts
    prompt = session.prompts.fresh(prompt_tokens)
    if is_pooling(facts):
        await client.exchange(session.client, session.message(engine, [prompt]))
        return
    output_tokens = min(FIRST_OUTPUT_TOKENS, facts.max_model_len - prompt_tokens)
    if facts.has_tokenizer and facts.has_chat_template:
        path, body = client.CHAT, client.chat(facts, output_tokens)
    else:
        path, body = client.COMPLETIONS, client.completion(facts, [prompt], output_tokens)
    message = client.Message(path, client.streamed(body), engine=session.address(engine))
    async with client.stream(session.client, message) as events:
        await events.to_its_end()


async def context_sweep(session: ProbeSession) -> StepResult:
    """Prove contexts that double up to the longest; stop at the first that may not be tried."""
    proven, obstacle = 0, ""
    for size in context_sizes(session.limits):
        cached = proven if session.facts.has_prefix_caching else 0
        obstacle = session.budget.context_obstacle(size, size - cached)
        if obstacle:
            session.ceiling_tokens = proven
            break
        try:
            await _serve(session, size, cached)
        except ProbeTooSlowError as error:
            session.ceiling_tokens, obstacle = proven, f"{session.attempt}: {error.cause}"
            break
        proven = size
    return StepResult(tokens=proven, limited=bool(obstacle), reason=obstacle, is_skipped=not proven)


async def _serve(session: ProbeSession, size: int, kept: int = 0) -> None:
    """Serve a prompt of `size` tokens that begins with `kept` tokens of the previous one."""
    session.begin_attempt(f"a prompt of {size} tokens", size)
    prompts = {
        engine: session.served.get(engine, [])[:kept] + session.prompts.fresh(size - kept)
        for engine in session.engines
    }
    messages = [session.message(engine, [prompt]) for engine, prompt in prompts.items()]
    with session.budget.attempt(size, size - kept):
        since = session.mark()
        seconds = session.budget.seconds_of_an_attempt()
        await session.run_bounded(session.exchange_all(messages), seconds)
        await session.require(
            lambda rank: since.new_tokens(rank) >= max(1, size - kept),
            f"the ranks did not schedule {size - kept} new tokens for it.",
        )
    session.served = prompts


async def full_context(session: ProbeSession) -> StepResult:
    """Prove one prompt of the longest length, computed from its first token."""
    await _measure_rate(session)
    wanted = full_prompt_tokens(session.facts)
    size, reason = _longest_that_may_be_tried(session)
    if size:
        await _serve(session, size)
    if size < wanted and not reason:
        reason = f"prompts are capped at {session.limits.prompt_tokens} of {wanted} tokens"
    return StepResult(tokens=size, limited=size < wanted, reason=reason, is_skipped=not size)


async def _measure_rate(session: ProbeSession) -> None:
    """If no sweep has measured the rate, measure it with small prompts."""
    limits = session.limits
    if session.budget.is_rate_known or limits.prompt_tokens <= limits.step_tokens:
        return
    step = limits.step_tokens
    for size in (min(FIRST_CONTEXT_TOKENS, step), step, RATE_STEPS * step):
        is_longer = size >= limits.prompt_tokens
        if not is_longer and not session.budget.context_obstacle(size, size):
            await _serve(session, size)


def _longest_that_may_be_tried(session: ProbeSession) -> tuple[int, str]:
    """Return the longest prompt that nothing forbids, and why longer ones were left out."""
    reason = ""
    for size in sorted(context_sizes(session.limits), reverse=True):
        obstacle = session.budget.context_obstacle(size, size)
        if session.ceiling_tokens is not None and size > session.ceiling_tokens:
            obstacle = obstacle or f"the context sweep ended at {session.ceiling_tokens} tokens"
        if not obstacle:
            return size, reason
        reason = reason or obstacle
    return 0, reason


async def prefix_continuation(session: ProbeSession) -> StepResult:
    """Prove that a new tail continues a cached prefix, which is not computed again."""
    limit = session.longest_allowed_tokens
    prefix = limit - TAIL_TOKENS
    if prefix <= max(session.limits.block_tokens, session.facts.least_cached_tokens):
        reason = f"a prompt of {limit} tokens has no room for a cached block and a new tail"
        return StepResult(is_skipped=True, reason=reason)
    cached = min(prefix, min(map(len, session.served.values()), default=0))
    if obstacle := session.budget.context_obstacle(prefix, prefix - cached):
        return StepResult(is_skipped=True, limited=True, reason=obstacle)
    await _serve(session, prefix, cached)
    session.begin_attempt(f"a tail of {TAIL_TOKENS} tokens after {prefix} cached ones", limit)
    messages = [
        session.message(engine, [prompt + session.prompts.fresh(TAIL_TOKENS)])
        for engine, prompt in session.served.items()
    ]
    since = session.mark()
    await session.run_bounded(session.exchange_all(messages))

    def is_computed(rank: RankStats) -> bool:
        return since.new_tokens(rank) >= TAIL_TOKENS

    await session.require(
        is_computed, f"the ranks did not schedule {TAIL_TOKENS} tokens for the tail."
    )
    again = [rank for rank in session.engine.ranks() if since.new_tokens(rank) >= limit]
    if again:
        raise ProbeFailedError(
            "the engine computed the prefix again, although it had just been cached."
        )
    return StepResult(tokens=limit)
