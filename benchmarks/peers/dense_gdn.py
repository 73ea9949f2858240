"""Dense Gated DeltaNet at equal operations: a state of W x D per lane instead of N x D, all of it used by each token.

    M_t = alpha M_{t-1} + beta k (v - alpha M_{t-1}^T k)^T,   y = M_t^T q

The chunked form does a chunk of C tokens with a triangular solve and matrix products (spec section 7).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .torch_loop import LoopInputs


def token_loop(state: Tensor, inputs: LoopInputs) -> Tensor:
    """Return the readings [T, lanes, D]; `state` [lanes, W, D] is updated in place."""
    readings = []
    for _, _, k, q, alpha, beta, v in inputs.tokens():
        state.mul_(alpha[:, None, None])
        delta = beta[:, None, None] * (v[:, None] - torch.bmm(k[:, None], state))
        state.baddbmm_(k[:, :, None], delta)
        readings.append(torch.bmm(q[:, None], state)[:, 0])
    return torch.stack(readings)


def chunked(state: Tensor, inputs: LoopInputs, chunk: int = 64) -> Tensor:
    """Return the readings [T, lanes, D] by chunks; T is a multiple of `chunk`. Differentiable."""
    k, q, v, alpha, beta = (
        getattr(inputs, name).transpose(0, 1).unflatten(1, (-1, chunk))
        for name in ("write_weights", "read_weights", "values", "alpha", "beta")
    )
    decay = alpha.log().cumsum(-1)  # [lanes, chunks, C], within the chunk
    beta = beta[..., None]
    between = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
    lower = ((k * beta) @ k.transpose(-1, -2) * between).tril(-1) + torch.eye(chunk)
    right = torch.cat([v * beta, k * beta * decay.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    dv, seen = solved.split([v.shape[-1], k.shape[-1]], -1)
    attention = (q @ k.transpose(-1, -2)) * between
    readings = []
    for c in range(k.shape[1]):
        written = dv[:, c] - seen[:, c] @ state
        readings.append((q[:, c] * decay[:, c].exp()[..., None]) @ state + attention[:, c] @ written)
        last = decay[:, c, -1:]
        state = state * last.exp()[..., None] + (k[:, c] * (last - decay[:, c]).exp()[..., None]).mT @ written
    return torch.cat(readings, 1).transpose(0, 1)


def chunked_gradients(state: Tensor, inputs: LoopInputs) -> dict[str, Tensor]:
    """Return gradients of (readings * dreadings).sum() by torch's autograd through the chunked form."""
    names = ("values", "write_weights", "alpha", "beta", "read_weights")
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in names}
    initial = state.detach().requires_grad_()
    (chunked(initial, LoopInputs(**{**vars(inputs), **leaves})) * inputs.dreadings).sum().backward()
    return {**{name: leaf.grad for name, leaf in leaves.items()}, "state": initial.grad}
