"""A causal model of one layer that is computed as an engine computes it: in prefills and decodes.

It is float32, so that another shape of a matrix product may round in another way, as on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[np.float32]"

VOCABULARY = 96
MAX_TOKENS = 640
LONG_TOKENS = 4200
"""Of a server of long contexts."""
BLOCK_TOKENS = 16
_HIDDEN = 32


@dataclass(frozen=True, slots=True)
class Weights:
    """All that the model knows."""

    embedding: Array
    positions: Array
    query: Array
    key: Array
    value: Array
    head: Array


def make_weights() -> Weights:
    """The same each time."""
    drawn = np.random.default_rng(7)

    def normal(rows: int, columns: int, gain: float) -> Array:
        values = drawn.standard_normal((rows, columns)) * gain / columns**0.5
        return np.asarray(values, np.float32)

    angles = np.outer(np.arange(LONG_TOKENS + 1), 1.7 ** -np.arange(_HIDDEN))
    return Weights(
        embedding=normal(VOCABULARY, _HIDDEN, _HIDDEN**0.5),
        positions=np.sin(angles).astype(np.float32),
        query=normal(_HIDDEN, _HIDDEN, 1.6),
        key=normal(_HIDDEN, _HIDDEN, 1.6),
        value=normal(_HIDDEN, _HIDDEN, 1.5),
        head=normal(_HIDDEN, VOCABULARY, 6.0),
    )


def scaled(weights: Weights) -> Weights:
    """With one weight scaled by 1.01."""
    return replace(weights, value=weights.value * np.float32(1.01))


def swapped(weights: Weights) -> Weights:
    """With two rows of the head swapped."""
    head = weights.head.copy()
    head[:, [5, 9]] = head[:, [9, 5]]
    return replace(weights, head=head)


def quantized(weights: Weights) -> Weights:
    """With a head of 8 bits."""
    step = np.abs(weights.head).max() / 127
    return replace(weights, head=(np.round(weights.head / step) * step).astype(np.float32))


def log_probs(
    weights: Weights,
    ids: Sequence[int],
    rows: slice,
    *,
    positions: Any = None,
    lost_end: int = 0,
) -> Array:
    """What follows each of these rows; the block of keys that ends at `lost_end` is not there."""
    tokens = np.asarray(ids)
    places = np.arange(len(tokens)) if positions is None else positions
    inputs = weights.embedding[tokens] + weights.positions[places]
    keys, values = inputs @ weights.key, inputs @ weights.value
    scores = (inputs[rows] @ weights.query) @ keys.T / np.float32(_HIDDEN**0.5)
    at = np.arange(len(tokens))[rows]
    unseen = np.arange(len(tokens))[None, :] > at[:, None]
    unseen[at >= lost_end, lost_end - BLOCK_TOKENS if lost_end else 0 : lost_end] = True
    scores = np.where(unseen, np.float32(-np.inf), scores)
    attention = np.exp(scores - scores.max(axis=1, keepdims=True))
    attention /= attention.sum(axis=1, keepdims=True)
    logits = np.tanh(inputs[rows] + attention @ values) @ weights.head
    return as_log_probs(logits)


def as_log_probs(logits: Array) -> Array:
    """Logits of rows, normalised."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.float32)
