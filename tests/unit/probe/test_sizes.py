"""No size that the probe plans exceeds what the engine has."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from holdfast.probe.decode_sizes import mixed, widest_decodes
from holdfast.probe.sizes import (
    EngineLimits,
    batch_sizes,
    context_sizes,
    fewest,
    largest_step,
    most,
)
from holdfast.records import EngineFacts
from stub_engine import FACTS


@st.composite
def engines(draw: st.DrawFn) -> EngineFacts:
    """Facts of engines large and small, with room for at least one whole request or not."""
    max_model_len = draw(st.integers(2, 5000))
    is_chunked = draw(st.booleans())
    drafts = draw(st.sampled_from([0, 1, 3, 15]))
    slots = draw(st.sampled_from([0, 1, drafts])) if drafts else 0
    smallest_step = slots + (1 if is_chunked else max_model_len)
    block = draw(st.sampled_from([1, 16, 128]))
    blocks = draw(st.integers(0, 400))
    max_num_seqs = draw(st.integers(1, 300))
    return replace(
        FACTS,
        max_model_len=max_model_len,
        max_num_batched_tokens=draw(st.integers(smallest_step, 9000)),
        max_num_seqs=max_num_seqs,
        kv_capacity_tokens=block * blocks,
        kv_block_tokens=block,
        has_chunked_prefill=is_chunked,
        draft_tokens=drafts,
        draft_slots=slots,
        draft_lookahead_tokens=draw(st.sampled_from([0, drafts])),
        pipeline_stages=draw(st.sampled_from([1, 2])),
        max_answer_tokens=draw(st.none() | st.integers(2, 300)),
        tasks=frozenset({draw(st.sampled_from(["generate", "embed"]))}),
    )


SHORT_TOKENS = 24
"""Of a prompt of 8 tokens and its answer of 16, which every server can be asked for."""

CAPS = st.none() | st.integers(2, 6000)


def held_tokens(facts: EngineFacts, lengths: tuple[int, ...]) -> int:
    """Return the tokens of whole KV cache blocks that requests of these lengths hold."""
    block = facts.kv_block_tokens
    ahead = facts.draft_tokens + facts.draft_lookahead_tokens
    held = (min(length + ahead, facts.max_model_len) for length in lengths)
    return sum(-(-tokens // block) * block for tokens in held)


def has_room(facts: EngineFacts, lengths: tuple[int, ...]) -> bool:
    """Whether the KV cache holds requests of these lengths beside vLLM's null block."""
    held = held_tokens(facts, lengths) + facts.kv_block_tokens
    return not facts.kv_capacity_tokens or held <= facts.kv_capacity_tokens


def budget(facts: EngineFacts, requests: int) -> int:
    """Return the tokens that a step of `requests` requests may schedule."""
    return facts.max_num_batched_tokens - requests * facts.draft_slots


@given(engines(), CAPS)
def test_longest_prompt_is_the_smallest_bound(facts: EngineFacts, cap: int | None) -> None:
    """The longest prompt is within the model, the operator's cap and the KV cache."""
    longest = EngineLimits.of(facts, cap).prompt_tokens
    room = 1 if "generate" in facts.tasks else 0
    assert longest <= facts.max_model_len - room
    assert cap is None or longest <= cap
    held = held_tokens(facts, (longest,)) if longest else 0
    assert not facts.kv_capacity_tokens or held <= facts.kv_capacity_tokens


@given(engines(), CAPS)
def test_contexts_increase_to_the_longest_prompt(facts: EngineFacts, cap: int | None) -> None:
    """Sizes grow strictly, at most doubling after the first, and end at the cap."""
    limits = EngineLimits.of(facts, cap)
    sizes = list(context_sizes(limits))
    assert sizes == sorted(set(sizes))
    assert all(later <= 2 * earlier for earlier, later in pairwise(sizes))
    assert sizes[-1:] == ([limits.prompt_tokens] if limits.prompt_tokens else [])


