"""A tokenizer for which any parser of vLLM's can be made, without a model."""

from __future__ import annotations

from typing import Any


class Vocabulary(dict[str, int]):
    """One that has every token."""

    def __missing__(self, _token: str) -> int:
        return 1

    def get(self, _token: str, _default: Any = None) -> Any:
        """The same for each."""
        return 1

    def __contains__(self, _token: object) -> bool:
        return True


class Tokenizer:
    """What a parser asks a tokenizer for."""

    model_tokens = None

    def get_vocab(self) -> Vocabulary:
        """All tokens."""
        return Vocabulary()

    def encode(self, *_: Any, **_options: Any) -> list[int]:
        """No text matters here."""
        return [1]

    def decode(self, *_: Any, **_options: Any) -> str:
        """As above."""
        return ""
