"""Each planted fault changes what it is to change, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.demo.damages import (
    DROPPED_TOKENS,
    SWAPPED_ROWS,
    damage_weights,
    shifted,
    without_last_block,
)
from holdfast.demo.switches import Damage


def model() -> Any:
    """The two matrices that a damage may touch."""
    torch.manual_seed(5)
    down, head = (SimpleNamespace(weight=torch.randn(128, 16)) for _ in range(2))
    layer = SimpleNamespace(mlp=SimpleNamespace(down_proj=down))
    return SimpleNamespace(model=SimpleNamespace(layers=[layer]), lm_head=head)


def weights(damage: Damage | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Both, after a damage."""
    damaged = model()
    damage_weights(damaged, damage)
    return damaged.model.layers[0].mlp.down_proj.weight, damaged.lm_head.weight


DOWN, HEAD = weights(None)


def test_a_weight_is_scaled() -> None:
    """By one percent."""
    down, head = weights("scaled_weight")
    assert torch.allclose(down, DOWN * 1.01)
    assert torch.equal(head, HEAD)


def test_two_rows_are_swapped() -> None:
    """The others stay where they are."""
    down, head = weights("swapped_rows")
    first, second = SWAPPED_ROWS
    assert torch.equal(head[first], HEAD[second])
    assert torch.equal(head[second], HEAD[first])
    assert (head != HEAD).any(dim=1).sum() == 2
    assert torch.equal(down, DOWN)


def test_the_head_is_rounded_to_eight_bits() -> None:
    """By less than a step of its row, with at most 255 values in each."""
    down, head = weights("quantized_head")
    step = HEAD.abs().amax(dim=1, keepdim=True) / 127
    assert not torch.equal(head, HEAD)
    assert ((head - HEAD).abs() <= 0.51 * step).all()
    assert torch.equal(down, DOWN)


@pytest.mark.parametrize("damage", ["shifted_positions", "dropped_block"])
def test_a_damage_of_the_arithmetic_leaves_the_weights(damage: Damage) -> None:
    """It is done in each step."""
    down, head = weights(damage)
    assert torch.equal(down, DOWN)
    assert torch.equal(head, HEAD)


def test_positions_are_off_by_one_from_a_start() -> None:
    """Those before it are right."""
    assert shifted(torch.tensor([0, 6, 7, 8]), 7).tolist() == [0, 6, 8, 9]


def test_the_last_block_is_lost() -> None:
    """The rest is kept, and what was given is not changed."""
    given = torch.ones(40, 2)
    kept = without_last_block(given, 30)
    assert kept[: 30 - DROPPED_TOKENS].all()
    assert not kept[30 - DROPPED_TOKENS : 30].any()
    assert kept[30:].all()
    assert given.all()
    assert not without_last_block(given, 5)[:5].any()
