"""Tests whether an idle engine still answers, and whether a start can still end.

vLLM waits ten minutes for a process that is stopped or gone (0.32).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any
from uuid import uuid4

import psutil
from vllm import PoolingParams, SamplingParams

from holdfast.engine.vllm_errors import death_errors, refusal_errors
from holdfast.errors import EngineLostError
from holdfast.processes import tree
from holdfast.records import EngineFacts

CORE = "EngineCore"
"""Part of the title of every process that the front end waits for."""
GONE_SECONDS = 15.0
"""Longer than vLLM itself takes to see that a core has ended, where it looks."""
LOOK_SECONDS = 1.0


async def until_stuck(
    family: Callable[[], frozenset[psutil.Process]], stopped_seconds: float
) -> str:
    """Return the reason once a start cannot go on.

    It cannot once one of its processes has been stopped for `stopped_seconds`, or once a core has
    been gone for `GONE_SECONDS` without vLLM noticing.
    """
    stopped_since: dict[int, float] = {}
    cores: set[psutil.Process] = set()
    gone_since: float | None = None
    while True:
        now = asyncio.get_running_loop().time()
        living = await asyncio.to_thread(family)
        stopped_since = {pid: stopped_since.get(pid, now) for pid in tree.stopped(living)}
        for pid, since in stopped_since.items():
            if now - since >= stopped_seconds:
                return f"process {pid} was stopped by a signal for {now - since:.0f} s"
        cores |= {process for process in living if _is_core(process)}
        is_one_gone = any(not tree.is_alive(core) for core in cores)
        gone_since = (gone_since or now) if is_one_gone else None
        if gone_since is not None and now - gone_since >= GONE_SECONDS:
            return "EngineCore ended without a message"
        await asyncio.sleep(LOOK_SECONDS)


def _is_core(process: psutil.Process) -> bool:
    try:
        return CORE in " ".join(process.cmdline())
    except psutil.Error:
        return False


REQUEST_PREFIX = "holdfast-canary-"
"""The prefix of vLLM's name of the request, which tells it from a user's."""
_POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")


async def sing(llm: Any, facts: EngineFacts) -> None:
    """Return when the engine has answered. Cancelling the call aborts the request.

    A model that needs more than tokens, such as audio, gets no request: its workers are asked
    whether they are there.

    Raises:
        EngineLostError: the engine is dead, ends, or rejects the request.
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
            # A pooling model's answer has no finish reason.
            completions = output.outputs if isinstance(output.outputs, list) else ()
            if any(completion.finish_reason == "abort" for completion in completions):
                raise EngineLostError("the engine aborted the canary, which nobody had cancelled")


def _ordinary_token(facts: EngineFacts) -> int:
    return next(
        (token for token in range(facts.vocab_size) if token not in facts.special_token_ids), 0
    )
