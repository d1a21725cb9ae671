"""Streams of each kind that the end of an engine may cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from cut_streams import Asked, carried_over
from servers import Server
from stream_features import CHAT_FEATURES, END_OF_THOUGHT, START_OF_ANSWER, feature_body

PATTERN = r"([ab]{3}-){50}c"
COUNTED: dict[str, Any] = {"temperature": 0, "stream_options": {"include_usage": True}}
WORDS: dict[str, Any] = {"messages": [{"role": "user", "content": "hold fast"}]}
LONG: dict[str, Any] = {"ignore_eos": True, "top_k": 1}
TOKENS = {"return_token_ids": True}
BLOCK_TOKENS = 128
"""Of the KV cache of vLLM on the CPU."""
FEATURES = (*CHAT_FEATURES, "log-probs")
"""What a chat below has, under its name."""
END_OF_BUDGET = f"enough{END_OF_THOUGHT}"
"""What the engine writes when a thought has used up its budget."""
_MARKERS = {"reasoning_start_str": START_OF_ANSWER, "reasoning_end_str": END_OF_BUDGET}
BUDGET_FLAGS = (f"--reasoning-config={json.dumps(_MARKERS)}",)
"""What a server needs for budgets, beside `PARSER_FLAGS`."""
BUDGETS = {"budget that is used up": 5, "budget that is left": 120}
"""Of tokens, in chats that are cut after the end of the thought, and in it."""
VARIED: dict[str, Any] = {"frequency_penalty": 0.6, "presence_penalty": 0.4}
STREAMS = {
    "text": Asked(
        "completions",
        {
            "prompt": list(range(40, 90)) * 3,
            "max_tokens": 200,
            "logprobs": 2,
            "extra_body": {**LONG, **TOKENS},
            **VARIED,
            **COUNTED,
        },
    ),
    "chat": Asked(
        "chat",
        {
            "max_tokens": 200,
            "extra_body": {**LONG, **TOKENS, "min_tokens": 150},
            **WORDS,
            **COUNTED,
        },
    ),
    "grammar": Asked(
        "chat",
        {
            "max_tokens": 300,
            "extra_body": {"structured_outputs": {"regex": PATTERN}, **TOKENS},
            **WORDS,
            **COUNTED,
        },
    ),
    "response": Asked(
        "responses",
        {"input": "hold fast", "max_output_tokens": 200, "temperature": 0, "extra_body": LONG},
    ),
    **{
        name: Asked(
            "chat",
            {
                "max_tokens": 200,
                "extra_body": {**feature_body(name, is_chat=True), **TOKENS},
                **WORDS,
                **COUNTED,
            },
        )
        for name in FEATURES
    },
    **{
        name: Asked(
            "chat",
            {
                "max_tokens": 200,
                "extra_body": {
                    "thinking_token_budget": tokens,
                    "chat_template_kwargs": {"thinking": True},
                    "bad_words": [END_OF_THOUGHT],  # the model does not end it by itself
                    **LONG,
                    **TOKENS,
                },
                **WORDS,
                **COUNTED,
            },
        )
        for name, tokens in BUDGETS.items()
    },
}
"""A greedy stream by each route and with each feature, long enough to be cut in the middle."""
LONGER_THAN_A_BLOCK = ("text", "tool call")
"""Those with a prompt that is found in the cache when it comes again."""
TWO_ANSWERS = Asked(
    "completions",
    {
        "prompt": [50, 60, 70, 80],
        "max_tokens": 300,
        "n": 2,
        "extra_body": {**TOKENS, "ignore_eos": True},
    },
)
"""A stream that cannot go on, since it has two answers."""


def plain_stream(tokens: int, **further: Any) -> Asked:
    """Return a greedy stream of this many tokens."""
    body = {"prompt": [50, 60, 70, 80], "max_tokens": tokens, "temperature": 0, **further}
    return Asked("completions", {**body, "extra_body": {**LONG, **TOKENS}})


def recycle(server: Server, ask: Callable[[], None]) -> None:
    """Ask six times, after which the server replaces its engine, and wait until the next is READY.

    A stream that the first engine has begun goes on in the next one.
    """
    before = server.generation
    for _ in range(4):
        ask()
    with carried_over(server, plain_stream(800)):  # it takes longer than the last requests
        assert server.generation == before
        for _ in range(2):
            ask()
        server.until(lambda: server.generation > before, "the next generation")
        server.until_ready()
