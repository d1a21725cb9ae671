"""Which requests decode together, and beside which prompt? Plans within the limits of `sizes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from holdfast.probe.sizes import EngineLimits

DECODE_PROMPT_TOKENS = 8
DECODE_LADDER_TOKENS = (16, 64, 256)
"""Outputs of the widest decode; a request that joins late needs the longer ones."""
MIXED_DECODERS = (16, 8, 4, 2, 1)
MIXED_OUTPUT_TOKENS = (512, 128, 32)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Requests that are prefilled in one step and then decode together."""

    requests: int
    prompt_tokens: int
    output_tokens: int


def widest_decodes(limits: EngineLimits) -> tuple[DecodePlan, ...]:
    """Return plans for the most requests that can decode together; later ones decode longer."""
    seats = max(1, limits.decoding_requests)
    room = (limits.input_tokens or limits.step_tokens) // seats - limits.draft_slots
    prompt = max(1, min(DECODE_PROMPT_TOKENS, room, limits.step_tokens // seats))
    longest = limits.longest_answer(prompt)
    plans = (
        DecodePlan(_width(limits, prompt, output), prompt, output)
        for output in sorted({min(longest, output) for output in DECODE_LADDER_TOKENS})
        if output >= 2
    )
    found = [plan for plan in plans if plan.requests]
    return tuple(plan for plan in found if plan.requests == found[0].requests)


def _width(limits: EngineLimits, prompt_tokens: int, output_tokens: int) -> int:
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
    """Prompts before the long one, which fill the steps before requests decode."""


def mixed(limits: EngineLimits) -> tuple[MixedPlan, ...]:
    """Return plans that leave the prompts at least half of the KV cache, most decoders first."""
    plans = (_mixed(limits, requests) for requests in MIXED_DECODERS)
    return tuple(plan for plan in plans if plan is not None)


def _mixed(limits: EngineLimits, requests: int) -> MixedPlan | None:
    prompt = min(DECODE_PROMPT_TOKENS, limits.prompt_tokens)
    leading = _leading(limits)
    if len(leading) >= requests:
        # A step with only the leading prompts could be mistaken for one with the decoders.
        leading = ()
    for output in MIXED_OUTPUT_TOKENS:
        output_tokens = min(output, limits.longest_answer(prompt))
        plan = DecodePlan(requests, prompt, output_tokens)
        prefill = _beside(limits, plan, leading)
        if prefill > 1 and output_tokens > 1:
            return MixedPlan(plan, prefill, leading)
    return None


def prompts_behind(limits: EngineLimits, plan: MixedPlan) -> tuple[int, ...]:
    """Return prompts that outlast the step in which the decoders of a plan are prefilled.

    Queued behind the decoders, they still have tokens left for the step in which these decode, even
    if the answers have only two tokens. The result is empty if there is no room for them.
    """
    decoders = plan.decoders
    prefilled = decoders.requests * decoders.prompt_tokens
    first = (1 + limits.idle_steps) * limits.step_tokens - prefilled
    count = ceil((max(0, first) + 2) / plan.prefill_tokens)
    held = (decoders.prompt_tokens + decoders.output_tokens,) * decoders.requests
    # A step with only the prompts could be mistaken for one with the decoders.
    is_known = count < decoders.requests or count == 1
    has_seats = decoders.requests + count <= limits.step_requests
    has_room = limits.holds((*held, *(plan.prefill_tokens,) * count))
    return (plan.prefill_tokens,) * count if is_known and has_seats and has_room else ()


def _leading(limits: EngineLimits) -> tuple[int, ...]:
    """Return prompts that fill the steps after a pause in which vLLM lets no request decode.

    With asynchronous scheduling over a pipeline of N stages, a request decodes once in N steps
    (`AsyncScheduler._update_after_schedule`, 0.32).
    """
    longest = min(limits.prompt_tokens, limits.step_tokens)
    if not longest or not limits.idle_steps:
        return ()
    return (longest,) * ceil(limits.idle_steps * limits.step_tokens / longest)


def _beside(limits: EngineLimits, decoders: DecodePlan, leading: Sequence[int]) -> int:
    """Return the longest prompt that fits beside the others, also in the budget of one step."""
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
