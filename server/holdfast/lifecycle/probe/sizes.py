"""Which sizes are tried, and how is a step of a chosen size made up? Pure arithmetic on tokens.

A step is bounded by `max_num_batched_tokens`, `max_num_seqs`, `max_model_len` and the KV cache,
which hands out whole blocks. No plan made here exceeds any of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from holdfast.records import EngineFacts

FIRST_CONTEXT_TOKENS = 128
FIRST_BATCH_TOKENS = 8
TAIL_TOKENS = 160
"""The new tail of a continued prefix; kernels take another path above 128."""
DECODE_PROMPT_TOKENS = 8
DECODE_LADDER_TOKENS = (16, 64, 256)
"""Outputs of the widest decode; the longer ones are for a request that joins late."""
MIXED_DECODERS = (16, 8, 4, 2, 1)
MIXED_OUTPUT_TOKENS = (512, 128, 32)


def is_pooling(facts: EngineFacts) -> bool:
    """Whether the model answers with vectors or scores instead of tokens."""
    return "generate" not in facts.tasks


def hears_alone(facts: EngineFacts) -> bool:
    """Whether the model takes audio, and no prompt of bare tokens."""
    takes_tokens = "generate" in facts.tasks and not facts.is_encoder_decoder
    return "transcription" in facts.tasks and not takes_tokens


def full_prompt_tokens(facts: EngineFacts) -> int:
    """The longest prompt the model takes: one token less where an answer must have room."""
    return facts.max_model_len - (0 if is_pooling(facts) else 1)


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a prompt and a step of one engine."""

    prompt_tokens: int
    step_tokens: int
    step_requests: int
    block_tokens: int
    is_chunked: bool
    """Whether a prompt may be prefilled over several steps."""
    blocks: int | None
    """Blocks of KV cache that requests may hold; None where nothing is kept."""

    @classmethod
    def of(cls, facts: EngineFacts, max_tokens: int | None) -> Self:
        """The limits of an engine, with the operator's cap on prompts."""
        blocks = _usable_blocks(facts)
        bounds = [full_prompt_tokens(facts)]
        if max_tokens is not None:
            bounds.append(max_tokens)
        if blocks is not None:
            bounds.append(blocks * facts.kv_block_tokens)
        if not facts.has_chunked_prefill:
            bounds.append(facts.max_num_batched_tokens)
        return cls(
            prompt_tokens=max(0, min(bounds)),
            step_tokens=facts.max_num_batched_tokens,
            step_requests=facts.max_num_seqs,
            block_tokens=facts.kv_block_tokens,
            is_chunked=facts.has_chunked_prefill,
            blocks=blocks,
        )

    def blocks_of(self, tokens: int) -> int:
        """Blocks that a request of so many tokens holds."""
        return -(-tokens // self.block_tokens)

    def holds(self, lengths: Sequence[int]) -> bool:
        """Whether requests of these lengths are in the KV cache at the same time."""
        return self.blocks is None or sum(map(self.blocks_of, lengths)) <= self.blocks


def _usable_blocks(facts: EngineFacts) -> int | None:
    """One block is vLLM's null block, but a request of max_model_len always has room."""
    if not facts.kv_capacity_tokens:
        return None
    blocks = facts.kv_capacity_tokens // facts.kv_block_tokens
    needed = -(-facts.max_model_len // facts.kv_block_tokens)
    return max(blocks - 1, min(blocks, needed))


def context_sizes(limits: Limits, first: int = FIRST_CONTEXT_TOKENS) -> Iterator[int]:
    """Doubling from `first` up to the longest prompt, which is the last."""
    size = first
    while size < limits.prompt_tokens:
        yield size
        size *= 2
    if limits.prompt_tokens > 0:
        yield limits.prompt_tokens


def batch_sizes(largest: int) -> tuple[int, ...]:
    """A sample of step sizes up to `largest`, which is the last; increasing.

    Need is not monotone in size and not every size can be tried. The sample takes what kernels
    round to: powers of two and one off them, and in each octave 3/2 and 29/16 of its lower end (a
    fork needed more at 232 = 29/16 x 128 rows than at its maximum).
    """
    sizes = {largest} if largest > 0 else set()
    octave = FIRST_BATCH_TOKENS
    while octave - 1 <= largest:
        sizes |= {octave - 1, octave, octave + 1, octave * 3 // 2, octave * 29 // 16}
        octave *= 2
    return tuple(sorted(size for size in sizes if size <= largest))


def fewest(limits: Limits, tokens: int) -> tuple[int, ...] | None:
    """Prompt lengths that sum to `tokens` over as few requests as possible; None if none fit."""
    if not limits.prompt_tokens:
        return None
    whole, rest = divmod(tokens, limits.prompt_tokens)
    lengths = (limits.prompt_tokens,) * whole + ((rest,) if rest else ())
    return lengths if _is_one_step(limits, lengths) else None


def most(limits: Limits, tokens: int) -> tuple[int, ...] | None:
    """Prompt lengths that sum to `tokens` over as many requests as fit; None if none fit."""
    for requests in range(min(tokens, limits.step_requests), 0, -1):
        short, longer = divmod(tokens, requests)
        lengths = (short + 1,) * longer + (short,) * (requests - longer)
        if lengths[0] <= limits.prompt_tokens and _is_one_step(limits, lengths):
            return lengths
    return fewest(limits, tokens)


def _is_one_step(limits: Limits, lengths: Sequence[int]) -> bool:
    return (
        sum(lengths) <= limits.step_tokens
        and len(lengths) <= limits.step_requests
        and limits.holds(lengths)
    )


def largest_step(limits: Limits) -> int:
    """The most tokens that one step can be made to schedule."""
    sizes = range(1, limits.step_tokens + 1)
    return bisect_right(sizes, x=False, key=lambda size: fewest(limits, size) is None)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Requests that are prefilled in one step and then decode together."""

    requests: int
    prompt_tokens: int
    output_tokens: int


def widest_decodes(limits: Limits) -> tuple[DecodePlan, ...]:
    """As many requests as can decode together; the later plans only decode longer."""
    prompt = min(DECODE_PROMPT_TOKENS, max(1, limits.step_tokens // max(1, limits.step_requests)))
    room = limits.prompt_tokens + 1 - prompt
    plans = (
        DecodePlan(_width(limits, prompt, output), prompt, output)
        for output in sorted({min(room, output) for output in DECODE_LADDER_TOKENS})
        if output >= 2
    )
    found = [plan for plan in plans if plan.requests]
    return tuple(plan for plan in found if plan.requests == found[0].requests)


def _width(limits: Limits, prompt_tokens: int, output_tokens: int) -> int:
    width = min(limits.step_requests, limits.step_tokens // prompt_tokens)
    if limits.blocks is None:
        return width
    return min(width, limits.blocks // limits.blocks_of(prompt_tokens + output_tokens))


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """Requests that decode while one long prompt is prefilled."""

    decoders: DecodePlan
    prefill_tokens: int


def mixed(limits: Limits) -> MixedPlan | None:
    """Decoders that leave the long prompt at least half of the KV cache; None if none fit."""
    prompt = min(DECODE_PROMPT_TOKENS, limits.prompt_tokens)
    for requests in MIXED_DECODERS:
        for output in MIXED_OUTPUT_TOKENS:
            output_tokens = min(output, limits.prompt_tokens + 1 - prompt)
            plan = DecodePlan(requests, prompt, output_tokens)
            prefill = _beside(limits, plan)
            if prefill > 1 and output_tokens > 1:
                return MixedPlan(plan, prefill)
    return None


def _beside(limits: Limits, decoders: DecodePlan) -> int:
    """Tokens of the longest prompt that has room beside the decoders, in one step's budget too."""
    held = decoders.requests * limits.blocks_of(decoders.prompt_tokens + decoders.output_tokens)
    is_too_wide = (
        decoders.requests >= limits.step_requests
        or decoders.requests * decoders.prompt_tokens > limits.step_tokens
        or (limits.blocks is not None and held * 2 > limits.blocks)
    )
    if is_too_wide:
        return 0
    free = limits.prompt_tokens
    if not limits.is_chunked:
        free = min(free, limits.step_tokens - decoders.requests)
    if limits.blocks is not None:
        free = min(free, (limits.blocks - held) * limits.block_tokens)
    return free
