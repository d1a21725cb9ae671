"""Calls to a running engine, with deadlines and our own errors; also the canary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any
from uuid import uuid4

from vllm import PoolingParams, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from holdfast.engine.baseline import CanaryAnswer, top_width
from holdfast.errors import EngineLostError, EngineRefusedError, EngineSilentError, HoldfastError
from holdfast.records import EngineFacts

CALL_DEADLINE_SECONDS = 60.0
REQUEST_PREFIX = "holdfast-canary-"
"""The prefix of its request ID, which tells it from a user's."""
_POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")


async def call_workers(llm: Any, method: str, **arguments: Any) -> None:
    """Have every worker call one of its own methods; see `worker.rpc`.

    Raises:
        EngineRefusedError: a worker failed. Others may have succeeded.
    """
    if errors := [error for error in await ask_workers(llm, method, **arguments) if error]:
        raise EngineRefusedError(errors[0])


async def ask_workers(llm: Any, method: str, **arguments: Any) -> list[str]:
    """As `call_workers`, but return the error of each worker; empty for one that succeeded."""
    answers = await llm.collective_rpc("holdfast_call", args=(method, arguments))
    return [answer["error"] for answer in answers]


@asynccontextmanager
async def rpc_deadline(
    what: str, deadline_seconds: float = CALL_DEADLINE_SECONDS
) -> AsyncIterator[None]:
    """Bound a call to the engine; `what` completes "the engine could not" in its errors.

    Raises:
        EngineSilentError: it did not answer in time.
        EngineRefusedError: the call failed.
        EngineLostError: the engine is dead.
    """
    try:
        async with asyncio.timeout(deadline_seconds):
            with _death_errors():
                yield
    except TimeoutError as error:
        raise EngineSilentError(
            f"the engine did not {what} within {deadline_seconds:.0f} s.",
            remedy="see /statusz: the engine may still do it, or may hang.",
        ) from error
    except HoldfastError as error:
        if type(error) is EngineRefusedError:
            raise EngineRefusedError(f"the engine could not {what}: {error.cause}") from error
        raise
    except Exception as error:  # vLLM raises a plain Exception for an RPC that failed
        cause = " ".join(str(error).split())[:600]
        raise EngineRefusedError(f"the engine could not {what}: {cause}") from error


async def check_canary(llm: Any, facts: EngineFacts, prompt: Sequence[int] = ()) -> CanaryAnswer:
    """Have the engine answer one small request. Cancelling this aborts the request.

    Return what it said after `prompt`; nothing without a prompt. A model that needs more than
    tokens, such as audio, gets no request; only its workers answer.

    Raises:
        EngineLostError: the engine is dead, is ending, or rejects the request.
    """
    request_id = f"{REQUEST_PREFIX}{uuid4().hex[:8]}"
    tokens: dict[str, Any] = {"prompt_token_ids": [_ordinary_token(facts)]}
    width = None
    if prompt:
        # A prefix that is cached would be computed in another shape, with other rounding.
        tokens = {"prompt_token_ids": list(prompt), "cache_salt": request_id}
        width = top_width(facts.max_logprobs)
    pooling_task = next((task for task in _POOLING_TASKS if task in facts.tasks), None)
    with _death_errors(), _refusal_errors():
        if facts.is_encoder_decoder:
            await llm.collective_rpc("check_health")
        elif "generate" in facts.tasks:
            parameters = SamplingParams(
                max_tokens=1, temperature=0.0, detokenize=False, logprobs=width
            )
            return await _answer(llm.generate(tokens, parameters, request_id))
        elif pooling_task:
            await _answer(llm.encode(tokens, PoolingParams(task=pooling_task), request_id))
        else:
            await llm.collective_rpc("check_health")
    return CanaryAnswer()


@contextmanager
def _death_errors() -> Iterator[None]:
    """Map vLLM's EngineDeadError, which carries no cause, to EngineLostError."""
    try:
        yield
    except EngineDeadError as error:
        raise EngineLostError("the engine died during a call to it") from error


@contextmanager
def _refusal_errors() -> Iterator[None]:
    """Map what vLLM raises for a request that it does not accept to EngineLostError."""
    try:
        yield
    except (
        ValueError,
        TypeError,
        RuntimeError,
        LookupError,
        NotImplementedError,
        EngineGenerateError,
    ) as error:
        raise EngineLostError(f"the engine did not accept a request: {error}") from error


async def _answer(outputs: Any) -> CanaryAnswer:
    """Await the answer, and return its first token if log-probs come with it."""
    found = CanaryAnswer()
    async with aclosing(outputs) as stream:
        async for output in stream:
            # A pooling model's answer has no finish reason.
            completions = output.outputs if isinstance(output.outputs, list) else ()
            if any(completion.finish_reason == "abort" for completion in completions):
                raise EngineLostError("the engine aborted the canary, which nobody had cancelled")
            for completion in completions:
                if completion.logprobs:
                    top = {token: told.logprob for token, told in completion.logprobs[0].items()}
                    found = CanaryAnswer(completion.token_ids[0], top)
    return found


def _ordinary_token(facts: EngineFacts) -> int:
    return next(
        (token for token in range(facts.vocab_size) if token not in facts.special_token_ids), 0
    )
