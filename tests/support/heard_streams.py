"""Puts together what comes of a stream, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class HeardStream:
    """What a client has got of a stream by any route of the official client."""

    said: str = ""
    thought: str = ""
    called: str = ""
    """Names and arguments of tool calls."""
    reasons: set[str] = field(default_factory=set)
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    usage: tuple[int, int] = (0, 0)
    """Tokens of the prompt and of the answer."""

    @property
    def texts(self) -> tuple[str, ...]:
        """What was said, thought and called."""
        return self.said, self.thought, self.called

    def hear(self, chunk: Any) -> None:
        """Add a chunk of a completion or a chat, or an event of a response."""
        if hasattr(chunk, "type"):
            self._hear_event(chunk)
            return
        for choice in chunk.choices:
            self._hear_choice(choice)
        if chunk.usage:
            self.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)

    def _hear_event(self, event: Any) -> None:
        if event.type == "response.output_text.delta":
            self.said += event.delta
        response = getattr(event, "response", None)
        if response is not None and response.usage:
            self.reasons = {str(response.status)}
            self.usage = (response.usage.input_tokens, response.usage.output_tokens)

    def _hear_choice(self, choice: Any) -> None:
        delta = getattr(choice, "delta", None)
        self.said += (choice.text if delta is None else delta.content) or ""
        self.thought += getattr(delta, "reasoning", None) or ""
        for call in getattr(delta, "tool_calls", None) or ():
            self.called += (call.function.name or "") + (call.function.arguments or "")
        if choice.finish_reason:
            self.reasons.add(choice.finish_reason)
        self.tokens += getattr(choice, "token_ids", None) or ()
        self.log_probs += _log_probs(choice)


def _log_probs(choice: Any) -> list[float]:
    if choice.logprobs is None:
        return []
    if hasattr(choice.logprobs, "token_logprobs"):
        return list(choice.logprobs.token_logprobs or ())
    return [place.logprob for place in choice.logprobs.content or ()]
