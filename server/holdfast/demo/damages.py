"""Planted faults of the demo model's arithmetic: each answers, and each answers wrongly.

A check of answers must find them. They are as small as faults of real servers were seen to be, so
that a model with one of them still writes fluently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from holdfast.demo.switches import Damage

SCALE = 1.01
SWAPPED_ROWS = (97, 101)
"""The output head's rows of the letters a and e."""
DROPPED_TOKENS = 16
"""The tokens of a block of the KV cache."""
_INT8_MAX = 127


def damage_weights(model: Any, damage: Damage | None) -> None:
    """Apply a damage to loaded weights; damages of the arithmetic leave them unchanged."""
    if (change := _WEIGHTS.get(damage)) is not None:
        with torch.no_grad():
            change(model)


def shifted(positions: torch.Tensor, start: int) -> torch.Tensor:
    """Return positions that are off by one from `start` on."""
    return positions + (positions >= start).to(positions.dtype)


def without_last_block(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return keys or values of `tokens` tokens and of padding, whose last block was lost."""
    kept = tensor.clone()
    kept[max(0, tokens - DROPPED_TOKENS) : tokens] = 0
    return kept


def _scale(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight.mul_(SCALE)


def _swap(model: Any) -> None:
    weight = model.lm_head.weight
    first, second = SWAPPED_ROWS
    weight[[first, second]] = weight[[second, first]]


def _quantize(model: Any) -> None:
    """Round each row to 8 bits, as weight-only quantization does."""
    weight = model.lm_head.weight
    step = weight.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
    step = step / _INT8_MAX
    weight.copy_((weight / step).round() * step)


_WEIGHTS: Mapping[Damage | None, Callable[[Any], None]] = MappingProxyType(
    {"scaled_weight": _scale, "swapped_rows": _swap, "quantized_head": _quantize}
)
