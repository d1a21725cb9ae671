"""Which sizes are tried, and which prompts make a step of a chosen size? Arithmetic on tokens.

A step is bounded by `max_num_batched_tokens`, `max_num_seqs`, `max_model_len` and the KV cache,
which hands out whole blocks. Speculation takes its share of each: a request that decodes asks for
its drafts too, some methods of drafting need slots of the step beside the tokens, and some write KV
past them (`Scheduler.schedule` and `VllmConfig.num_lookahead_tokens` of vLLM 0.32). No plan made
here exceeds any of these limits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Self

from holdfast.records import EngineFacts

FIRST_CONTEXT_TOKENS = 128
FIRST_BATCH_TOKENS = 8
TAIL_TOKENS = 160
"""The new tail of a cached prefix; kernels take another path above 128."""


def is_pooling(facts: EngineFacts) -> bool:
    """Whether the model answers with vectors or scores instead of tokens."""
    return "generate" not in facts.tasks


def is_transcribing(facts: EngineFacts) -> bool:
    """Whether the model accepts audio, and no prompts of bare tokens."""
    takes_tokens = "generate" in facts.tasks and not facts.is_encoder_decoder
    return "transcription" in facts.tasks and not takes_tokens


def full_prompt_tokens(facts: EngineFacts) -> int:
    """Return the longest prompt of the model, which leaves a token for an answer if one is made."""
    return facts.max_model_len - (0 if is_pooling(facts) else 1)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The bounds of prompts and steps of one engine."""

    prompt_tokens: int
    step_tokens: int
    """The tokens that one step may schedule."""
    step_requests: int
    block_tokens: int
    is_chunked: bool
    """Whether a prompt may be prefilled over several steps."""
    blocks: int | None
    """The blocks of KV cache that requests may hold; None if the model keeps none."""
    spare_blocks: int = 0
    """The blocks that stay free when a request joins another: vLLM's watermark."""
    input_tokens: int | None = None
    """The tokens and draft slots of one step together; None if there is no such bound."""
    draft_tokens: int = 0
    """The tokens that each decoding request asks for beside its own."""
    draft_slots: int = 0
    """The share of `input_tokens` that each request of a step takes beside its tokens."""
    lookahead_tokens: int = 0
    """The tokens past its own that a request holds KV cache for, up to `context_tokens`."""
    context_tokens: int | None = None
    """The most tokens that a request holds KV cache for: max_model_len."""
    shared_prompt_tokens: int | None = None
    """The most tokens of one prompt in a step with others; None if there is no such bound."""
    answer_tokens: int | None = None
    """The most tokens that the server lets an answer have; None if the context alone limits it."""
    idle_steps: int = 0
    """The steps after a pause before requests decode: one fewer than the pipeline's stages."""

    @classmethod
    def of(cls, facts: EngineFacts, max_tokens: int | None) -> Self:
        """Return the limits of an engine, with the operator's cap on prompts."""
        blocks = _usable_blocks(facts)
        ahead = facts.draft_tokens + facts.draft_lookahead_tokens
        bounds = [full_prompt_tokens(facts)]
        if max_tokens is not None:
            bounds.append(max_tokens)
        if blocks is not None and blocks < _blocks(facts.max_model_len, facts):
            bounds.append(blocks * facts.kv_block_tokens - ahead)
        if not facts.has_chunked_prefill:
            bounds.append(facts.max_num_batched_tokens - facts.draft_slots)
        return cls(
            prompt_tokens=max(0, min(bounds)),
            step_tokens=facts.max_num_scheduled_tokens or facts.max_num_batched_tokens,
            step_requests=facts.max_num_seqs,
            block_tokens=facts.kv_block_tokens,
            is_chunked=facts.has_chunked_prefill,
            blocks=blocks,
            spare_blocks=ceil(facts.kv_watermark * (blocks or 0)),
            input_tokens=facts.max_num_batched_tokens,
            draft_tokens=facts.draft_tokens,
            draft_slots=facts.draft_slots,
            lookahead_tokens=ahead,
            context_tokens=facts.max_model_len,
            shared_prompt_tokens=facts.long_prefill_tokens,
            answer_tokens=facts.max_answer_tokens,
            idle_steps=facts.pipeline_stages - 1,
        )

    @property
    def decode_tokens(self) -> int:
        """The tokens that one decoding request schedules in a step: one, and its drafts."""
        return 1 + self.draft_tokens

    @property
    def decoding_requests(self) -> int:
        """The most requests that can decode in one step."""
        most = min(self.step_requests, self.step_tokens // self.decode_tokens)
        if self.input_tokens is not None:
            most = min(most, self.input_tokens // (self.decode_tokens + self.draft_slots))
        return most

    def longest_answer(self, prompt_tokens: int) -> int:
        """Return the most tokens of an answer after a prompt of `prompt_tokens`."""
        room = self.prompt_tokens + 1 - prompt_tokens
        return room if self.answer_tokens is None else min(room, self.answer_tokens)

    def takes(self, tokens: int, requests: int) -> bool:
        """Whether one step can schedule this many tokens and requests, KV cache aside."""
        room = self.step_tokens if self.input_tokens is None else self.input_tokens
        return (
            tokens <= self.step_tokens
            and requests <= self.step_requests
            and tokens + requests * self.draft_slots <= room
        )

    def blocks_of(self, tokens: int) -> int:
        """Return the blocks that a request of `tokens` tokens holds."""
        held = tokens + self.lookahead_tokens
        if self.context_tokens is not None:
            held = min(held, self.context_tokens)
        return -(-held // self.block_tokens)

    def holds(self, lengths: Sequence[int]) -> bool:
        """Whether requests of these lengths fit in the KV cache at the same time."""
        if self.blocks is None:
            return True
        spare = self.spare_blocks if len(lengths) > 1 else 0
        return sum(map(self.blocks_of, lengths)) <= self.blocks - spare


def _usable_blocks(facts: EngineFacts) -> int | None:
    """Return the blocks without vLLM's null block, but enough for max_model_len if its tokens fit.

    The capacity in tokens counts requests of that length (`get_kv_cache_capacity`, 0.32), and is
    not a multiple of a block.
    """
    if not facts.kv_capacity_tokens:
        return None
    usable = facts.kv_capacity_tokens // facts.kv_block_tokens - 1
    if facts.kv_capacity_tokens < facts.max_model_len:
        return usable
    return max(usable, _blocks(facts.max_model_len, facts))


def _blocks(tokens: int, facts: EngineFacts) -> int:
    return -(-tokens // facts.kv_block_tokens)


def context_sizes(limits: EngineLimits, first: int = FIRST_CONTEXT_TOKENS) -> Iterator[int]:
    """Yield sizes that double from `first` up to the longest prompt, which is the last."""
    size = first
    while size < limits.prompt_tokens:
        yield size
        size *= 2
    if limits.prompt_tokens > 0:
        yield limits.prompt_tokens


def batch_sizes(largest: int) -> tuple[int, ...]:
    """Return an increasing sample of step sizes up to `largest`, which is the last.

    Need is not monotone in size, and not every size can be tried. The sample has the sizes that
    kernels round to: powers of two, one less and one more, and in each octave 3/2 and 29/16 of its
    lower end (a fork needed more at 232 = 29/16 x 128 rows than at its maximum).
    """
    sizes = {largest} if largest > 0 else set()
    octave = FIRST_BATCH_TOKENS
    while octave - 1 <= largest:
        sizes |= {octave - 1, octave, octave + 1, octave * 3 // 2, octave * 29 // 16}
        octave *= 2
    return tuple(sorted(size for size in sizes if size <= largest))


def fewest(limits: EngineLimits, tokens: int) -> tuple[int, ...] | None:
    """Return prompt lengths that sum to `tokens`, as few as possible; None if none fit."""
    longest = limits.prompt_tokens if tokens <= limits.prompt_tokens else _longest_shared(limits)
    if not longest:
        return None
    whole, rest = divmod(tokens, longest)
    lengths = (longest,) * whole + ((rest,) if rest else ())
    return lengths if _is_one_step(limits, lengths) else None


def most(limits: EngineLimits, tokens: int) -> tuple[int, ...] | None:
    """Return prompt lengths that sum to `tokens`, as many as fit; None if none fit."""
    room = (limits.input_tokens or limits.step_tokens) - tokens
    seats = room // limits.draft_slots if limits.draft_slots else limits.step_requests
    for requests in range(min(tokens, limits.step_requests, seats), 0, -1):
        lengths = _even(tokens, requests)
        if _is_one_step(limits, lengths):
            return lengths
    return fewest(limits, tokens)


def _even(tokens: int, requests: int) -> tuple[int, ...]:
    short, longer = divmod(tokens, requests)
    return (short + 1,) * longer + (short,) * (requests - longer)


def _longest_shared(limits: EngineLimits) -> int:
    """Return the longest prompt that is prefilled in one step with others."""
    return min(limits.prompt_tokens, limits.shared_prompt_tokens or limits.prompt_tokens)


def _is_one_step(limits: EngineLimits, lengths: Sequence[int]) -> bool:
    longest = limits.prompt_tokens if len(lengths) == 1 else _longest_shared(limits)
    return (
        limits.takes(sum(lengths), len(lengths))
        and max(lengths) <= longest
        and limits.holds(lengths)
    )


def largest_step(limits: EngineLimits) -> int:
    """Return the most tokens that one step can schedule."""
    sizes = range(1, limits.step_tokens + 1)
    return bisect_right(sizes, x=False, key=lambda size: fewest(limits, size) is None)


def fullest_step(limits: EngineLimits) -> int:
    """Return the most tokens of a step with the most requests.

    It is the largest step, except where each request takes draft slots or prompts are cut.
    """
    requests = limits.step_requests
    while requests and not _is_one_step(limits, (1,) * requests):
        requests -= 1
    if not requests:
        return 0
    sizes = range(requests, limits.step_tokens + 1)
    fits = bisect_right(
        sizes, x=False, key=lambda size: not _is_one_step(limits, _even(size, requests))
    )
    return sizes[fits - 1]
