"""A training step of a value table: row-wise Adam on sparse gradients beside dense Adam, few or many rows read."""

from __future__ import annotations

import pytest
import torch

from sdm_lite.nn import ProductKeyMemory

TOKENS, WIDTH, SUB_KEYS = 512, 128, 256
READS = {"few": {"num_heads": 1, "k": 8}, "many": {"num_heads": 4, "k": 32}}


def make_step(reads: str, sparse: bool):
    """Return (the step of one layer: forward, backward, optimiser; the layer; its input)."""
    torch.manual_seed(0)
    sizes = {"sub_keys": SUB_KEYS, "key_dim": 64, "sparse_gradients": sparse, **READS[reads]}
    layer, x = ProductKeyMemory(WIDTH, **sizes), torch.randn(TOKENS, WIDTH)
    optimizer = (torch.optim.SparseAdam if sparse else torch.optim.Adam)(layer.value_parameters(), lr=1e-3)

    def step():
        layer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()

    return step, layer, x


@pytest.mark.parametrize("reads", READS)
def test_first_steps_agree(reads):
    # after one gradient the two rules are one; their epsilons differ, and gradients here are far above both
    tables = []
    for sparse in (False, True):
        step, layer, _ = make_step(reads, sparse)
        step()
        tables.append(layer.values.detach())
    torch.testing.assert_close(*tables, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("adam", ["rows", "dense"])
@pytest.mark.parametrize("reads", READS)
def test_value_table_step(benchmark, reads, adam):
    step, layer, x = make_step(reads, adam == "rows")
    benchmark.extra_info["rows_read"] = len(layer.addresses(x)[1].unique())
    benchmark.extra_info["rows"] = layer.num_slots
    benchmark(step)
    benchmark.extra_info["tokens_per_second"] = round(TOKENS / benchmark.stats.stats.median)
