"""Speculative decoding: draft tokens by n-grams, check several in one pass, take back what greedy would not say.

Exactness is a matter of arithmetic: a matrix product of several tokens rounds differently from one of a single token,
and a selection of slots can turn a rounding into another memory. The exact mode therefore computes every drafted token
with the calls that a greedy step makes, on tensors of the same shapes, and only changes their order: layer by layer,
and in a layer token by token. Tokens and cache are those of greedy decoding by construction, ties included. What it
saves is reading each layer's weights once for all drafted tokens. The batched mode makes one call over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .cache import CacheMark, HybridState, LayerMark

if TYPE_CHECKING:
    from .hybrid_lm import HybridLM

EXACT, BATCHED = True, "batched"
MODES = (EXACT, BATCHED)
LONGEST_DRAFT = 8


class Drafter:
    """Proposes what followed the last occurrence of the last tokens, the longest match first, over and over.

    >>> Drafter([5, 6, 7, 5, 6]).draft(4)
    [7, 5, 6, 7]
    """

    lengths = (3, 2, 1)

    def __init__(self, tokens: list[int]) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> where its last occurrence but the current one ends
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Append a token that was said."""
        end = len(self.tokens)
        for length in self.lengths:  # those that end with the token before: only now does something follow them
            if length <= end:
                self._ends[tuple(self.tokens[end - length :])] = end
        self.tokens.append(token)

    def draft(self, most: int) -> list[int]:
        """Return `most` tokens, or none where nothing matches."""
        for length in self.lengths:
            end = self._ends.get(tuple(self.tokens[-length:])) if length <= len(self.tokens) else None
            if end is not None:
                period = len(self.tokens) - end
                return [self.tokens[end + i % period] for i in range(most)]
        return []


def speculate(
    model: HybridLM, ids: Tensor, mask: Tensor | None, count: int, exact: bool, cache: HybridState | None, update: bool
) -> Iterator[Tensor]:
    """Yield `count` tokens [B]; arguments as in `generate`.

    Of a batch's drafted tokens as many are taken as are right in all sequences.
    """
    from .generate import step

    state = HybridState() if cache is None else cache
    check = check_exactly if exact else check_batched
    prompts = ids if mask is None else [row[there] for row, there in zip(ids, mask)]
    drafters = [Drafter(row.tolist()) for row in prompts]
    logits = step(model, ids, state, update, mask)
    said, width = 0, 1
    while said < count:
        token = logits.argmax(-1).to(ids.dtype)
        for drafter, one in zip(drafters, token.tolist()):
            drafter.add(one)
        drafts = [drafter.draft(min(width, count - said - 1)) for drafter in drafters]
        length = min((len(draft) for draft in drafts), default=0)
        drafted = ids.new_tensor([draft[:length] for draft in drafts]).view(len(drafts), length)
        block = torch.cat([token[:, None], drafted], dim=1)
        accepted = 0
        if length:
            accepted, logits = check(model, block, state, update)
            # drafting more pays where drafts are right; a wrong token costs its work
            width = min(LONGEST_DRAFT, 2 * accepted + 1)
        elif cache is not None or said + 1 < count:
            logits = step(model, block, state, update)
        for said_token in block[:, 1 : accepted + 1].unbind(1):
            for drafter, one in zip(drafters, said_token.tolist()):
                drafter.add(one)
        said += accepted + 1
        yield from block[:, : accepted + 1].unbind(1)


def check_exactly(model: HybridLM, block: Tensor, cache: HybridState, update: bool = True) -> tuple[int, Tensor]:
    """Run the tokens `block` [B, 1 + drafted] as greedy steps would, and keep those that greedy decoding says.

    Returns how many drafted tokens are kept, and the logits [B, vocab_size] after the last of them, where `cache`
    then stands.
    """
    logits, marks = token_by_token(model, block, cache, update)
    accepted = _agreed(logits, block)
    if accepted < len(marks):
        cache.rollback(marks[accepted])
    for mark in marks[: accepted + 1]:
        cache.release(mark)
    return accepted, logits[:, accepted]


@torch.no_grad()
def check_batched(model: HybridLM, block: Tensor, cache: HybridState, update: bool = True) -> tuple[int, Tensor]:
    """As :func:`check_exactly`, with one call over the block, and a second over what is kept where it is not all."""
    mark = cache.mark()
    logits, _ = model(block, cache, inplace=True, update=update)
    accepted = _agreed(logits, block)
    if accepted + 1 < block.shape[1]:
        cache.rollback(mark)
        logits, _ = model(block[:, : accepted + 1], cache, inplace=True, update=update)
    cache.release(mark)
    return accepted, logits[:, accepted]


def _agreed(logits: Tensor, block: Tensor) -> int:
    """Return how many drafted tokens, from the first on, are the likeliest in all sequences."""
    right = (logits[:, :-1].argmax(-1) == block[:, 1:]).all(0)
    return int(right.long().cumprod(0).sum())


@torch.no_grad()
def token_by_token(
    model: HybridLM, ids: Tensor, cache: HybridState, update: bool = True
) -> tuple[Tensor, list[CacheMark]]:
    """Return logits [B, T, vocab_size] of `ids`, in the bits of T steps, and a mark before each token but the first.

    Layers outside, tokens inside: each product has the shapes that a step gives it.
    """
    tokens, recents, hashed, xs = ids.split(1, dim=1), [cache.recent], [], []
    cache.bind(model, ids.shape[0])
    for token in tokens:
        x, hash_ids, recent = model.embed(token, recents[-1])
        xs.append(x)
        hashed.append(hash_ids)
        recents.append(recent)
    with cache.whole_calls("HybridLM"):
        layers: list[Any] = []
        marked: list[list[LayerMark]] = [[] for _ in tokens[1:]]
        cache.interrupted = True  # until all layers have moved
        for block, state in zip(model.blocks, cache.layers):
            for t in range(len(tokens)):
                if t:
                    marked[t - 1].append(LayerMark.of(state))
                xs[t], state = block(xs[t], state, hashed[t], True, True, update)
            layers.append(state)
        cache.layers, cache.recent, cache.interrupted = layers, recents[-1], False
        marks = [cache.add_mark(parts, recent) for parts, recent in zip(marked, recents[1:])]
    return torch.cat([model.logits(model.norm(x)) for x in xs], dim=1), marks
