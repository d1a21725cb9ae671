"""A reasoning parser for models whose tokens are bytes: a thought ends with a bar.

`--reasoning-parser-plugin` takes this file. A request thinks if its `chat_template_kwargs` have
`thinking`, as with DeepSeek V3.
"""

from __future__ import annotations

from typing import Any

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser
from vllm.reasoning.deepseek_v3_reasoning_parser import DeepSeekV3ReasoningParser

NAME = "bar"
END = "|"


class BarThoughts(DeepSeekR1ReasoningParser):  # type: ignore[misc]  # vLLM is Any to us
    """Takes all up to the bar for the thought."""

    @property
    def start_token(self) -> str:
        """Return the token that begins the answer in every prompt, so that no bar there counts."""
        return "<|im_start|>"

    @property
    def end_token(self) -> str:
        """Return the bar."""
        return END


class ChosenBarThoughts(DeepSeekV3ReasoningParser):  # type: ignore[misc]  # as above
    """Parses thoughts only where the request asks for them."""

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        chosen = kwargs.get("chat_template_kwargs") or {}
        # Its own thoughts end with a token that the model does not have.
        super().__init__(tokenizer, *args, **{**kwargs, "chat_template_kwargs": {}})
        if chosen.get("thinking"):
            self._parser = BarThoughts(tokenizer, *args, **kwargs)


ReasoningParserManager.register_module(NAME, module=ChosenBarThoughts)
