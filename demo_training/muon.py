"""Muon, the optimizer of the layers' matrices, in float32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.775, 2.0315)
_ITERATIONS = 5
_EPSILON = 1e-7
_UPDATE_RMS = 0.2
"""The root mean square of an update of Adam, so that both optimizers take alike rates."""


class Muon(torch.optim.Optimizer):  # type: ignore[misc] # torch is untyped here
    """Momentum whose singular values are all made about 1, with decoupled weight decay.

    It is `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, but that one computes in
    bfloat16, which processors without such instructions emulate: there it took two thirds of a
    training. Matrices of one shape are updated together.

    Source: https://kellerjordan.github.io/posts/muon/
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], lr: float, weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()  # type: ignore[untyped-decorator] # torch is untyped here
    def step(self) -> None:
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            alike = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for parameters in alike.values():
                self._update(parameters, group["lr"], group["weight_decay"])

    def _update(self, parameters: list[Any], rate: float, weight_decay: float) -> None:
        momentum = torch.stack([self._momentum(parameter) for parameter in parameters])
        gradients = torch.stack([parameter.grad for parameter in parameters])
        directions = orthogonalized(gradients.lerp(momentum, _MOMENTUM))
        scale = _UPDATE_RMS * max(parameters[0].shape) ** 0.5
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.mul_(1 - rate * weight_decay)
            parameter.sub_(direction, alpha=rate * scale)

    def _momentum(self, parameter: Any) -> torch.Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: torch.Tensor = state["momentum"]
        return momentum.lerp_(parameter.grad, 1 - _MOMENTUM)


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices with the singular vectors of `matrices`, and singular values from 0.7 to 1.2.

    `matrices` are a stack of one shape. Five Newton-Schulz iterations of a polynomial do it, whose
    coefficients are steep at zero; very small singular values stay below 0.7.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if is_tall else matrices
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPSILON)
    first, second, third = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = wide @ wide.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=second, alpha=third)
        wide = torch.baddbmm(wide, polynomial, wide, beta=first)
    return wide.mT if is_tall else wide
