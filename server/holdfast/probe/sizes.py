"""Which sizes are tried, and how is a step of a chosen size made up? Pure arithmetic on tokens.

A step is bounded by `max_num_batched_tokens`, `max_num_seqs`, `max_model_len` and the KV cache,
which hands out whole blocks. Speculation takes its share of each: a request that decodes asks for
its drafts too, some ways of drafting need slots of the step beside the tokens, and some write KV
past them (`Scheduler.schedule` and `VllmConfig.num_lookahead_tokens` of vLLM 0.32). No plan made
here exceeds any of these.
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
"""The new tail of a continued prefix; kernels take another path above 128."""
DECODE_PROMPT_TOKENS = 8
DECODE_LADDER_TOKENS = (16, 64, 256)
"""Outputs of the widest decode; the longer ones are for a request that joins late."""
MIXED_DECODERS = (16, 8, 4, 2, 1)
MIXED_OUTPUT_TOKENS = (512, 128, 32)


def is_pooling(facts: EngineFacts) -> bool:
    """Whether the model answers with vectors or scores instead of tokens."""
    return "generate" not in facts.tasks


def is_transcribing(facts: EngineFacts) -> bool:
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
    """Tokens that one step may schedule."""
    step_requests: int
    block_tokens: int
    is_chunked: bool
    """Whether a prompt may be prefilled over several steps."""
    blocks: int | None
    """Blocks of KV cache that requests may hold; None where nothing is kept."""
    spare_blocks: int = 0
    """Blocks that stay free when a request joins another: vLLM's watermark."""
    input_tokens: int | None = None
    """Tokens and draft slots of one step together; None where they are no bound of their own."""
    draft_tokens: int = 0
    """What each request that decodes asks for beside its one token."""
    draft_slots: int = 0
    """What each request of a step takes of `input_tokens` beside its tokens."""
    lookahead_tokens: int = 0
    """For how many tokens past its own a request holds KV cache, up to `context_tokens`."""
    context_tokens: int | None = None
    """max_model_len, for no more of which a request holds KV cache."""
    shared_prompt_tokens: int | None = None
    """The most tokens of one prompt in a step with others; None for no such bound."""
    idle_steps: int = 0
    """Steps after a pause in which nothing decodes yet: one fewer than the pipeline's stages."""

    @classmethod
    def of(cls, facts: EngineFacts, max_tokens: int | None) -> Self:
        """The limits of an engine, with the operator's cap on prompts."""
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
            idle_steps=facts.pipeline_stages - 1,
        )

    @property
    def decode_tokens(self) -> int:
        """What one request that decodes schedules in a step: a token, and its drafts."""
        return 1 + self.draft_tokens

    @property
    def decoding_requests(self) -> int:
        """How many requests can decode in one step."""
        most = min(self.step_requests, self.step_tokens // self.decode_tokens)
        if self.input_tokens is not None:
            most = min(most, self.input_tokens // (self.decode_tokens + self.draft_slots))
        return most

    def takes(self, tokens: int, requests: int) -> bool:
        """Whether one step schedules so many tokens of so many requests, KV cache aside."""
        room = self.step_tokens if self.input_tokens is None else self.input_tokens
        return (
            tokens <= self.step_tokens
            and requests <= self.step_requests
            and tokens + requests * self.draft_slots <= room
        )

    def blocks_of(self, tokens: int) -> int:
        """Blocks that a request of so many tokens holds."""
        held = tokens + self.lookahead_tokens
        if self.context_tokens is not None:
            held = min(held, self.context_tokens)
        return -(-held // self.block_tokens)

    def holds(self, lengths: Sequence[int]) -> bool:
        """Whether requests of these lengths are in the KV cache at the same time."""
        if self.blocks is None:
            return True
        spare = self.spare_blocks if len(lengths) > 1 else 0
        return sum(map(self.blocks_of, lengths)) <= self.blocks - spare


def _usable_blocks(facts: EngineFacts) -> int | None:
    """One block is vLLM's null block, but a request of max_model_len has room if its tokens have.

    The capacity in tokens is that of such requests (`get_kv_cache_capacity`, 0.32), and no multiple
    of a block.
    """
    if not facts.kv_capacity_tokens:
        return None
    usable = facts.kv_capacity_tokens // facts.kv_block_tokens - 1
    if facts.kv_capacity_tokens < facts.max_model_len:
        return usable
    return max(usable, _blocks(facts.max_model_len, facts))


def _blocks(tokens: int, facts: EngineFacts) -> int:
    return -(-tokens // facts.kv_block_tokens)


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
    longest = limits.prompt_tokens if tokens <= limits.prompt_tokens else _longest_shared(limits)
    if not longest:
        return None
    whole, rest = divmod(tokens, longest)
    lengths = (longest,) * whole + ((rest,) if rest else ())
    return lengths if _is_one_step(limits, lengths) else None


def most(limits: Limits, tokens: int) -> tuple[int, ...] | None:
    """Prompt lengths that sum to `tokens` over as many requests as fit; None if none fit."""
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


def _longest_shared(limits: Limits) -> int:
    """The longest prompt that is prefilled in one step with others."""
    return min(limits.prompt_tokens, limits.shared_prompt_tokens or limits.prompt_tokens)


def _is_one_step(limits: Limits, lengths: Sequence[int]) -> bool:
    longest = limits.prompt_tokens if len(lengths) == 1 else _longest_shared(limits)
    return (
        limits.takes(sum(lengths), len(lengths))
        and max(lengths) <= longest
        and limits.holds(lengths)
    )


def largest_step(limits: Limits) -> int:
    """The most tokens that one step can be made to schedule."""
    sizes = range(1, limits.step_tokens + 1)
    return bisect_right(sizes, x=False, key=lambda size: fewest(limits, size) is None)


def fullest_step(limits: Limits) -> int:
    """The most tokens of a step that is over as many requests as any step.

    It is the largest step but where each request takes draft slots, or prompts are cut.
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


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Requests that are prefilled in one step and then decode together."""

    requests: int
    prompt_tokens: int
    output_tokens: int


def widest_decodes(limits: Limits) -> tuple[DecodePlan, ...]:
    """As many requests as can decode together; the later plans only decode longer."""
    seats = max(1, limits.decoding_requests)
    room = (limits.input_tokens or limits.step_tokens) // seats - limits.draft_slots
    prompt = max(1, min(DECODE_PROMPT_TOKENS, room, limits.step_tokens // seats))
    longest = limits.prompt_tokens + 1 - prompt
    plans = (
        DecodePlan(_width(limits, prompt, output), prompt, output)
        for output in sorted({min(longest, output) for output in DECODE_LADDER_TOKENS})
        if output >= 2
    )
    found = [plan for plan in plans if plan.requests]
    return tuple(plan for plan in found if plan.requests == found[0].requests)


def _width(limits: Limits, prompt_tokens: int, output_tokens: int) -> int:
    width = limits.decoding_requests
    while width and not (
        limits.takes(width * prompt_tokens, width)
        and limits.holds((prompt_tokens + output_tokens,) * width)
    ):
        width -= 1
    return width


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """Requests that decode while one long prompt is prefilled."""

    decoders: DecodePlan
    prefill_tokens: int
    leading: tuple[int, ...] = ()
    """Prompts before the long one that fill the steps in which no request decodes yet."""


def mixed(limits: Limits) -> tuple[MixedPlan, ...]:
    """Decoders that leave the prompts at least half of the KV cache, the most of them first."""
    plans = (_mixed(limits, requests) for requests in MIXED_DECODERS)
    return tuple(plan for plan in plans if plan is not None)


def _mixed(limits: Limits, requests: int) -> MixedPlan | None:
    prompt = min(DECODE_PROMPT_TOKENS, limits.prompt_tokens)
    leading = _leading(limits)
    if len(leading) >= requests:
        # A step with the leading prompts alone could be taken for one with the decoders.
        leading = ()
    for output in MIXED_OUTPUT_TOKENS:
        output_tokens = min(output, limits.prompt_tokens + 1 - prompt)
        plan = DecodePlan(requests, prompt, output_tokens)
        prefill = _beside(limits, plan, leading)
        if prefill > 1 and output_tokens > 1:
            return MixedPlan(plan, prefill, leading)
    return None


def _leading(limits: Limits) -> tuple[int, ...]:
    """Prompts that fill the steps in which vLLM lets no request decode after a pause.

    With asynchronous scheduling over a pipeline, a request decodes once in as many steps as there
    are stages (`AsyncScheduler._update_after_schedule`, 0.32).
    """
    longest = min(limits.prompt_tokens, limits.step_tokens)
    if not longest or not limits.idle_steps:
        return ()
    return (longest,) * ceil(limits.idle_steps * limits.step_tokens / longest)


def _beside(limits: Limits, decoders: DecodePlan, leading: Sequence[int]) -> int:
    """Tokens of the longest prompt that has room beside the others, in one step's budget too."""
    width = decoders.requests
    held = width * limits.blocks_of(decoders.prompt_tokens + decoders.output_tokens)
    is_too_wide = (
        width >= limits.decoding_requests
        or width + len(leading) >= limits.step_requests
        or not limits.takes(width * decoders.prompt_tokens, width)
        or not limits.takes(width * limits.decode_tokens + 1, width + 1)
    )
    if is_too_wide:
        return 0
    free = limits.prompt_tokens
    if not limits.is_chunked:
        slots = (width + 1) * limits.draft_slots
        room = min(limits.step_tokens, (limits.input_tokens or limits.step_tokens) - slots)
        free = min(free, room - width * limits.decode_tokens)
    if limits.blocks is not None:
        blocks = limits.blocks - limits.spare_blocks - held
        if blocks < held:
            return 0
        blocks -= sum(map(limits.blocks_of, leading))
        free = min(free, blocks * limits.block_tokens - limits.lookahead_tokens)
    return free
