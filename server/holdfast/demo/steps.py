"""What does one engine step look like? Plain numbers, so that a fault can name its step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Self

StepQuantity = Literal[
    "context",
    "continuation",
    "step_tokens",
    "batched_tokens",
    "repeated_tokens",
    "decodes",
    "mixed_tokens",
]

LONG_TAIL_TOKENS = 128
"""A prefill that continues a cached context takes another path above this many new tokens."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step of one rank. A prefill is a request that computes more than one token."""

    scheduled_tokens: int
    prefill_tokens: int
    prefills: int
    decodes: int
    longest_context_tokens: int
    """The longest of all requests, cached and new tokens together."""
    longest_continued_tokens: int
    """The longest cached context of a prefill with more than `LONG_TAIL_TOKENS` new tokens."""
    first_request_tokens: int = 0
    commonest_token_count: int = 0
    """How often the commonest token is in the step; 0 where token ids are not known."""

    @classmethod
    def of(cls, query_starts: Sequence[int], context_tokens: Sequence[int]) -> Self:
        """The shape of a step from where each request's new tokens start and its whole context.

        `query_starts` has one entry more than there are requests; padding requests have no tokens.
        """
        lengths = [stop - start for start, stop in pairwise(query_starts)]
        requests = [
            (new, context) for new, context in zip(lengths, context_tokens, strict=True) if new
        ]
        prefills = [new for new, _ in requests if new > 1]
        return cls(
            scheduled_tokens=sum(new for new, _ in requests),
            prefill_tokens=sum(prefills),
            prefills=len(prefills),
            decodes=len(requests) - len(prefills),
            longest_context_tokens=max((context for _, context in requests), default=0),
            longest_continued_tokens=max(
                (context - new for new, context in requests if new > LONG_TAIL_TOKENS), default=0
            ),
            first_request_tokens=requests[0][0] if requests else 0,
        )


def commonest_count(token_ids: Sequence[int]) -> int:
    """How often the commonest of `token_ids` occurs."""
    return max(Counter(token_ids).values(), default=0)


_QUANTITIES: Mapping[StepQuantity, Callable[[StepShape], int]] = {
    "context": lambda step: step.longest_context_tokens if step.prefills else 0,
    "continuation": lambda step: step.longest_continued_tokens,
    "step_tokens": lambda step: step.scheduled_tokens,
    "batched_tokens": lambda step: step.prefill_tokens if step.prefills > 1 else 0,
    "repeated_tokens": lambda step: step.commonest_token_count,
    "decodes": lambda step: 0 if step.prefills else step.decodes,
    "mixed_tokens": lambda step: step.prefill_tokens if step.decodes else 0,
}


def quantity(step: StepShape, name: StepQuantity) -> int:
    """The number that a fault with `when == name` is compared with.

    * `context`: the longest context, in a step with a prefill
    * `continuation`: the longest cached context that a long tail continues
    * `step_tokens`: all scheduled tokens
    * `batched_tokens`: prefill tokens, in a step with several prefills
    * `repeated_tokens`: how often the commonest token is in the step
    * `decodes`: decoding requests, in a step without a prefill
    * `mixed_tokens`: prefill tokens, in a step where others decode
    """
    return _QUANTITIES[name](step)
