"""What tests ask of two caches of a HybridLM."""

import torch


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
