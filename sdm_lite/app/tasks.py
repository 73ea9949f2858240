"""The two tasks that runs train on: bytes of text, and multi-query associative recall."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..nn import HybridLM
from .data import Corpus
from .mqar import recall_batch, training_batch
from .settings import Settings
from .trainer import MEASURING

#: token ids of a model of bytes
BYTES = 256
#: perplexity by position is measured up to this many training lengths
LONG = 16
#: seed of the held-out recall rows: no training seed shares it
_EVALUATION = 0x5EED


class TextTask:
    """Next-byte prediction on windows of a corpus."""

    vocab_size = BYTES

    def __init__(self, settings: Settings, corpus: Corpus):
        self.settings, self.corpus = settings, corpus
        self.facts = {"data": corpus.fingerprint}

    def batch(self, step: int) -> torch.Tensor:
        """Return the windows of `step`, int64 [batch, length + 1]."""
        settings = self.settings
        return _ids(self.corpus.windows(settings.length, settings.batch, settings.seed, step))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the mean loss in nats per byte, and the bytes read."""
        losses = _byte_losses(model, batch)
        return losses.mean(), losses.numel()

    @torch.no_grad()
    def evaluate(self, model: nn.Module, note: Callable[[str], None]) -> dict[str, Any]:
        """Return bits per byte on held-out windows, and by position up to `LONG` training lengths."""
        model.eval()
        length = self.settings.length
        windows = self.corpus.held_out_windows(length, 64)
        bits = _bits_by_position(model, windows, 8, note, "held-out bytes")
        long = self.corpus.long_documents(LONG * length, self.settings.long_documents)
        by_position = _bits_by_position(model, long, 1, note, "long files")
        return {
            "bits_per_byte": float(bits.mean()),
            "held_out_bytes": bits.size,
            "long_files": len(long),
            "by_position": bucket_positions(by_position),
        }


class RecallTask:
    """Multi-query associative recall (see :mod:`sdm_lite.app.mqar`)."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.facts: dict[str, Any] = {}
        self.vocab_size = settings.keys + settings.values

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids [rows, 3 n] and targets [rows, n] of `step`."""
        s = self.settings
        sizes = s.pairs[: 1 + step // s.grow_every] if s.grow_every else s.pairs
        ids, targets = training_batch(sizes, s.tokens, s.max_rows, s.keys, s.values, s.seed, step)
        return torch.from_numpy(ids), torch.from_numpy(targets)

    def loss(self, model: HybridLM, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
        """Return the mean loss in nats per query, and the tokens read."""
        ids, targets = batch
        logits = self._answers(model, ids, targets.shape[1])
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten() - self.settings.keys), ids.numel()

    def _answers(self, model: HybridLM, ids: torch.Tensor, queries: int) -> torch.Tensor:
        """Return logits [rows, queries, values], divided by sqrt(dim).

        An answer is always a value, so keys do not compete, and the head is computed at the queries and for the
        values alone. Without the division the tied embeddings, of standard deviation 0.5, give logits of 5.7 at
        the start: unlearning those took longer than the whole run, and no mixer began to recall within 300 steps.
        """
        features = model.features(ids)[0][:, -queries:]
        head = model.embedding if model.head is None else model.head
        return F.linear(features, head.weight[self.settings.keys :]) * self.settings.dim**-0.5

    @torch.no_grad()
    def evaluate(self, model: HybridLM, note: Callable[[str], None]) -> dict[str, Any]:
        """Return the share of queries answered right for each number of pairs."""
        model.eval()
        s = self.settings
        accuracy = {}
        for pairs in s.eval_pairs:
            generator = np.random.default_rng([_EVALUATION, pairs])
            rows = math.ceil(s.eval_queries / pairs)
            ids, targets = (torch.from_numpy(a) for a in recall_batch(pairs, rows, s.keys, s.values, generator))
            right = 0
            step = max(1, s.tokens // (3 * pairs))
            for start in range(0, rows, step):
                note(f"{MEASURING} {pairs} pairs")
                wanted = targets[start : start + step]
                answers = self._answers(model, ids[start : start + step], pairs).argmax(-1) + s.keys
                right += int((answers == wanted).sum())
            accuracy[str(pairs)] = right / targets.numel()
        return {"accuracy": accuracy, "chance": 1.0 / s.values}


def bucket_positions(bits: np.ndarray) -> list[dict[str, Any]]:
    """Return means of `bits` [files, positions] over ranges of positions that double in length.

    >>> [(row["from"], row["to"]) for row in bucket_positions(np.ones((1, 200)))]
    [(0, 64), (64, 128), (128, 200)]
    """
    rows, start, stop = [], 0, 64
    while start < bits.shape[1]:
        part = bits[:, start:stop]
        mean = float(part.mean())
        rows.append(
            {
                "from": start,
                "to": start + part.shape[1],
                "bits_per_byte": mean,
                "perplexity": 2.0**mean,
                "bytes": part.size,
            }
        )
        start, stop = stop, stop * 2
    return rows


def _bits_by_position(
    model: nn.Module, windows: np.ndarray, batch: int, note: Callable[[str], None], what: str
) -> np.ndarray:
    """Return the bits spent on each byte of `windows` but the first, float64 [windows, length]."""
    bits = []
    for start in range(0, len(windows), batch):
        note(f"{MEASURING} {what} {start}/{len(windows)}")
        losses = _byte_losses(model, _ids(windows[start : start + batch]))
        bits.append(losses.double().numpy() / math.log(2.0))
    return np.concatenate(bits)


def _byte_losses(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    logits = model(windows[:, :-1])
    targets = windows[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


def _ids(windows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(windows.astype(np.int64))