@given(st.integers(0, 70_000))
def test_batches_increase_to_the_largest_step(largest: int) -> None:
    """Sizes grow strictly, include powers of two and their neighbours, and end at the largest."""
    sizes = batch_sizes(largest)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1:] == ((largest,) if largest else ())
    wanted = {2**k + off for k in range(3, 17) for off in (-1, 0, 1)}
    assert {size for size in wanted if size <= largest} <= set(sizes)
    assert largest < 232 or 232 in sizes


@given(engines(), CAPS, st.data())
def test_composed_steps_fit(facts: EngineFacts, cap: int | None, data: st.DataObject) -> None:
    """Any size up to the largest is made exactly, within every limit of the engine."""
    limits = EngineLimits.of(facts, cap)
    largest = largest_step(limits)
    assert fewest(limits, largest + 1) is None
    if not largest:
        return
    size = data.draw(st.integers(1, largest))
    for lengths in (fewest(limits, size), most(limits, size)):
        assert lengths is not None
        assert sum(lengths) == size <= budget(facts, len(lengths))
        assert len(lengths) <= facts.max_num_seqs
        assert min(lengths) >= 1
        assert max(lengths) <= limits.prompt_tokens
        assert not facts.kv_capacity_tokens or held_tokens(facts, lengths) <= (
            facts.kv_capacity_tokens
        )


@given(engines(), CAPS)
def test_widest_decodes_fit(facts: EngineFacts, cap: int | None) -> None:
    """All requests are prefilled in one step and hold their whole output in the KV cache.

    There is a plan wherever one request has room for a short prompt and a short answer.
    """
    limits = EngineLimits.of(facts, cap)
    plans = widest_decodes(limits)
    is_served = limits.decoding_requests >= 1 and limits.prompt_tokens >= SHORT_TOKENS
    assert plans or not (is_served and has_room(facts, (SHORT_TOKENS,)))
    for plan in plans:
        length = plan.prompt_tokens + plan.output_tokens
        assert 1 <= plan.requests <= facts.max_num_seqs
        assert plan.requests * plan.prompt_tokens <= budget(facts, plan.requests)
        assert plan.requests * (1 + facts.draft_tokens) <= budget(facts, plan.requests)
        assert plan.output_tokens >= 2
        assert plan.output_tokens <= (facts.max_answer_tokens or plan.output_tokens)
        assert length <= facts.max_model_len + 1
        assert not facts.kv_capacity_tokens or held_tokens(facts, (length,) * plan.requests) <= (
            facts.kv_capacity_tokens
        )


@given(engines(), CAPS)
def test_mixed_plans_fit(facts: EngineFacts, cap: int | None) -> None:
    """Decoders and prompts have seats and KV cache at the same time, and fit in one step.

    There is a plan wherever a short request can decode beside the chunks of two others.
    """
    limits = EngineLimits.of(facts, cap)
    plans = mixed(limits)
    is_served = limits.decoding_requests >= 3 and limits.prompt_tokens >= SHORT_TOKENS
    has_step = facts.has_chunked_prefill and budget(facts, 1) >= SHORT_TOKENS
    has_cache = not facts.kv_capacity_tokens
    assert plans or not (is_served and has_step and has_cache)
    for plan in plans:
        decoders = plan.decoders
        lengths = (decoders.prompt_tokens + decoders.output_tokens,) * decoders.requests
        prompts = (*plan.leading, plan.prefill_tokens)
        assert decoders.requests + len(prompts) <= facts.max_num_seqs
        assert not facts.kv_capacity_tokens or held_tokens(facts, (*lengths, *prompts)) <= (
            facts.kv_capacity_tokens
        )
        assert 2 <= decoders.output_tokens <= (facts.max_answer_tokens or decoders.output_tokens)
        rest = budget(facts, decoders.requests + 1) - decoders.requests * (1 + facts.draft_tokens)
        assert rest >= (1 if facts.has_chunked_prefill else plan.prefill_tokens)
