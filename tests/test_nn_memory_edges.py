"""Memory layers at the edges: no tokens, no sequences, short of a chunk, all masked, one NaN."""

from __future__ import annotations

import pytest
import torch
from fwpkm_layers import build, inputs

from sdm_lite.nn import ProductKeyMemory

SHAPES = [(0, 7), (2, 0), (0, 0), (2, 3), (1, 1)]  # chunks have five tokens


def pkm(**options):
    torch.manual_seed(0)
    return ProductKeyMemory(8, sub_keys=4, num_heads=2, k=3, key_dim=6, **options).double()


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(("batch", "tokens"), SHAPES)
def test_fast_weights_with_little_or_nothing_to_read(batch, tokens, apart, keeps):
    layer, x = build(per_sequence=apart).train(), inputs(batch, tokens).requires_grad_()
    y, state = layer(x, return_state=keeps)
    assert y.shape == x.shape and torch.isfinite(y).all()
    if keeps:
        again, _ = layer(inputs(batch, 2), state)
        assert again.shape == (batch, 2, 8)
    if keeps and not apart:
        assert torch.equal(state.values, layer.values), "no chunk is complete"
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in layer.parameters())
    layer.adopt()
    assert torch.equal(layer.values, build().values) and torch.equal(layer.keys, build().keys)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize(("batch", "tokens"), SHAPES)
def test_a_trained_table_with_little_or_nothing_to_read(batch, tokens, sparse, gated):
    layer, x = pkm(gated=gated, sparse_gradients=sparse), inputs(batch, tokens).requires_grad_()
    y = layer(x)
    assert y.shape == x.shape
    y.sum().backward()
    gradient = layer.values.grad.to_dense()
    assert x.grad.shape == x.shape and torch.isfinite(gradient).all()
    assert bool(gradient.any()) == bool(batch * tokens)


@pytest.mark.parametrize("pairs", ["drop", "carry", "wrap"])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_batch_that_is_all_masked_writes_nothing_and_trains(keeps, pairs):
    layer, x = build(pairs=pairs).train(), inputs(2, 12).requires_grad_()
    y, _ = layer(x, mask=torch.zeros(2, 12, dtype=torch.bool), return_state=keeps)
    y.sum().backward()
    assert torch.isfinite(x.grad).all() and x.grad.any()
    layer.adopt()
    assert torch.equal(layer.values, build().values) and torch.equal(layer.keys, build().keys)


def test_a_nan_stays_with_its_token_and_what_that_writes():
    layer, x = build(per_sequence=True), inputs(2, 12)
    clean, bad = layer(x)[0], x.clone()
    bad[0, 1] = torch.nan
    y = layer(bad)[0]
    hurt = y.isnan().any(-1)
    assert hurt[0, :5].tolist() == [False, True, False, False, False], "the rest of its chunk reads the entry weights"
    assert torch.equal(y[0, :5][~hurt[0, :5]], clean[0, :5][~hurt[0, :5]])
    assert torch.equal(y[1], clean[1]), "the other sequence's every bit"
    masked = torch.ones(2, 12, dtype=torch.bool)
    masked[0, 1] = False
    y, wanted = layer(bad, mask=masked)[0], layer(x, mask=masked)[0]
    assert y.isnan().any(-1).sum() == 1, "masked, it reaches no other token"
    assert torch.equal(y[masked], wanted[masked])


def test_a_nan_reaches_no_other_token_of_a_trained_table():
    layer, x = pkm(), inputs(2, 5)
    clean, bad = layer(x), x.clone()
    bad[0, 1] = torch.nan
    y, others = layer(bad), torch.ones(2, 5, dtype=torch.bool)
    others[0, 1] = False
    assert y[0, 1].isnan().all() and torch.equal(y[others], clean[others])
