"""Small fast-weight layers in float64, for the tests of the layer."""

from __future__ import annotations

import torch

from sdm_lite.nn import FwPKM

# float64 on both sides, sums of at most a few hundred terms in another order
EXACT = {"rtol": 1e-9, "atol": 1e-11}

SIZES = {"sub_keys": 4, "k": 3, "key_dim": 6, "value_dim": 7, "chunk": 5}


def build(**options):
    torch.manual_seed(0)
    layer = FwPKM(8, **{**SIZES, **options}).double()
    with torch.no_grad():  # weights, biases and gains that show when they are left out
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def inputs(batch, tokens, seed=1):
    return torch.randn(batch, tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
