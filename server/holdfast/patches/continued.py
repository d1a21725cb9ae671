"""Has vLLM's engine go on with answers that another engine began.

The front end sends the tokens that the client has, under a name of ours in `extra_args`. They
become the output of the new request, as if it had been preempted: vLLM keeps the output of such a
request, and computes prompt and output again as one (`Scheduler._preempt_request`, 0.32). Two
things survive a preemption in memory, and are made again here: the state of a grammar, and the
output that the worker of the V1 runner keeps.

Importing this module is cheap: each function imports what it changes.
"""

from __future__ import annotations

import math
from typing import Any

from holdfast.patches import fits
from holdfast.patches.patch import original, replace

SENT_TOKENS = "holdfast_sent_token_ids"
"""The name in `SamplingParams.extra_args`. The front end refuses it from clients."""


def sent_tokens(parameters: Any) -> list[int]:
    """Return the tokens of the answer that the client has; empty for a new request."""
    found: list[int] = (getattr(parameters, "extra_args", None) or {}).get(SENT_TOKENS, [])
    return found


def resume_answers() -> None:
    """Have an EngineCore in this process make requests with the output that was sent."""
    if not fits("patches.continued.resume_answers"):
        return
    from vllm.v1.request import Request  # noqa: PLC0415 - see the module's docstring
    from vllm.v1.structured_output import StructuredOutputManager  # noqa: PLC0415 - as above

    make_request = original(Request, "from_engine_core_request")
    create_grammar = original(StructuredOutputManager, "_create_grammar")

    def make_begun_request(request: Any, block_hasher: Any) -> Any:
        made = make_request(request, block_hasher)
        if sent := sent_tokens(made.sampling_params):
            made.append_output_token_ids(sent)
            # The prompt was counted by the first engine, and the prefix cache may now have more
            # than the prompt, which vLLM does not expect of a request's first step.
            made.prefill_stats = None
        return made

    def create_advanced_grammar(manager: Any, request: Any) -> Any:
        grammar = create_grammar(manager, request)
        _advance(manager, request, grammar)
        return grammar

    # In place of a class method: EngineCore calls it by the name of the class.
    replace(Request, "from_engine_core_request", make_begun_request)
    replace(StructuredOutputManager, "_create_grammar", create_advanced_grammar)


def _advance(manager: Any, request: Any, grammar: Any) -> None:
    """Have a new grammar accept what was sent, as `StructuredOutputManager.accept_tokens` does.

    Raises:
        ValueError: the grammar does not accept it; vLLM then fails this request alone.
    """
    sent = sent_tokens(request.sampling_params)
    if not sent:
        return
    start = _grammar_start(manager, request, sent)
    if start > len(sent):
        return  # the model is still reasoning
    request.structured_output_request.reasoning_ended = True
    if not grammar.accept_tokens(request.request_id, sent[start:]):
        raise ValueError("the grammar does not accept what was sent of the answer")


def _grammar_start(manager: Any, request: Any, sent: list[int]) -> int:
    """Return the place in `sent` from which the grammar counts; more than its length if none.

    vLLM looks for it from the end, and at each token again at all before it, which for a long
    answer would stop EngineCore for seconds. So it gets the answer in parts, as from several steps.
    """
    until = request.num_tokens - len(sent)
    part_tokens = math.isqrt(len(sent)) + 1
    for begin in range(0, len(sent), part_tokens):
        part = sent[begin : begin + part_tokens]
        until += len(part)
        seen = _Begun(request, until)
        bounds = manager._get_constraint_bounds(seen, part, spec_tokens_committed=True)  # noqa: SLF001 - vLLM has no other name for it
        if bounds.grammar_start <= len(part):
            return begin + int(bounds.grammar_start)
    return len(sent) + 1


class _Begun:
    """A request as it was when it had its first tokens only."""

    def __init__(self, request: Any, tokens: int) -> None:
        self._request = request
        self.all_token_ids = request.all_token_ids[:tokens]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def keep_sent_tokens(vllm_config: Any) -> None:
    """Have a worker of the V1 runner begin a request with the output that was sent.

    The V2 runner gets prompt and output of each new request anyway (0.32).
    """
    if vllm_config.use_v2_model_runner:
        return
    from vllm.v1.worker import gpu_model_runner  # noqa: PLC0415 - as above

    kind = original(gpu_model_runner, "CachedRequestState")

    def begin(state: Any) -> None:
        state.output_token_ids += sent_tokens(state.sampling_params)
        kind.__post_init__(state)

    begun_kind = type(kind.__name__, (kind,), {"__post_init__": begin})
    replace(gpu_model_runner, "CachedRequestState", begun_kind)
