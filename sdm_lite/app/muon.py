"""Muon in float32: momentum whose step on a matrix is orthogonalised."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

#: a x + b x^3 + c x^5, applied five times, takes singular values in (0, 1] to about 1
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Return matrices [n, rows, columns] with the singular vectors kept and the singular values brought to about 1.

    Newton-Schulz, from X = G / |G|: X <- a X + (b A + c A A) X with A = X X^T.
    """
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(rounds):
        squares = x @ x.mT
        x = _A * x + (_B * squares + _C * (squares @ squares)) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """What :class:`torch.optim.Muon` computes, in float32 and for all matrices of one shape at once.

    torch's own rounds to bfloat16, which processors without bfloat16 units emulate: for the demo's model it
    took 1.0 s of a step of 1.6 s. With G the gradient and m the momentum::

        buffer <- m buffer + (1 - m) G          update = orthogonalise((1 - m) G + m buffer)
        weight <- (1 - rate * decay) weight - rate * sqrt(max(1, rows / columns)) * update

    Parameters
    ----------
    params : iterable of 2-D parameters
    lr, weight_decay, momentum : float
    """

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float = 0.0, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient; `closure` must be None."""
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for (rows, columns), parameters in by_shape.items():
                updates = orthogonalise(torch.stack([self._momentum(p, group["momentum"]) for p in parameters]))
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                for parameter, update in zip(parameters, updates):
                    parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                    parameter.add_(update.to(parameter.dtype), alpha=-rate)

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        gradient = parameter.grad.float()  # type: ignore[union-attr]
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1.0 - momentum)
        return gradient.lerp(buffer, momentum)
