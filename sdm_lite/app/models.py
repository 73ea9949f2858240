"""From settings or a checkpoint to a model, and what the model costs."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch

from ..nn import SMALL_MODEL_OPTIONS, HybridLM, flops_per_token, parameter_counts, state_elements
from . import checkpoint
from .mistakes import mistake
from .settings import Settings


def build(settings: Settings, vocab_size: int) -> HybridLM:
    """Return the model of `settings`, with the parameters that its seed gives; SdmError when sizes do not fit."""
    layers = [settings.mixer if kind == "mixer" else kind for kind in settings.layers]
    options = {kind: dict(extra) for kind, extra in SMALL_MODEL_OPTIONS.items()}
    options["sdm"] |= {"learn_memory": settings.learn_memory, "score_scale": settings.score_scale}
    options["gdn"] |= {"head_k_dim": settings.key_dim}
    options |= _memory_options(settings)
    torch.manual_seed(settings.seed)
    return HybridLM(
        vocab_size,
        settings.dim,
        len(layers),
        mixer=settings.mixer,
        layers=layers,
        num_heads=settings.heads,
        num_kv_heads=settings.kv_heads,
        window=settings.window,
        slots_per_head=settings.slots,
        num_writes=settings.writes,
        num_reads=settings.reads,
        mixer_heads=settings.mixer_heads,
        options=options,
        mlp_hidden=settings.hidden,
        tie_embeddings=settings.tie_embeddings,
        zero_head=not settings.tie_embeddings,
        embedding_std=0.5,
        ngram_buckets=settings.ngram_buckets,
        memory=settings.memory,
    )


def _memory_options(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the arguments of the memory layers; each token of either reads 8 rows a head."""
    common = {"sub_keys": settings.sub_keys, "k": min(8, settings.sub_keys**2), "key_dim": settings.dim}
    fwpkm = {**common, "value_dim": settings.dim, "chunk": settings.memory_chunk}
    return {"fwpkm": fwpkm, "pkm": {**common, "num_heads": 2, "sparse_gradients": True}}


def from_checkpoint(command: str, folder: Path) -> tuple[HybridLM, checkpoint.Checkpoint]:
    """Return the model saved in `folder`, in evaluation mode, and its checkpoint; CommandError when damaged."""
    from .trainer import check_arrays, load_model

    found = checkpoint.load(command, folder)
    try:
        with torch.device("meta"):  # without storage: a damaged config may ask for any size
            shapes = HybridLM(**found.record["config"])
    except Exception as error:  # whatever a layer makes of wrong types and sizes
        got = f"a damaged one ({error!s:.200})"
        raise mistake(command, str(folder), "a model's config", got, "use another checkpoint") from error
    check_arrays(command, shapes, found, found.tensors(command, "model"))
    model = HybridLM(**found.record["config"])
    load_model(command, model, found)
    return model.eval(), found


def account(model: HybridLM, settings: Settings) -> dict[str, Any]:
    """Return the forward FLOPs per token, the parameters and the state of `model`, as JSON.

    FLOPs are averaged over the training length. ``state_elements`` is what the global mixer, the last
    layer named "mixer", and fast-weight memories keep; ``cache_elements`` what attention keeps beside it.
    """
    context = settings.length if settings.task == "text" else 3 * max(settings.pairs)
    flops = flops_per_token(model, context=context)
    parameters = parameter_counts(model)
    state = state_elements(model, context=context)
    mixers: list[Any] = [block for block, kind in zip(model.blocks, settings.layers) if kind == "mixer"]
    fast: list[Any] = [block.fwpkm for block in model.blocks if block.fwpkm is not None]
    return {
        "flops_per_token": flops["total"],
        "flops": flops,
        "parameters": parameters["total"] - parameters["memory"] - parameters["ngrams"],
        "memory_parameters": parameters["memory"],
        "ngram_parameters": parameters["ngrams"],
        "state_elements": sum(layer.state_elements(context) for layer in [block.mixer for block in mixers] + fast),
        "state_access": state["access"],
        "cache_elements": state["cache"],
    }


def physical_memory() -> float:
    """Return the bytes of this machine's memory; infinity where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return math.inf


def use_threads(threads: int | None) -> None:
    """Let torch and the memory ops use `threads` threads; None: what they choose themselves."""
    if threads is not None:
        torch.set_num_threads(threads)
        os.environ["SDM_LITE_NUM_THREADS"] = str(threads)
