"""Sampling from a language model, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import validate
from ..errors import ShapeError, ValueRangeError, message
from .checks import check_ids

if TYPE_CHECKING:
    from .hybrid_lm import HybridLM

_NAME = "generate"


def generate(
    model: HybridLM,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int | None = None,
    num_beams: int = 1,
    speculative: bool = False,
    cache: Any = None,
) -> Tensor:
    """Return the prompt and its continuation.

    Parameters
    ----------
    model : HybridLM
    ids : Tensor int [B, T]
        The prompt, T >= 1. It is read in one call; then each new token costs one step from the layers' states.
    max_new_tokens : int
    temperature : float
        0: the most likely token; else the logits are divided by it and a token is drawn.
    top_k : int or None
        Draw from the k most likely tokens only.
    seed : int or None
        Of the draws; None: torch's global generator.
    num_beams, speculative
        1 and False in this release.
    cache : HybridState or None
        Continue the sequence that it has seen, and leave in it the state after the last returned token.

    Returns
    -------
    ids : Tensor [B, T + max_new_tokens]

    Raises
    ------
    ShapeError, ValueRangeError

    Examples
    --------
    >>> from sdm_lite.nn import HybridLM
    >>> model = HybridLM(256, 16, 1, layers=["swa"], num_heads=2)
    >>> model.generate(torch.tensor([[104, 105]]), 3).shape
    torch.Size([1, 5])
    """
    if num_beams != 1 or speculative:
        name, got = ("num_beams", str(num_beams)) if num_beams != 1 else ("speculative", "True")
        raise ValueRangeError(message(_NAME, name, "1 and False: sampling only in this release", got, "leave it out"))
    stream = stream_tokens(model, ids, max_new_tokens, temperature=temperature, top_k=top_k, seed=seed, cache=cache)
    return torch.cat([ids, *(token[:, None] for token in stream)], dim=1)


def stream_tokens(
    model: HybridLM,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int | None = None,
    cache: Any = None,
) -> Iterator[Tensor]:
    """Yield the new tokens [B] one by one; the arguments are those of :func:`generate`."""
    check_ids(_NAME, ids, model.config["vocab_size"], model.embedding.weight.device)
    if ids.shape[1] < 1:
        raise ShapeError(message(_NAME, "ids", "[B, T] with T >= 1", str(list(ids.shape)), "pass at least one token"))
    for name, value, low in (
        ("temperature", temperature, 0),
        ("max_new_tokens", max_new_tokens, 0),
        ("top_k", top_k, 1),
    ):
        if value is None:
            continue
        value = (validate.real_number if name == "temperature" else validate.whole_number)(_NAME, name, value)
        if not value >= low:
            raise ValueRangeError(message(_NAME, name, f"at least {low}", str(value), f"raise {name}"))
    if seed is not None and not 0 <= validate.whole_number(_NAME, "seed", seed) < 2**64:
        raise ValueRangeError(message(_NAME, "seed", "None or 0 to 2^64 - 1", str(seed), "pass another seed"))
    return _stream(model, ids, max_new_tokens, temperature, top_k, seed, cache)


def _stream(
    model: HybridLM, ids: Tensor, count: int, temperature: float, top_k: int | None, seed: int | None, cache: Any
) -> Iterator[Tensor]:
    from .hybrid_lm import HybridState  # which imports this module

    generator = None if seed is None else torch.Generator(device=ids.device).manual_seed(seed)
    logits, state = _step(model, ids, HybridState() if cache is None else cache)
    for index in range(count):
        token = sample(logits, temperature, top_k, generator).to(ids.dtype)
        if cache is not None or index + 1 < count:  # nobody needs the step after the last token otherwise
            logits, state = _step(model, token[:, None], state)
        if cache is not None:
            vars(cache).update(vars(state))
        yield token
    if cache is not None:
        vars(cache).update(vars(state))


@torch.no_grad()
def _step(model: HybridLM, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
    logits, state = model(ids, state, return_state=True, inplace=True)
    return logits[:, -1], state


def sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None = None) -> Tensor:
    """Return a token [B] for each row of logits [B, vocab_size]."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float()
    if top_k is not None and top_k < logits.shape[-1]:
        kept = logits.topk(top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # <= 0: a tiny temperature leaves the best alone
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
