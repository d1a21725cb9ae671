"""Streams with a stop string, log-probs, a tool call or a thought.

Grammars bound the answers, so that a model with random weights shows what was asked for, and ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STOP = "stop here"
LETTERS = 60
END_OF_THOUGHT = "|"
"""As `bar_thoughts.py` has it, which a server imports without this module."""
START_OF_ANSWER = "<|im_start|>"
"""Begins it in every prompt; as above."""
PARSER_NAME = "bar"
PARSER_FILE = Path(__file__).with_name("bar_thoughts.py")
TOOL = "hold"
FEATURES = ("stop string", "log-probs", "tool call", "thought")
CHAT_FEATURES = ("tool call", "thought")
"""Those that only a chat has."""
PARSER_FLAGS = (
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    f"--reasoning-parser={PARSER_NAME}",
    f"--reasoning-parser-plugin={PARSER_FILE}",
    '--structured-outputs-config={"enable_in_reasoning": true}',
)
"""What a server needs for them, if the tokens of its model are bytes."""
ENDLESS = {"ignore_eos": True, "top_k": 1}
_PLAIN = f"[a-z ]{{{LETTERS}}}"
_PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
_CALL = rf'<tool_call>\n\{{"name": "{TOOL}", "arguments": \{{"text": "{_PLAIN}"\}}\}}\n</tool_call>'
"""As Hermes models write one. A grammar of vLLM's own would let in any spaces."""


def feature_body(feature: str, *, is_chat: bool) -> dict[str, Any]:
    """Return what a request says beside its prompt and its limit; without a feature, plain text."""
    if feature == "stop string":
        # The letters before it cannot form it.
        regex = f"[a-m ]{{{LETTERS}}}{STOP}{_PLAIN}"
        return {"stop": [STOP], "structured_outputs": {"regex": regex}}
    if feature == "tool call":
        function = {"name": TOOL, "parameters": _PARAMETERS}
        return {
            "tools": [{"type": "function", "function": function}],
            "structured_outputs": {"regex": _CALL},
        }
    if feature == "thought":
        regex = f"{_PLAIN}{re.escape(END_OF_THOUGHT)}{_PLAIN}"
        thinking = {"chat_template_kwargs": {"thinking": True}}
        return {**thinking, "structured_outputs": {"regex": regex}}
    return {**ENDLESS, **(asked_log_probs(1, is_chat=is_chat) if feature == "log-probs" else {})}


def asked_log_probs(count: int, *, is_chat: bool) -> dict[str, Any]:
    """Return what asks for the log-probs of the most likely tokens, each under a name of its own.

    The text of a token is not one: all bytes that make no character look the same.
    """
    asked = {"logprobs": True, "top_logprobs": count} if is_chat else {"logprobs": count}
    return {**asked, "return_tokens_as_token_ids": True}


def shows(feature: str, texts: Sequence[str], log_probs: Sequence[float]) -> bool:
    """Return whether an answer has the feature; `texts` are what it says, thinks and calls."""
    said, thought, called = texts
    if feature == "stop string":
        return len(said) == LETTERS
    if feature == "log-probs":
        return bool(log_probs)
    if feature == "tool call":
        return called.startswith(TOOL) and _is_whole(called.removeprefix(TOOL))
    if feature == "thought":
        return (len(thought), len(said)) == (LETTERS, LETTERS)
    return bool(said) and not thought and not called


def _is_whole(arguments: str) -> bool:
    try:
        return len(json.loads(arguments)["text"]) == LETTERS
    except ValueError:
        return False
