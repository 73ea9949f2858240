"""The recurrence as a token loop over torch's index_select and index_copy_, forward and backward.

All lanes go through one flat table [lanes * N, D] with flat row numbers, so that a token is a handful of
batched calls: the fastest plain torch form of those tried (gather / scatter_ takes 1.6 to 2.3 times as long).

    autograd_gradients   lets torch differentiate the loop: index_copy_ keeps and touches the whole table per token
    hand_gradients       the O(W D) backward of the method, written by hand: log each token's rows, put them back
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..shapes import Inputs


@dataclass
class LoopInputs:
    """Arrays with the token first: slots as flat rows int64 [T, lanes * W], the rest [T, lanes, ...]."""

    write_rows: Tensor
    read_rows: Tensor
    write_weights: Tensor
    read_weights: Tensor
    alpha: Tensor
    beta: Tensor
    values: Tensor
    dreadings: Tensor

    def tokens(self):
        """Return an iterator over the tokens' (write_rows, read_rows, k, q, alpha, beta, v)."""
        names = ("write_rows", "read_rows", "write_weights", "read_weights", "alpha", "beta", "values")
        return zip(*(getattr(self, name).unbind(0) for name in names))

    def first_tokens(self, count: int) -> LoopInputs:
        """Return the first `count` tokens."""
        return LoopInputs(**{name: x[:count] for name, x in vars(self).items()})


def from_inputs(inputs: Inputs, num_slots: int) -> LoopInputs:
    """Return the op's arrays [B, T, H, ...] in the loop's layout."""

    def token_first(x: np.ndarray) -> np.ndarray:
        x = np.moveaxis(x, 1, 0)
        return np.ascontiguousarray(x.reshape(x.shape[0], -1, *x.shape[3:]))

    def rows(slots: np.ndarray) -> Tensor:
        lanes_first = token_first(slots).astype(np.int64)
        lanes_first += num_slots * np.arange(lanes_first.shape[1])[:, None]
        return torch.from_numpy(lanes_first.reshape(len(lanes_first), -1))

    plain = {
        name: torch.from_numpy(token_first(getattr(inputs, name)))
        for name in ("write_weights", "read_weights", "beta", "values", "dreadings")
    }
    alpha = torch.from_numpy(np.exp(token_first(inputs.log_decay)))
    return LoopInputs(rows(inputs.write_slots), rows(inputs.read_slots), alpha=alpha, **plain)


def from_loop(x: Tensor, batch: int) -> np.ndarray:
    """Return [T, lanes, ...] as [B, T, H, ...]."""
    x = x.reshape(x.shape[0], batch, -1, *x.shape[2:])
    return np.ascontiguousarray(x.transpose(0, 1).detach().numpy())


def forward(table: Tensor, inputs: LoopInputs) -> Tensor:
    """Return the readings [T, lanes, D]; `table` [lanes * N, D] is updated in place."""
    readings = []
    for write_rows, read_rows, k, q, alpha, beta, v in inputs.tokens():
        lanes, writes = k.shape
        m = table.index_select(0, write_rows).view(lanes, writes, -1) * alpha[:, None, None]
        delta = beta[:, None, None] * (v[:, None] - torch.bmm(k[:, None], m))
        table.index_copy_(0, write_rows, torch.baddbmm(m, k[:, :, None], delta).view(lanes * writes, -1))
        readings.append(torch.bmm(q[:, None], table.index_select(0, read_rows).view(lanes, q.shape[1], -1))[:, 0])
    return torch.stack(readings)


def autograd_gradients(table: Tensor, inputs: LoopInputs) -> dict[str, Tensor]:
    """Return gradients of (readings * dreadings).sum() by torch's autograd; `table` is left as it is."""
    names = ("values", "write_weights", "alpha", "beta", "read_weights")
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in names}
    initial = table.detach().requires_grad_()
    readings = forward(initial.clone(), LoopInputs(**{**vars(inputs), **leaves}))
    (readings * inputs.dreadings).sum().backward()
    return {**{name: leaf.grad for name, leaf in leaves.items()}, "table": initial.grad}


@torch.no_grad()
def hand_gradients(table: Tensor, dtable: Tensor, inputs: LoopInputs) -> dict[str, Tensor]:
    """Return the same gradients by reverse time over logged rows, O(W D) a token.

    `dtable` comes in as the gradient of the final table (zeros, prepared outside the timing) and holds
    that of the initial one at the end; `table` is updated and put back as it was.
    """
    logged = []
    readings = []
    for write_rows, read_rows, k, q, alpha, beta, v in inputs.tokens():
        lanes, writes = k.shape
        old = table.index_select(0, write_rows).view(lanes, writes, -1)
        m = old * alpha[:, None, None]
        error = v[:, None] - torch.bmm(k[:, None], m)
        new = torch.baddbmm(m, k[:, :, None], beta[:, None, None] * error)
        table.index_copy_(0, write_rows, new.view(lanes * writes, -1))
        readings.append(torch.bmm(q[:, None], table.index_select(0, read_rows).view(lanes, q.shape[1], -1))[:, 0])
        logged.append((old, error))
    torch.stack(readings)  # the forward's result, as the caller would get it
    tokens = list(zip(inputs.tokens(), inputs.dreadings.unbind(0), logged))
    per_token = [_token_gradients(table, dtable, *token) for token in reversed(tokens)]
    stacked = [torch.stack(column[::-1]) for column in zip(*per_token)]
    return dict(zip(("values", "write_weights", "alpha", "beta", "read_weights"), stacked))


def _token_gradients(table, dtable, token, dreading, log):
    """One token of spec section 5, and the undo of its writes."""
    write_rows, read_rows, k, q, alpha, beta, _ = token
    old, error = log
    lanes, writes = k.shape
    width = table.shape[1]
    dq = torch.bmm(table.index_select(0, read_rows).view(lanes, -1, width), dreading[:, :, None])[..., 0]
    dtable.index_add_(0, read_rows, torch.bmm(q[:, :, None], dreading[:, None]).view(-1, width))
    g = dtable.index_select(0, write_rows).view(lanes, writes, width)
    ddelta = torch.bmm(k[:, None], g)
    delta = beta[:, None, None] * error
    dk = torch.bmm(g, delta.transpose(1, 2))[..., 0]
    dk -= (alpha * beta)[:, None] * torch.bmm(old, ddelta.transpose(1, 2))[..., 0]
    dm = torch.baddbmm(g, k[:, :, None], ddelta * -beta[:, None, None])
    dalpha = (dm * old).sum((1, 2))
    dbeta = (ddelta * error).sum((1, 2))
    dtable.index_copy_(0, write_rows, (dm * alpha[:, None, None]).view(lanes * writes, width))
    table.index_copy_(0, write_rows, old.view(lanes * writes, width))
    return beta[:, None] * ddelta[:, 0], dk, dalpha, dbeta, dq
