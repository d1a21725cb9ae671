"""Lets an engine go on with an answer that another engine began.

To vLLM the request is then one that was preempted: the tokens that were sent are its output, and
none of them is computed. Here, the front end's state of the request is brought to where it was; in
the engine, `patches.continued` does the same. So all that depends on the output (penalties, stop
strings, `min_tokens`, grammars, log-probs, usage) is as in one engine.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

from vllm.logprobs import append_logprobs_for_next_position
from vllm.v1.metrics.stats import RequestStateStats

from holdfast.engine.requests.request import SentAnswer
from holdfast.patches import fits
from holdfast.patches.continued import SENT_TOKENS

CHARACTER_TOKENS = 4
"""How many tokens a character may be made of, as `LogprobsProcessor` has it (0.32)."""

FIRST_WEIGHTS = "default"
"""What `EngineCore` calls the weights that it has loaded (0.32). No stream of others goes on."""


@dataclass(frozen=True, slots=True)
class ContinuedPrompt:
    """The prompt of a request, and what was sent of its answer."""

    prompt: Any
    sent: SentAnswer


_SENT: ContextVar[SentAnswer | None] = ContextVar("holdfast_sent_answer", default=None)


def sent_answer() -> SentAnswer | None:
    """Return what was sent of the answer that the running task adds to an engine, if anything."""
    return _SENT.get()


@contextmanager
def going_on(prompt: Any) -> Iterator[Any]:
    """Yield the prompt for vLLM; while entered, `sent_answer` returns what was sent."""
    if not isinstance(prompt, ContinuedPrompt):
        yield prompt
        return
    token = _SENT.set(prompt.sent)
    try:
        yield prompt.prompt
    finally:
        _SENT.reset(token)


def fits_vllm() -> bool:
    """Whether this vLLM has what going on needs, in the front end and in the engine."""
    return fits("engine.requests.continuation.restore") and fits("patches.continued.resume_answers")


def restore(state: Any, sent: SentAnswer) -> None:
    """Bring vLLM's new `RequestState` to where it was when the last token of `sent` was sent.

    Text, stop strings and log-probs then go on without a seam, and the counts of the prompt and the
    times are those of the first engine.
    """
    last = sent.last_output
    state.detokenizer.update(sent.token_ids, stop_terminated=False)
    state.detokenizer.get_next_output_text(finished=False, delta=True)  # it was sent
    state.sent_tokens_offset = len(sent.token_ids)
    _restore_logprobs(state.logprobs_processor, sent)
    state.is_prefilling = False
    state.weight_version_starts = [(FIRST_WEIGHTS, 0)]
    state.num_cached_tokens = last.num_cached_tokens
    state.num_cache_creation_tokens = last.num_cache_creation_tokens
    if state.stats is not None and last.metrics is not None:
        state.stats = _FirstTimes(**asdict(last.metrics))
        state.stats.num_generation_tokens = len(sent.token_ids)


def _restore_logprobs(processor: Any, sent: SentAnswer) -> None:
    processor.pop_prompt_logprobs()  # the first output had them
    if processor.logprobs is None:
        return
    processor.cumulative_logprob = sent.last_output.outputs[0].cumulative_logprob
    # A character may begin before the seam. These values are never sent: each output has new ones.
    for token_id in sent.token_ids[-CHARACTER_TOKENS:]:
        append_logprobs_for_next_position(processor.logprobs, [token_id], [0.0], [None], 1, 0)


class _FirstTimes(RequestStateStats):  # type: ignore[misc]  # vLLM is Any to us
    """The times of a request; a later engine does not change when it was queued first.

    vLLM keeps the first time at which a request was scheduled, but the last at which it was queued,
    so its wait would be negative (`IterationStats.update_from_events`, 0.32).
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "queued_ts" or name not in vars(self):
            super().__setattr__(name, value)


def hand_over(request: Any, sent: SentAnswer, *, draws_by_position: bool) -> None:
    """Put what was sent into an `EngineCoreRequest` that is about to be sent.

    A sampler that draws by the position in the answer (`draws_by_position`) goes on as if nothing
    had happened. Another one has a generator for each seed, and would draw the same random numbers
    as at the beginning of the answer, so it gets another seed.
    """
    parameters = copy.copy(request.sampling_params)
    parameters.extra_args = {**(parameters.extra_args or {}), SENT_TOKENS: [*sent.token_ids]}
    parameters.prompt_logprobs = None
    if parameters.seed is not None and not draws_by_position:
        parameters.seed = _another_seed(parameters.seed, len(sent.token_ids))
    request.sampling_params = parameters


def _another_seed(seed: int, sent_tokens: int) -> int:
    """Return the same number, from 0 to 2**63 - 1, for the same arguments."""
    digest = hashlib.sha256(f"{seed} {sent_tokens}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
