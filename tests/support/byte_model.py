"""A language model of bytes that is small enough to train in milliseconds, and a task for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class ByteModel(nn.Module):
    """Embedding, one hidden layer (its matrices are for Muon), head; it sees the current byte only."""

    def __init__(self, vocab_size: int = 256, dim: int = 8):
        super().__init__()
        self.config = {"vocab_size": vocab_size, "dim": dim}
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList([nn.Linear(dim, dim)])
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits [B, T, vocab_size]."""
        x = self.embedding(ids)
        return self.head(x + torch.tanh(self.blocks[0](x)))


class NextByte:
    """Predict (3 * byte + 1) mod 256; `on_step` is called with every step whose batch is drawn."""

    def __init__(self, on_step=lambda step: None, facts=None):
        self.on_step = on_step
        self.facts = facts or {}

    def batch(self, step: int) -> torch.Tensor:
        """Return the bytes of `step`."""
        self.on_step(step)
        return torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(step))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the loss and the number of bytes."""
        logits = model(batch)
        return F.cross_entropy(logits.flatten(0, 1), ((3 * batch + 1) % 256).flatten()), batch.numel()

    def evaluate(self, model: nn.Module, note) -> dict:
        """Return nothing of interest."""
        return {}
