"""The model behind `openai_double`: it knows a few answers, and fills up the rest with words.

A token is four characters. What it says follows from the prompt, and from the seed if it is warm.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from double_tools import written

Body = Mapping[str, Any]

MAX_MODEL_LEN = 512
KNOWN = {
    "17 + 25": "42",
    "capital of france": "The capital of France is Paris.",
    "hello": "Hello! How can I help you?",
    "pong": "PONG",
}
_WORDS = ("amber", "bread", "cloud", "dúo", "earth", "flute", "grün", "hotel", "ivory", "joy 🙂")
_MAX_WORDS = 64
_DEFAULT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Generated:
    """What the model says to one prompt."""

    tokens: list[str]
    finish_reason: str

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.tokens)


def tokens_of(text: str) -> list[str]:
    """The tokens of a text."""
    return re.findall(r".{1,4}", text, re.DOTALL)


class Vocabulary:
    """The ids of tokens, in the order in which the texts of one server have them."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._tokens: list[str] = []

    def ids_of(self, text: str) -> list[int]:
        """The ids of the tokens of a text."""
        return [self._id_of(token) for token in tokens_of(text)]

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of some ids; one that no text has had stands for four dots."""
        known = self._tokens
        return "".join(known[one] if one < len(known) else "...." for one in ids)

    def _id_of(self, token: str) -> int:
        if token not in self._ids:
            self._ids[token] = len(self._tokens)
            self._tokens.append(token)
        return self._ids[token]


def template(body: Body) -> str:
    """The prompt of a chat."""
    messages: Sequence[Mapping[str, Any]] = body["messages"]
    is_thinking = (body.get("chat_template_kwargs") or {}).get("enable_thinking", True)
    said = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
    tools = f"<tools>{json.dumps(body['tools'])}\n" if body.get("tools") else ""
    return f"{tools}{said}<assistant>{'' if is_thinking else '<no thinking>'}"


def generate(body: Body, prompt: str, defect: str = "") -> Generated:
    """The answer to a prompt, within the limits of the request."""
    most = body.get("max_completion_tokens") or body.get("max_tokens") or _DEFAULT_TOKENS
    text = written(body, prompt, defect) or says(body, prompt)
    spoken = tokens_of(text)[:most]
    ends = [at for stop in stops_of(body) if (at := "".join(spoken).find(stop)) >= 0]
    if ends:
        return Generated(tokens_of(text[: min(ends)]), "stop")
    echoed = tokens_of(prompt) if body.get("echo") else []
    return Generated(echoed + spoken, "stop" if len(tokens_of(text)) < most else "length")


def stops_of(body: Body) -> list[str]:
    """The texts that end an answer before them."""
    stop = body.get("stop") or []
    return [stop] if isinstance(stop, str) else list(stop)


def says(body: Body, prompt: str) -> str:
    """What it would say without limits."""
    asked = prompt.casefold()
    if text := next((KNOWN[question] for question in KNOWN if question in asked), ""):
        return text
    seed: object = prompt
    if body.get("temperature", 1):
        seed = (prompt, body.get("seed") or secrets.token_hex(8))
    chosen = random.Random(hashlib.sha256(repr(seed).encode()).digest())
    return " ".join(chosen.choices(_WORDS, k=_MAX_WORDS))


def fault_of(
    body: Any, max_model_len: int, *, takes_words: bool = False, takes_longer: bool = False
) -> str:
    """What is wrong with a request; empty if nothing is."""
    if not isinstance(body, dict):
        return "the body is not an object"
    rules: dict[str, Callable[[Any], bool]] = {
        "messages": lambda value: isinstance(value, list),
        "prompt": lambda value: isinstance(value, str | list) and len(value) <= 4 * max_model_len,
        "temperature": lambda value: isinstance(value, int | float) and value >= 0,
        "top_p": lambda value: 0 < value <= 1,
        "max_tokens": lambda value: takes_words or (isinstance(value, int) and value > 0),
        "stop": lambda value: value is None or isinstance(value, str | list),
        "n": lambda value: value > 0,
    }
    wrong = [name for name, rule in rules.items() if name in body and not rule(body[name])]
    if not {"messages", "prompt", "input"} & body.keys():
        wrong.append("messages")
    is_long = isinstance(body.get("prompt"), list) and len(body["prompt"]) > max_model_len
    if is_long and not takes_longer:
        wrong.append("prompt")
    return f"{wrong[0]} is wrong" if wrong else ""
