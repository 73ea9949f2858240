"""Models whose caches are tested, and what tests ask of two caches of a HybridLM."""

import torch

from sdm_lite.nn import SMALL_MODEL_OPTIONS, HybridLM, HybridState

VOCAB = 19
SIZES = {"num_heads": 2, "num_kv_heads": 1, "window": 4, "slots_per_head": 16, "num_writes": 4, "num_reads": 4}
MODELS = {
    "sdm": {"layers": ["swa", "sdm"], "options": SMALL_MODEL_OPTIONS, "mixer_heads": 2, "ngram_buckets": 11},
    "zero": {"layers": ["sdm"], "options": {"sdm": {"learn_memory": False, "rule": "per_slot"}}},
    "full": {"layers": ["full", "sdm"]},
    "gdn": {"layers": ["swa", "gdn"], "options": SMALL_MODEL_OPTIONS},
    "conv": {"layers": ["conv", "full"]},
    "hash": {"layers": ["sdm"], "options": {"sdm": {"addressing": "hash"}}},
}


def same_cache(one, two):
    """Whether two caches hold the same bits."""
    for mine, other in zip(one.layers, two.layers, strict=True):
        places = [torch.as_tensor(layer.position) for layer in (mine, other)]
        if not torch.equal(*places) or mine.taps.keys() != other.taps.keys():
            return False
        pairs = [(mine.taps[name], other.taps[name]) for name in mine.taps]
        pairs += [(mine.keys, other.keys), (mine.values, other.values)]
        pairs.append(tuple(x.dense() if hasattr(x, "dense") else x for x in (mine.memory, other.memory)))
        if not all(a is b is None or torch.equal(a, b) for a, b in pairs):
            return False
    return torch.equal(one.recent, two.recent)


def build(name, seed=0):
    torch.manual_seed(seed)
    config = {**SIZES, **MODELS[name]}
    model = HybridLM(VOCAB, 16, len(config["layers"]), mlp_hidden=0, **config).eval()
    for block in model.blocks:
        if block.kind == "sdm" and "memory" in block.mixer._parameters:
            block.mixer.memory.normal_()  # a zero memory would hide a wrong one
    return model


def tokens(batch, count, seed=1):
    return torch.randint(VOCAB, (batch, count), generator=torch.Generator().manual_seed(seed))


def run(model, cache, ids):
    """Feed ids [B, T] as single tokens and return the logits: the same calls give the same bits."""
    steps = [model(one, cache, inplace=True)[0] for one in ids.split(1, dim=1)]
    return torch.cat(steps, dim=1)


def recomputed(model, state, ids):
    """The same calls without a cache in place: functional states, with dense tables."""
    steps = []
    for one in ids.split(1, dim=1):
        logits, state = model(one, state)
        steps.append(logits)
    return torch.cat(steps, dim=1), state


def rows(state, indices):
    layers = [layer.map(lambda x: x[indices]) for layer in state.layers]
    return HybridState(layers, state.recent[indices], state.config)


def started(model, ids):
    cache = HybridState()
    run(model, cache, ids)
    return cache
