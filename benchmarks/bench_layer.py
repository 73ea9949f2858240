"""A layer's training step, SDM and its dense baseline at equal width."""

from __future__ import annotations

import pytest
import torch

from sdm_lite.nn import GatedDeltaNet, SparseDeltaMemory

B, T, WIDTH = 4, 512, 128


@pytest.mark.parametrize("name", ["sdm", "gdn"])
def test_layer_step(benchmark, name):
    torch.manual_seed(0)
    if name == "sdm":
        layer = SparseDeltaMemory(WIDTH, slots_per_head=1024, num_writes=32, num_reads=32)
    else:
        layer = GatedDeltaNet(WIDTH)
    x = torch.randn(B, T, WIDTH)

    def step():
        layer.zero_grad()
        readings, _ = layer(x)
        readings.square().mean().backward()

    benchmark(step)
    benchmark.extra_info["tokens_per_second"] = round(B * T / benchmark.stats.stats.median)
