"""Product-key memories as a torch user writes them: cdist and top-k, autograd of the local losses, embedding_bag."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

EPSILON = 1e-3


def retrieve(queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Return weights and slots [n, k] of one head, and each half's k best (scores, columns); keys [2, m, h].

    cdist, log, top-k of each half, the k x k sums, top-k of those.
    """
    half = keys.shape[-1]
    near = []
    for m in range(2):
        distances = torch.cdist(queries[:, m * half : (m + 1) * half], keys[m]).square()
        near.append((-(distances + EPSILON).log()).topk(k))
    (first, i), (second, j) = near
    sums, place = (first[:, :, None] + second[:, None, :]).flatten(1).topk(k)
    slots = (i[:, :, None] * keys.shape[1] + j[:, None, :]).flatten(1).gather(1, place)
    return sums.softmax(-1), slots, near


def address_loss(near: list[tuple[Tensor, Tensor]], sub_keys: int) -> Tensor:
    """Return the sum over halves of p log p, p the mean use of the sub-keys."""
    total = torch.zeros(())
    for scores, columns in near:
        marginal = torch.zeros(len(scores), sub_keys).scatter(1, columns, scores.softmax(-1)).mean(0)
        total = total + (marginal * (marginal + 1e-8).log()).sum()
    return total


def chunk(queries: Tensor, values: Tensor, gates: Tensor, keys: Tensor, table: Tensor, k: int) -> Tensor:
    """Read one chunk, then write it into `keys` and `table` in place by the gradients of the local losses.

    scale "norm", pairs "drop", rates 1, one head; the gradient of the table is dense, as autograd gives it.
    """
    keys, table = keys.requires_grad_(), table.requires_grad_()
    weights, slots, near = retrieve(queries, keys, k)
    readings = (weights.detach()[..., None] * table[slots]).sum(1)
    factor = gates[:-1] / weights.detach()[:-1].square().sum(1)
    memory_loss = 0.5 * (factor[:, None] * (values[1:] - readings[:-1]).square()).sum()
    (dtable,) = torch.autograd.grad(memory_loss, table, retain_graph=True)
    (dkeys,) = torch.autograd.grad(address_loss(near, keys.shape[1]), keys)
    counts = torch.bincount(slots.flatten(), minlength=len(table)).clamp(min=1)
    with torch.no_grad():
        table -= dtable / counts[:, None]
        keys -= dkeys
    return readings.detach()


def bag(table: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Return torch's own weighted sums of rows; its gradient of the table is dense."""
    return functional.embedding_bag(slots, table, per_sample_weights=weights, mode="sum")
