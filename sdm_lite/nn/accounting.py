"""What a model costs: multiply-adds, state and parameters, for comparisons at equal cost (spec section 8)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .blocks import GatedMLP
from .hybrid_lm import HybridLM


def flops_per_token(model: HybridLM | Mapping[str, Any], *, context: int = 1024) -> dict[str, int]:
    """Return the forward pass's FLOPs per token, two per multiply-add; a training step takes about three times that.

    Parameters
    ----------
    model : HybridLM or its config
        A config builds nothing: sizes are taken from a model without storage.
    context : int
        Sequence length, over which attention is averaged.

    Returns
    -------
    dict
        "projections" (into and out of mixers), "state" (attention, or the recurrence taken token by token: retrieve,
        update, read), "mlp", "memory" (FwPKM and ProductKeyMemory layers), "head", "total". Norms and the selection of
        slots are not counted.

    Examples
    --------
    >>> flops_per_token({"vocab_size": 256, "dim": 16, "num_layers": 1, "layers": ["conv"], "mlp_hidden": 0})
    {'projections': 1664, 'state': 0, 'mlp': 0, 'memory': 0, 'head': 8192, 'total': 9856}
    """
    model = _model(model)
    counts = {"projections": 0, "state": 0, "mlp": 0, "memory": 0, "head": 2 * model.embedding.weight.numel()}
    for block in _blocks(model):
        for layer in (block.mixer, block.fwpkm, block.mlp):
            if hasattr(layer, "flops_per_token"):
                for part, count in layer.flops_per_token(context).items():
                    counts[part] += count
        if isinstance(block.mlp, GatedMLP):
            counts["mlp"] += 2 * sum(p.numel() for p in block.mlp.parameters())
    return {**counts, "total": sum(counts.values())}


def state_elements(model: HybridLM | Mapping[str, Any], *, context: int = 1024) -> dict[str, int]:
    """Return the numbers that one sequence carries along.

    "recurrent": sparse, dense and fast-weight memories (of these one set, with a full open chunk). "cache": keys and
    values of attention after `context` tokens.
    "access": recurrent elements that one token addresses, (W + R) D or d_qk d_v per head.
    """
    counts = {"recurrent": 0, "cache": 0, "access": 0}
    for block in _blocks(_model(model)):
        kind = "cache" if block.kind in ("swa", "full") else "recurrent"
        counts[kind] += block.mixer.state_elements(context)
        if block.fwpkm is not None:
            counts["recurrent"] += block.fwpkm.state_elements(context)
        for layer in (block.mixer, block.fwpkm):
            if hasattr(layer, "state_access"):
                counts["access"] += layer.state_access()
    return counts


def parameter_counts(model: HybridLM | Mapping[str, Any]) -> dict[str, int]:
    """Return the parameters by what they are.

    "memory": learned initial memories and value tables (fast weights are no parameters). "ngrams": hashed n-gram
    tables. "embedding": tokens, and an untied head.
    "backbone": everything else. "total".
    """
    counts = {"backbone": 0, "embedding": 0, "memory": 0, "ngrams": 0}
    for name, parameter in _model(model).named_parameters():
        if name.startswith("ngrams."):
            part = "ngrams"
        elif name.startswith(("embedding.", "head.")):
            part = "embedding"
        else:
            part = "memory" if name.endswith((".mixer.memory", ".mlp.values")) else "backbone"
        counts[part] += parameter.numel()
    return {**counts, "total": sum(counts.values())}


def _blocks(model: HybridLM) -> Iterable[Any]:
    return model.blocks


def _model(model: HybridLM | Mapping[str, Any]) -> HybridLM:
    if isinstance(model, nn.Module):
        return model
    with torch.device("meta"):
        return HybridLM(**model)
