"""Decoding from a language model: greedy and sampled, one token at a time; beams and drafts have their own files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import validate
from ..errors import ShapeError, ValueRangeError, message
from ..fwpkm_op import check_flag
from .beams import beam_search
from .cache import HybridState
from .ragged import check_padded_ids, pad_prompts
from .speculative import EXACT, MODES, speculate

if TYPE_CHECKING:
    from .hybrid_lm import HybridLM

_NAME = "generate"


def generate(
    model: HybridLM,
    ids: Tensor | Sequence[Any],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int | None = None,
    num_beams: int = 1,
    speculative: bool | str = False,
    cache: HybridState | None = None,
    update: bool = True,
    mask: Tensor | None = None,
) -> Any:
    """Return the prompt and its continuation.

    Parameters
    ----------
    model : HybridLM
    ids : Tensor int [B, T], or B sequences of ids
        The prompt, T >= 1. It is read in one call; then each new token costs one step from the layers' states. A list
        of tensors [T_b] or lists of ints holds prompts of different lengths.
    max_new_tokens : int
    temperature : float
        0: the most likely token; else the logits are divided by it and a token is drawn.
    top_k : int or None
        Draw from the k most likely tokens only.
    seed : int or None
        Of the draws; None: torch's global generator.
    num_beams : int
        More than 1: of the so many likeliest beginnings that each step keeps, the one with the largest sum of log
        probabilities. Ties go to the better beam, then to the lower token.
    speculative : bool or "batched"
        True: draft tokens from n-grams seen before and check several in one pass; the tokens are the greedy ones,
        exactly, and so is the cache. "batched": check them in fewer and larger products, which round differently, so
        that nearly tied tokens may, rarely, change places. docs/decoding.md says when which can pay.
    cache : HybridState or None
        Continue the sequences that it has seen, and leave in it the state after the last returned token.
    update : bool
        False: fast-weight memories are read only, neither prompt nor answer enters them; all else moves on. For a
        model without such a memory it raises, since every other layer needs its state to decode.
    mask : Tensor bool [B, T] or None
        False for padding in a tensor `ids`, at any place; at least one token a sequence.

    Returns
    -------
    ids : Tensor [B, T + max_new_tokens], or list of B Tensors [T_b + max_new_tokens] for a list
        Each is what its prompt gives alone, to the rounding of products of another size.

    Raises
    ------
    ShapeError, ValueRangeError, DtypeError

    Examples
    --------
    >>> from sdm_lite.nn import HybridLM
    >>> model = HybridLM(256, 16, 1, layers=["swa"], num_heads=2)
    >>> model.generate(torch.tensor([[104, 105]]), 3).shape
    torch.Size([1, 5])
    >>> [len(one) for one in model.generate([[104, 105], [33]], 3)]
    [5, 4]
    """
    if not isinstance(ids, Tensor):
        padded, mask = pad_prompts(_NAME, ids, mask, model.embedding.weight.device)
        whole = generate(
            model,
            padded,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            num_beams=num_beams,
            speculative=speculative,
            cache=cache,
            update=update,
            mask=mask,
        )
        kept = F.pad(mask, (0, max_new_tokens), value=True)
        return [row[there] for row, there in zip(whole, kept)]
    if validate.whole_number(_NAME, "num_beams", num_beams) == 1:
        stream = stream_tokens(
            model,
            ids,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            speculative=speculative,
            cache=cache,
            update=update,
            mask=mask,
        )
        return torch.cat([ids, *(token[:, None] for token in stream)], dim=1)
    _check(model, ids, mask, max_new_tokens, temperature, top_k)
    _check_update(model, update)
    _check_greedy("num_beams", num_beams, temperature, top_k)
    if num_beams < 1:
        raise ValueRangeError(message(_NAME, "num_beams", "at least 1", str(num_beams), "raise num_beams"))
    if speculative:
        got, fix = f"num_beams={num_beams} with speculative={speculative!r}", "leave one of them out"
        raise ValueRangeError(message(_NAME, "num_beams", "beams or drafts, not both", got, fix))
    return torch.cat([ids, beam_search(model, ids, mask, max_new_tokens, num_beams, cache, update)], dim=1)


def stream_tokens(
    model: HybridLM,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int | None = None,
    speculative: bool | str = False,
    cache: HybridState | None = None,
    update: bool = True,
    mask: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yield the new tokens [B] one by one; the arguments are those of :func:`generate`, `ids` a tensor."""
    _check(model, ids, mask, max_new_tokens, temperature, top_k, seed)
    _check_update(model, update)
    if not speculative:
        return _stream(model, ids, mask, max_new_tokens, temperature, top_k, seed, cache, update)
    if speculative not in MODES:
        got, fix = repr(speculative), "name one of these"
        raise ValueRangeError(message(_NAME, "speculative", f"False or one of {MODES}", got, fix))
    _check_greedy("speculative", speculative, temperature, top_k)
    return speculate(model, ids, mask, max_new_tokens, speculative is EXACT, cache, update)


