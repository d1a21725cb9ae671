"""A `scoring_double` of a GPU whose long contexts are noisier than its short ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openai_double import Body
from scoring_double import Context, ScoringDouble
from toy_scorer import Array, as_log_probs

_SHORT_TOKENS = 512
_NOISE_NATS = 1e-4


class GrainyDouble(ScoringDouble):
    """Has noise behind 512 tokens, and keeps no shorter prompt in its cache."""

    def _cached_tokens(self, body: Body, ids: Sequence[int]) -> int:
        return super()._cached_tokens(body, ids) if len(ids) > _SHORT_TOKENS else 0

    def _prefill(self, context: Context, *, is_whole: bool) -> Array:
        return self._grainy(super()._prefill(context, is_whole=is_whole), len(context.ids))

    def _decode(self, context: Context, answer: Sequence[int] = ()) -> Array:
        row = super()._decode(context, answer)[None]
        return np.asarray(self._grainy(row, len(context.ids) + len(answer))[0], np.float32)

    def _grainy(self, rows: Array, tokens: int) -> Array:
        if tokens <= _SHORT_TOKENS:
            return rows
        drawn = np.random.default_rng(self._noise.getrandbits(32)).standard_normal(rows.shape)
        return as_log_probs(rows + (drawn * _NOISE_NATS).astype(np.float32))
