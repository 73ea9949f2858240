"""Beam search: the best of a few continuations at a time, by the sum of log probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .cache import HybridState

if TYPE_CHECKING:
    from .hybrid_lm import HybridLM


@torch.no_grad()
def beam_search(
    model: HybridLM, ids: Tensor, mask: Tensor | None, count: int, beams: int, cache: HybridState | None, update: bool
) -> Tensor:
    """Return the `count` new tokens [B, count] of the best beam of each prompt; arguments as in `generate`.

    Scores are summed in float64. There is no end token, so that all beams have the same length.
    """
    from .generate import step

    B = ids.shape[0]
    if count == 0:
        if cache is not None:
            step(model, ids, cache, update, mask)
        return ids[:, :0]
    state = HybridState() if cache is None else cache
    logits = step(model, ids, state, update, mask)
    scores = logits.new_zeros(B, 1, dtype=torch.float64)
    tokens = ids.new_empty(B, 1, 0)
    for index in range(count):
        live = scores.shape[1]
        scores, source, token = _extend(scores, logits, beams)
        tokens = torch.cat([_taken(tokens, source), token[..., None].to(ids.dtype)], dim=-1)
        flat = (source + torch.arange(B)[:, None] * live).flatten().tolist()
        if cache is not None or index + 1 < count:
            state.reorder(flat)
            logits = step(model, token.reshape(-1, 1).to(ids.dtype), state, update)
    if cache is not None:  # the first beam of each prompt is its best
        cache.reorder([i * scores.shape[1] for i in range(B)])
    return tokens[:, 0]


def _extend(scores: Tensor, logits: Tensor, beams: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best `beams` continuations of each prompt by one token: (scores, the beam extended, the token).

    All are [B, beams], best first; fewer where there are not so many. Equal scores stand in the order of (beam, token).
    """
    B, live = scores.shape
    vocab = logits.shape[-1]
    total = scores[..., None] + logits.double().log_softmax(-1).view(B, live, vocab)
    best, order = total.flatten(1).sort(dim=-1, descending=True, stable=True)
    kept = order[:, :beams]
    return best[:, :beams], kept // vocab, kept % vocab


def _taken(tokens: Tensor, source: Tensor) -> Tensor:
    """Return the histories [B, beams, t] of the beams `source` [B, beams]."""
    return tokens.gather(1, source[..., None].expand(-1, -1, tokens.shape[-1]))
