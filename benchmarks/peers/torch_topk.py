"""Product-key selection as a torch pipeline: top-k of each factor, their k x k sums, top-k of those, sort by slot."""

from __future__ import annotations

import torch
from torch import Tensor


def outer_sum(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best (values, slots) of two equal factors, slots ascending; scores [rows, 2 n]."""
    n = scores.shape[-1] // 2
    first, i = scores[:, :n].topk(k)
    second, j = scores[:, n:].topk(k)
    sums = (first[:, :, None] + second[:, None, :]).flatten(1)
    slots = (i[:, :, None] * n + j[:, None, :]).flatten(1)
    values, place = sums.topk(k)
    return _by_slot(values, slots.gather(1, place))


def staircase(scores: Tensor, k: int, ranks: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """As `outer_sum` over the pairs of ranks (i + 1)(j + 1) <= k alone: what a user who knows the trick writes."""
    n = scores.shape[-1] // 2
    first, i = scores[:, :n].topk(k)
    second, j = scores[:, n:].topk(k)
    values, place = (first[:, ranks[0]] + second[:, ranks[1]]).topk(k)
    slots = i[:, ranks[0]] * n + j[:, ranks[1]]
    return _by_slot(values, slots.gather(1, place))


def staircase_ranks(k: int) -> tuple[Tensor, Tensor]:
    """Return the pairs of ranks that can be needed."""
    pairs = [(i, j) for i in range(k) for j in range(k) if (i + 1) * (j + 1) <= k]
    first, second = zip(*pairs)
    return torch.tensor(first), torch.tensor(second)


def _by_slot(values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    slots, order = slots.sort(-1)
    return values.gather(1, order), slots
