"""The parts of a language model around its mixers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ragged import tokens_of
from .state import MixerState


class GatedMLP(nn.Module):
    """SiLU-gated MLP: down(silu(gate x) * up x)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., dim] of x [..., dim]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)) if `mlp_hidden` is not 0.

    `memories` may hold "fwpkm", which comes first, x + fwpkm(x), and "pkm", which takes the MLP's place.
    """

    def __init__(
        self, dim: int, kind: str, mixer: nn.Module, mlp_hidden: int, memories: Mapping[str, nn.Module] | None = None
    ) -> None:
        super().__init__()
        memories = memories or {}
        self.kind = kind
        self.fwpkm = memories.get("fwpkm")
        self.mixer_norm = nn.RMSNorm(dim, eps=1e-6)
        self.mixer = mixer
        self.mlp = memories.get("pkm") or (GatedMLP(dim, mlp_hidden) if mlp_hidden else None)
        self.mlp_norm = None if self.mlp is None else nn.RMSNorm(dim, eps=1e-6)

    @torch.no_grad()
    def scale_outputs(self, factor: float) -> None:
        """Multiply the weights that write to the residual stream, so that its variance does not grow with depth."""
        for module in self.modules():
            for name in ("Wo", "o_proj", "down_proj"):
                if hasattr(module, name):
                    getattr(module, name).weight.mul_(factor)

    def forward(
        self,
        x: Tensor,
        state: MixerState | None,
        ids: object,
        return_state: bool,
        inplace: bool,
        update: bool = True,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, MixerState | None]:
        """Return (x [B, T, dim], the state); `ids` goes to sparse memories only, `update` to fast-weight memories.

        With `lengths` (int64 [B]) padding stands behind so many tokens of each sequence.
        """
        extra = {"ids": ids} if self.kind == "sdm" else {}
        fast, there = None, None if lengths is None else tokens_of(lengths, x.shape[1])
        if self.fwpkm is not None:
            y, fast = self.fwpkm(
                x, None if state is None else state.fast, update=update, return_state=return_state, mask=there
            )
            x = x + y
        y, state = self.mixer(
            self.mixer_norm(x), state, return_state=return_state, inplace=inplace, lengths=lengths, **extra
        )
        x = x + y
        if state is not None:
            state.fast = fast
        if self.mlp is None or self.mlp_norm is None:
            return x, state
        if there is None:
            return x + self.mlp(self.mlp_norm(x)), state
        tokens = x[there]  # a table's counters must not see padding
        return x.index_put((there,), tokens + self.mlp(self.mlp_norm(tokens))), state


class NgramEmbedding(nn.Module):
    """The sum of hashed embeddings of the last 2, 3 and 4 tokens, `buckets` rows for each length.

    Rows are shared by n-grams with equal hashes. Cheap in time (three look-ups), large in parameters.
    """

    lengths = (2, 3, 4)

    def __init__(self, buckets: int, dim: int) -> None:
        super().__init__()
        self.buckets = buckets
        self.table = nn.Embedding(len(self.lengths) * buckets, dim)

    def forward(self, ids: Tensor, recent: Tensor) -> Tensor:
        """Return [B, T, dim] of ids [B, T] that follow `recent` [B, 3] (-1 where no token was)."""
        T, before = ids.shape[1], recent.shape[1]
        ids = torch.cat([recent, ids], dim=1) + 1
        hashed, rows = ids[:, before:], []
        for index, length in enumerate(self.lengths):
            start = before - (length - 1)
            # a polynomial in an odd constant, modulo 2^64
            hashed = hashed * 0x5851F42D4C957F2D + ids[:, start : start + T]
            # the high bits depend on all of the tokens, the low ones on the last few bits of each
            rows.append((hashed >> 24) % self.buckets + index * self.buckets)
        return self.table(torch.stack(rows, dim=-1)).sum(-2)
