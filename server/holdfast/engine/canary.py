"""One token, or one embedding, through vLLM's AsyncLLM: does an idle engine still answer?"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any
from uuid import uuid4

from vllm import PoolingParams, SamplingParams

from holdfast.engine.vllm_errors import death_errors, refusal_errors
from holdfast.errors import EngineLostError
from holdfast.records import EngineFacts

REQUEST_PREFIX = "holdfast-canary-"
"""What vLLM's name of the request begins with, for who tells it from a user's."""
_POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")


async def sing(llm: Any, facts: EngineFacts) -> None:
    """Return when the engine has answered. Cancelling it aborts the request.

    A model that takes more than tokens, such as audio, is not asked for one: its workers are asked
    whether they are there.

    Raises:
        EngineLostError: the engine is dead, ends, or does not take the request.
    """
    request_id = f"{REQUEST_PREFIX}{uuid4().hex[:8]}"
    prompt = {"prompt_token_ids": [_ordinary_token(facts)]}
    pooling_task = next((task for task in _POOLING_TASKS if task in facts.tasks), None)
    with death_errors(), refusal_errors():
        if facts.is_encoder_decoder:
            await llm.collective_rpc("check_health")
        elif "generate" in facts.tasks:
            parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
            await _answer(llm.generate(prompt, parameters, request_id))
        elif pooling_task:
            await _answer(llm.encode(prompt, PoolingParams(task=pooling_task), request_id))
        else:
            await llm.collective_rpc("check_health")


async def _answer(outputs: Any) -> None:
    async with aclosing(outputs) as stream:
        async for output in stream:
            # What a pooling model answers has no end to tell of.
            completions = output.outputs if isinstance(output.outputs, list) else ()
            if any(completion.finish_reason == "abort" for completion in completions):
                raise EngineLostError("the engine aborted the canary, which nobody had cancelled")


def _ordinary_token(facts: EngineFacts) -> int:
    return next(
        (token for token in range(facts.vocab_size) if token not in facts.special_token_ids), 0
    )
