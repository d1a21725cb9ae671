"""The optimizer of the layers' matrices does what torch's own does, without bfloat16."""

from __future__ import annotations

import pytest
import torch

from demo_training.muon import Muon, orthogonalized

pytestmark = pytest.mark.usefixtures("one_thread")


def test_updates_are_those_of_torch() -> None:
    """Over several steps, within the rounding of bfloat16."""
    torch.manual_seed(1)
    ours = torch.nn.Parameter(torch.randn(32, 16))
    theirs = torch.nn.Parameter(ours.detach().clone())
    start = ours.detach().clone()
    optimizer = Muon([ours], lr=0.01, weight_decay=0.02)
    reference = torch.optim.Muon(
        [theirs], lr=0.01, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(5):
        ours.grad = torch.randn(32, 16)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    moved = (theirs - start).abs().mean()
    assert (ours - theirs).abs().mean() < moved / 100


def test_matrices_of_one_shape_do_not_mix() -> None:
    """Two that are updated together get what each gets alone."""
    torch.manual_seed(1)
    pair = [torch.nn.Parameter(torch.randn(8, 12)) for _ in range(2)]
    alone = torch.nn.Parameter(pair[1].detach().clone())
    for parameter in pair:
        parameter.grad = torch.randn(8, 12)
    alone.grad = None if pair[1].grad is None else pair[1].grad.clone()
    Muon(pair, lr=0.01, weight_decay=0.02).step()
    Muon([alone], lr=0.01, weight_decay=0.02).step()
    torch.testing.assert_close(pair[1], alone)


@pytest.mark.parametrize("shape", [(24, 64), (64, 24)], ids=["wide", "tall"])
def test_directions_are_about_orthogonal(shape: tuple[int, int]) -> None:
    """Whatever the scale of the gradient."""
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonalized(1e-3 * torch.randn(3, *shape)))
    assert 0.6 < values.min() <= values.max() < 1.3
