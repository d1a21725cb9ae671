"""Are two groups of log-probs from one distribution? A permutation test of their means.

After Chauvin et al., https://arxiv.org/abs/2512.03816: cheap, and it sees a single step of
fine-tuning. Theirs asks one server at two times. Here both may be exact, and only round in another
way; so means that are as near as noise puts them count as the same.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from holdfast.verify.agreement import TopLogProbs

_PERMUTATIONS = 1999
_ROUNDING = 1e-9
_TOKENS = 4
"""The number of likeliest tokens that are compared for each prompt."""
Round = Sequence[TopLogProbs]


def p_value(then: Sequence[Round], now: Sequence[Round], *, within: float) -> float:
    """How likely a difference of the means is that is at least this great, if there is none.

    `then` and `now` have a list for each round, with what was told of each prompt. It is 1 if the
    means differ by no more than `within`, in nats, on average. The least value is 1 / 2000.
    """
    rows, size = _rows(then, now), len(then)
    found = _distance(rows[:size], rows[size:])
    if found <= within:
        return 1.0
    drawn = random.Random(0)  # noqa: S311 - the same in every run
    as_far = 0
    for _ in range(_PERMUTATIONS):
        drawn.shuffle(rows)
        as_far += _distance(rows[:size], rows[size:]) >= found - _ROUNDING
    return (1 + as_far) / (1 + _PERMUTATIONS)


def mean_shift(then: Sequence[Round], now: Sequence[Round]) -> float:
    """By how much the means differ, in nats, on average."""
    rows = _rows(then, now)
    return _distance(rows[: len(then)], rows[len(then) :])


def _rows(then: Sequence[Round], now: Sequence[Round]) -> list[list[float]]:
    tokens = [_likeliest(top) for top in then[0]]
    return [_values(one, tokens) for one in (*then, *now)]


def _likeliest(top: TopLogProbs) -> list[int]:
    return sorted(top, key=lambda token: -top[token])[:_TOKENS]


def _values(one: Round, tokens: Sequence[Sequence[int]]) -> list[float]:
    """The log-probs of these tokens; one that is not told counts with the least that is."""
    return [
        top.get(token, min(top.values()))
        for top, wanted in zip(one, tokens, strict=True)
        for token in wanted
    ]


def _distance(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    pairs = zip(_means(one), _means(other), strict=True)
    return statistics.fmean(abs(a - b) for a, b in pairs)


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]
