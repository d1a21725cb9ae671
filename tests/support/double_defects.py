"""What `openai_double` can do wrong, one thing at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Defect = Literal[
    # of the list of models
    "a model listed twice",
    "a model without its time",
    # of whole answers
    "chats without a role",
    "completions that call themselves chats",
    "choices all numbered 0",
    "choices of chats all numbered 0",
    "a logprob for all tokens but one",
    "a logprob that is not a number",
    "a logprob of a chat that is not a number",
    "a greedy token that is not the likeliest",
    "completion_tokens off by one",
    "total_tokens off by one",
    "prompt_tokens off by one",
    "cut answers that end by stop",
    "a stop text that is kept",
    "a stop text that chats keep",
    "answers mixed up",
    # of streams
    "an event split wrong",
    "an event without its empty line",
    "no [DONE]",
    "bytes that are not UTF-8",
    "ids that change",
    "two finish reasons",
    "text behind the finish reason",
    "usage in the middle",
    "usage nobody asked for",
    "streamed completion_tokens off by one",
    "streamed prompt_tokens off by one",
    "a stop text that leaks into streams",
    "streams that lose what stands before a stop text",
    "all events at the end",
    "all events but the first at the end",
    "all events of a chat at the end",
    "all text of a chat in one event",
    "a stream that drops a token",
    "a stream that breaks characters",
    "streams that go on without their client",
    "chats that go on without their client",
    "streams that are written to their end without their client",
    # of refusals
    "wrong requests are 500",
    "refusals without a form",
    "max_tokens in words taken",
    # of other routes
    "responses are 500",
    "response events before their item",
    "streamed responses that drop a token",
    "streamed responses that end with another text",
    "streamed responses without an end",
    "streamed responses without usage",
    "messages from the user",
    "streamed messages that drop a token",
    "streamed messages whose block stays open",
    "streamed messages without an end",
    "streamed messages without names of events",
    "streamed messages without usage",
    "embeddings are 500",
    # of the model
    "no sums",
    "no such capital",
    "no greeting",
    "seeds without effect",
    "a greedy story that changes",
    "chats that loop",
    "chats that stray into another script",
    "chats that only think",
    "chats that never end",
    # of functions
    "functions are 400",
    "the second call dropped",
    "the second call left in the text as JSON",
    "arguments of forced calls cut",
    "forced calls of an unknown function",
    "forced calls beside their schema",
    "demanded calls not made",
    "markup of calls left in the text",
    "streamed calls numbered from 1",
    "calls that end by stop",
    "calls that share an id",
    "streams without the last of several calls",
    "calls lost in parts of several tokens",
    "functions called for nothing",
    "results of functions ignored",
    # of what it must survive
    "the longest prompt is 500",
    "a prompt beyond the context taken",
    "large bodies are 500",
    "the 100th completion is 500",
    "answers lost with the engine",
    "answers that change with the engine",
    "an engine dies unseen",
    "a workspace grows unseen",
    "a workspace is refused unseen",
    # of all
    "a list of models that never comes",
    "chats that never come",
    "no chat that ever comes",
    "every chat is 500",
    "every chat repeats the key",
]

WRONG_ANSWERS: Mapping[str, tuple[str, str]] = {
    "no sums": ("42", "41"),
    "no such capital": ("Paris", "secret"),
    "no greeting": ("Hello", "Goodbye"),
}
"""What is said, and what instead."""

MORE: Mapping[str, str] = {
    "chats that loop": " and so on," * 20,
    "chats that stray into another script": " 的灯塔",
}
"""What is said behind every answer."""