def _check(
    model: HybridLM,
    ids: Tensor,
    mask: Tensor | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int | None = None,
) -> None:
    check_padded_ids(_NAME, ids, mask, model.config["vocab_size"], model.embedding.weight.device)
    if ids.shape[1] < 1:
        raise ShapeError(message(_NAME, "ids", "[B, T] with T >= 1", str(list(ids.shape)), "pass at least one token"))
    if mask is not None and not bool(mask.any(1).all()):
        got = f"none in sequence {int((~mask.any(1)).nonzero()[0])}"
        raise ValueRangeError(message(_NAME, "mask", "a token in every sequence", got, "leave empty prompts out"))
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


def _check_update(model: HybridLM, update: bool) -> None:
    """Raise where `update` is no bool, or False for a model that has no memory to leave as it is."""
    if not check_flag(_NAME, "update", update) and all(block.fwpkm is None for block in model.blocks):
        expected, got = "True for a model without fast-weight memories", "False"
        fix = "leave it out; to keep a cache as it is, pass cache.fork(range(cache.batch))"
        raise ValueRangeError(message(_NAME, "update", expected, got, fix))


def _check_greedy(argument: str, value: object, temperature: float, top_k: int | None) -> None:
    """Raise where a search for likely tokens is asked to draw."""
    if temperature != 0 or top_k is not None:
        got = f"{value} with temperature={temperature}, top_k={top_k}"
        fix = f"leave out temperature and top_k, or {argument}"
        raise ValueRangeError(message(_NAME, argument, "no draws beside it", got, fix))


def _stream(
    model: HybridLM,
    ids: Tensor,
    mask: Tensor | None,
    count: int,
    temperature: float,
    top_k: int | None,
    seed: int | None,
    cache: HybridState | None,
    update: bool,
) -> Iterator[Tensor]:
    generator = None if seed is None else torch.Generator(device=ids.device).manual_seed(seed)
    state = HybridState() if cache is None else cache
    logits = step(model, ids, state, update, mask)
    for index in range(count):
        token = sample(logits, temperature, top_k, generator).to(ids.dtype)
        if cache is not None or index + 1 < count:  # nobody needs the step after the last token otherwise
            logits = step(model, token[:, None], state, update)
        yield token


@torch.no_grad()
def step(model: HybridLM, ids: Tensor, cache: HybridState, update: bool, mask: Tensor | None = None) -> Tensor:
    """Return the logits [B, vocab_size] after the last of `ids`, and move `cache` on, fast weights only to `update`."""
    features, _ = model.features(ids, cache, return_state=True, inplace=True, update=update, mask=mask)
    if mask is None:
        return model.logits(features[:, -1:])[:, 0]
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
    return model.logits(features[torch.arange(len(last), device=mask.device), last][:, None])[:, 0]


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
