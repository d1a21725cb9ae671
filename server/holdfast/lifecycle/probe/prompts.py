"""Prompts of random tokens, so that no prefix cache shortcuts them and no tokenizer is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from holdfast.records import EngineFacts

NONCE_TOKENS = 8


class Prompts:
    """Makes prompts of the model's ordinary tokens. Special ones may end or reshape a request."""

    def __init__(self, facts: EngineFacts, random: Random) -> None:
        ordinary = (t for t in range(facts.vocab_size) if t not in facts.special_token_ids)
        self._tokens = tuple(ordinary) or tuple(range(facts.vocab_size))
        self.random = random

    def fresh(self, tokens: int) -> list[int]:
        """A prompt that begins unlike every other."""
        return self.random.choices(self._tokens, k=tokens)

    def repeated(self, tokens: int) -> list[int]:
        """A nonce, then one token over and over: the skew that overloads a single expert."""
        nonce = self.fresh(min(NONCE_TOKENS, tokens))
        return nonce + [self._tokens[len(self._tokens) // 2]] * (tokens - len(nonce))


def grouped(lengths: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """The lengths in groups of at most `size`, in their order."""
    return (lengths[start : start + size] for start in range(0, len(lengths), size))
