"""Sequences of different lengths in one call.

At the door of the model the tokens of each sequence move to the left, in their order; padding stands behind them. A
causal layer then gives every token what it has alone, and only what a layer *keeps* has to stop at the `lengths`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import DeviceError, DtypeError, ShapeError, ValueRangeError, message
from ..validate import check_shape
from .checks import IDS, check_ids, check_tensor


class Aligned(NamedTuple):
    """Where the tokens of a padded batch [B, T] are, L of the longest sequence."""

    order: Tensor  # int64 [B, L]: columns of the tokens, then of padding
    lengths: Tensor  # int64 [B]

    def put_back(self, x: Tensor, tokens: int) -> Tensor:
        """Return x [B, L, d] at its columns of [B, tokens, d], zeros at the padding."""
        kept = x.masked_fill(~tokens_of(self.lengths, x.shape[1])[..., None], 0)
        return x.new_zeros(len(x), tokens, x.shape[2]).scatter(1, self.order[..., None].expand_as(x), kept)


@torch.compiler.disable  # the sizes that follow depend on what is in the mask
def aligned_by(mask: Tensor) -> Aligned | None:
    """Return where the tokens of `mask` are, or None where there is no padding."""
    if bool(mask.all()):
        return None
    lengths = mask.sum(1)
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    return Aligned(order[:, : int(lengths.max())], lengths)


def check_mask(op: str, mask: Any, ids: Tensor) -> None:
    """Raise unless `mask` is bool, of the shape and on the device of `ids` [B, T]."""
    check_tensor(op, "mask", mask)
    if mask.dtype != torch.bool:
        raise DtypeError(message(op, "mask", "dtype bool, False = padding", str(mask.dtype), "pass mask.bool()"))
    check_shape(op, "mask", mask, tuple(ids.shape), "[B, T]", "pass one entry per id")
    if mask.device != ids.device:
        expected, got = f"a tensor on the device of ids, {ids.device}", f"one on {mask.device}"
        raise DeviceError(message(op, "mask", expected, got, "move one of them"))


def check_padded_ids(op: str, ids: Any, mask: Any, vocab_size: int, device: torch.device) -> Tensor:
    """Check `ids` and, where there is one, `mask`; return the ids with 0 at the padding, whose ids may be anything."""
    if mask is not None:
        check_tensor(op, "ids", ids)
        check_mask(op, mask, ids)
        ids = ids.masked_fill(~mask, 0)
    check_ids(op, ids, vocab_size, device)
    return ids


def pad_prompts(op: str, prompts: Any, mask: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the ids [B, T] and the mask [B, T] of prompts that each are a tensor [T_b] or a list of ints."""
    if mask is not None:
        fix = "leave the mask out, or pass ids as a tensor"
        raise ValueRangeError(message(op, "mask", "None beside a list of prompts", "a mask", fix))
    expected, fix = "a tensor [B, T], or a list of tensors [T_b] or lists of ints", "pass token ids"
    if not isinstance(prompts, (list, tuple)) or not prompts:
        raise DtypeError(message(op, "ids", expected, f"{prompts!r:.40}", fix))
    rows = []
    for prompt in prompts:
        try:
            row = torch.as_tensor(prompt, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DtypeError(message(op, "ids", expected, f"{prompt!r:.40}", fix)) from error
        if row.ndim != 1:
            raise ShapeError(message(op, "ids", expected, f"a prompt of shape {list(row.shape)}", fix))
        if row.numel() and row.dtype not in IDS:
            raise DtypeError(message(op, "ids", "int32 or int64", str(row.dtype), "pass token ids"))
        rows.append(row.long())
    lengths = torch.tensor([len(row) for row in rows], device=device)
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return padded, tokens_of(lengths, padded.shape[1])


def tokens_of(lengths: Tensor, columns: int) -> Tensor:
    """Return bool [B, columns]: whether a column holds a token.

    >>> tokens_of(torch.tensor([1, 2]), 3).tolist()
    [[True, False, False], [True, True, False]]
    """
    return torch.arange(columns, device=lengths.device) < lengths[:, None]


def last_columns(x: Tensor, count: int, padding: Tensor) -> Tensor:
    """Return [B, count, ...]: the last columns of x [B, K, ...] in front of each sequence's `padding` [B] columns.

    Where a sequence has not so many, the first ones are copies of column 0, which mean nothing.

    >>> last_columns(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), 2, torch.tensor([0, 1])).tolist()
    [[3, 4], [6, 7]]
    """
    column = x.shape[1] - count - padding[:, None] + torch.arange(count, device=x.device)
    column = column.clamp(min=0).view(*column.shape, *(1,) * (x.ndim - 2))
    return x.gather(1, column.expand(-1, -1, *x.shape[2:]))
