"""Attacks by what a body asks for: memory, the event loop, and places in the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from hostile.target import MIB, Outcomes, Target, told, until_ended

ODD: tuple[Mapping[str, Any], ...] = (
    {"n": 0},
    {"n": -1},
    {"n": 2**62},
    {"best_of": 3, "n": 2},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": 2**63},
    {"min_tokens": 50, "max_tokens": 3},
    {"temperature": 1e308},
    {"temperature": -1},
    {"temperature": 1e-300},
    {"top_p": 0},
    {"top_k": -5},
    {"min_p": 2},
    {"repetition_penalty": 1e30},
    {"repetition_penalty": 0},
    {"frequency_penalty": -2, "presence_penalty": 2},
    {"seed": -1},
    {"seed": 2**63},
    {"seed": 2**64},
    {"logprobs": 20},
    {"logprobs": 10**9},
    {"prompt_logprobs": 20},
    {"prompt_logprobs": -1},
    {"logit_bias": {"5": 100, "999999": 1}},
    {"logit_bias": {str(number): -100 for number in range(300)}},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [10**9]},
    {"bad_words": ["x" * 10_000]},
    {"stop": ["x"] * 5000},
    {"stop_token_ids": [-1, 10**12]},
    {"truncate_prompt_tokens": 1},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": 10**9},
    {"echo": True, "max_tokens": 0},
    {"echo": True, "logprobs": 5},
    {"use_beam_search": True, "n": 4, "temperature": 0},
    {"suffix": "x"},
    {"priority": -(10**9)},
    {"cache_salt": "x" * 100_000},
    {"kv_transfer_params": {"do_remote_prefill": True}},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    {"return_tokens_as_token_ids": True, "logprobs": 3},
    {"request_id": "a\nb"},
    {"vllm_xargs": {"x": [1, 2, 3]}},
    {"vllm_xargs": {"kv_transfer_params": "x"}},
    {"vllm_xargs": {"ec_transfer_params": [1]}},
    {"vllm_xargs": {"kv_cache_report_mode": [1], "session_id": 3}},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": [-1]},
    {"prompt": [10**9]},
    {"prompt": [2**63]},
    {"prompt": None},
    {"prompt_embeds": "AAAA"},
    {"model": "x" * 100_000},
    {"prompt": "\ud800"},
    {"lora_request": {}},
)


async def brackets(target: Target) -> Outcomes:
    """31 MiB of closing brackets, then more opening ones than are let through."""
    unit = target.chosen.choice((b"]", b"}", b'"]"', b"[", b"]["))
    body = unit * (31 * MIB // len(unit)) + b"[" * 129
    return await told([target.post("/v1/completions", body)])


async def many_tokenized(target: Target) -> Outcomes:
    """31 MiB from each of many connections, each held back before its last bytes."""
    paths = ("/tokenize", "/detokenize", "/v1/chat/completions")
    return await told(_held_back(target, target.chosen.choice(paths)) for _ in range(12))


async def text_to_tokenize(target: Target) -> Outcomes:
    """Text that is rare bytes, to be made tokens whole."""
    text = "".join(chr(target.chosen.randrange(0x4E00, 0x9FFF)) for _ in range(1000))
    body = {"model": target.model, "prompt": text * target.chosen.choice((100, 1000, 1300))}
    return await told(target.post("/tokenize", body) for _ in range(4))


async def many_choices(target: Target) -> Outcomes:
    """One request with the most choices that vLLM takes."""
    size = target.chosen.choice((128, 1024, 16_384))
    return await told(
        [target.complete({"n": size, "temperature": 1, "max_tokens": 64}) for _ in range(2)]
    )


async def many_prompts(target: Target) -> Outcomes:
    """One request with ten thousand prompts."""
    prompts = [[20 + number % 100, number % 250] for number in range(10_000)]
    return await told([target.complete({"max_tokens": 16}, prompt=prompts)])


async def long_prompts(target: Target) -> Outcomes:
    """Many honest-looking requests that are as long as the model takes."""
    size = target.chosen.choice((200, 400, 900))
    return await told(
        target.complete({"max_tokens": 100}, prompt=[target.chosen.randrange(20, 200)] * size)
        for _ in range(32)
    )


async def large_tool_calls(target: Target) -> Outcomes:
    """A chat with empty text and megabytes of tool calls."""
    name = f"f{target.chosen.random()}"
    called = {"name": name, "arguments": json.dumps({"x": "y" * target.chosen.choice((1, 2, 12))})}
    call = {"id": "x", "type": "function", "function": called}
    messages = [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": [call] * 100_000},
    ]
    return await told([target.chat({"messages": messages})])


async def odd_parameters(target: Target) -> Outcomes:
    """What vLLM documents, with values that nobody means."""
    drawn = target.chosen.sample(ODD, k=12)
    return await told(
        ask(options) for options in drawn for ask in (_completion(target), _chat(target))
    )


ATTACKS: Mapping[str, Callable[[Target], Awaitable[Outcomes]]] = MappingProxyType(
    {
        "brackets": brackets,
        "many tokenized": many_tokenized,
        "text to tokenize": text_to_tokenize,
        "many choices": many_choices,
        "many prompts": many_prompts,
        "long prompts": long_prompts,
        "large tool calls": large_tool_calls,
        "odd parameters": odd_parameters,
    }
)


def _completion(target: Target) -> Callable[[Mapping[str, Any]], Awaitable[str]]:
    return partial(target.complete, seconds=10)


def _chat(target: Target) -> Callable[[Mapping[str, Any]], Awaitable[str]]:
    return partial(target.chat, seconds=10)


async def _held_back(target: Target, path: str) -> str:
    size = 31 * MIB
    try:
        async with target.connected() as (reader, writer):
            ending = asyncio.create_task(until_ended(reader, target.seconds))
            with contextlib.suppress(OSError):
                writer.write(target.head("POST", path, {"Content-Length": str(size)}) + b'{"p":"')
                for _ in range(size // MIB - 1):
                    if ending.done():
                        break
                    writer.write(b"x" * MIB)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(writer.drain(), 5)
                while not ending.done():
                    writer.write(b"x" * 1280)
                    await asyncio.wait([ending], timeout=1)
            return await ending
    except OSError:
        return "reset"
