"""Static Product Key Memory and the kit to train value tables, against plain loops and dense torch."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from sdm_lite.errors import DtypeError, ShapeError, SlotError, ValueRangeError
from sdm_lite.nn import (
    HybridLM,
    ProductKeyMemory,
    SlotUsage,
    clip_gradients,
    flops_per_token,
    hidden_matrices,
    parameter_counts,
    parameter_groups,
    value_tables,
)

# float64 on both sides, sums of at most a few hundred terms in another order
EXACT = {"rtol": 1e-10, "atol": 1e-12}

SIZES = {"sub_keys": 5, "num_heads": 3, "k": 4, "key_dim": 6}
OPTIONS = {
    "plus": {},
    "plain": {"gated": False},
    "plain_narrow": {"gated": False, "value_dim": 7},
    "narrow": {"value_dim": 7},
    "relu": {"weights": "relu"},
    "layer_norm": {"query_norm": "layer"},
    "no_norm": {"query_norm": None},
    "scalar_gate": {"scalar_gate": True},
    "one_slot": {"k": 1},
    "all_slots": {"k": 25},
}


def build(**options):
    torch.manual_seed(0)
    layer = ProductKeyMemory(10, **{**SIZES, **options}).double()
    with torch.no_grad():  # biases and gains that show when they are left out
        for parameter in layer.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def inputs(*shape):
    return torch.randn(*shape, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def brute_force(layer, x, options):
    """The layer over all n^2 slots, head by head and token by token."""
    q = F.linear(x, layer.Wq.weight, layer.Wq.bias)
    norm = options.get("query_norm", "rms")
    if norm == "rms":  # over all heads' features together
        q = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.query_norm.weight
    rows = []
    for token in q.reshape(-1, q.shape[-1]):
        total = torch.zeros(layer.values.shape[1], dtype=x.dtype)
        for head, query in enumerate(token.view(layer.num_heads, 2, -1)):
            if norm == "layer":  # of each half on its own
                deviation = query - query.mean(-1, keepdim=True)
                query = deviation / (deviation.square().mean(-1, keepdim=True) + 1e-5).sqrt()
                query = query * layer.query_norm.weight + layer.query_norm.bias
            first, second = (layer.keys[head, half] @ query[half] for half in (0, 1))
            scores = (first[:, None] + second[None, :]).flatten()
            best, slots = scores.topk(layer.k)
            weights = best.clamp(min=0) if options.get("weights") == "relu" else best.softmax(0)
            total = total + (weights[:, None] * layer.values[slots]).sum(0)
        rows.append(total)
    y = torch.stack(rows).view(*x.shape[:-1], -1)
    if options.get("gated", True):
        gate = F.linear(x, layer.Wg.weight, layer.Wg.bias)
        y = y * gate * gate.sigmoid()
    if layer.Wo is not None:
        y = y @ layer.Wo.weight.T + layer.Wo.bias
    if options.get("scalar_gate"):
        y = y * (x @ layer.scalar_gate.weight.T + layer.scalar_gate.bias).sigmoid()
    return y


@pytest.mark.parametrize("name", OPTIONS)
def test_layer_is_the_brute_force_over_all_slots_with_its_gradients(name):
    layer, x = build(**OPTIONS[name]), inputs(2, 7).requires_grad_()
    direction = torch.randn(2, 7, 10, dtype=torch.float64)
    results = []
    for function in (layer, lambda x: brute_force(layer, x, OPTIONS[name])):
        y = function(x)
        parameters = [x, *layer.parameters()]
        results.append([y, *torch.autograd.grad((y * direction).sum(), parameters)])
    for ours, wanted in zip(*results):
        torch.testing.assert_close(ours, wanted, **EXACT)
    assert results[0][1].abs().max() > 0


def test_initialisation_follows_the_page():
    torch.manual_seed(0)
    layer = ProductKeyMemory(64, sub_keys=32, num_heads=2, k=4, key_dim=64, value_dim=16)
    bound = 64**-0.5
    assert layer.keys.abs().max() <= bound and layer.keys.abs().max() > 0.99 * bound
    # 16,384 and 1,024 draws: a standard deviation is known to a few per cent
    assert abs(layer.values.std() / 16**-0.5 - 1) < 0.05
    assert abs(layer.Wo.weight.std() / 64**-0.5 - 1) < 0.1 and abs(layer.Wg.weight.std() / 64**-0.5 - 1) < 0.1
    assert layer.Wq.weight.abs().max() <= math.sqrt(6 / (64 + 128))
    assert all(not linear.bias.any() for linear in (layer.Wq, layer.Wo, layer.Wg))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0), (2, 3, 4)])
def test_any_leading_axes(shape):
    layer = build()
    x = inputs(*shape)
    assert layer(x).shape == x.shape
    if x.numel():
        torch.testing.assert_close(layer(x), brute_force(layer, x, {}), **EXACT)


def test_parameters_are_split_and_round_trip():
    layer = build(scalar_gate=True)
    assert layer.value_parameters() == [layer.values]
    assert {*map(id, layer.other_parameters()), id(layer.values)} == set(map(id, layer.parameters()))
    twin = ProductKeyMemory(10, **SIZES, scalar_gate=True).double()
    twin.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(twin(inputs(2, 3)), layer(inputs(2, 3)))
    assert torch.equal(copy.deepcopy(layer)(inputs(2, 3)), layer(inputs(2, 3)))


def test_autocast_keeps_selection_and_weights_in_float32():
    layer = build().float()
    x = inputs(2, 5).float()
    plain = layer.addresses(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, (weights, slots) = layer(x), layer.addresses(x)
    # the query projection is the product that autocast narrows; weights from it stay float32
    assert weights.dtype == torch.float32 and slots.dtype == torch.int32 and y.dtype == torch.bfloat16
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5, 3), rtol=1e-6, atol=0)
    torch.testing.assert_close(plain[0].sum(-1), torch.ones(2, 5, 3), rtol=1e-6, atol=0)


def test_compiled_equals_eager_and_checkpointing_changes_nothing():
    layer, x = build(), inputs(2, 5).requires_grad_()
    layer.usage = SlotUsage(25)
    wanted = torch.autograd.grad(layer(x).square().sum(), [x, layer.values])
    assert layer.usage.report().reads == 2 * 5 * 3 * 4
    y = checkpoint(layer, x, use_reentrant=False)
    again = torch.autograd.grad(y.square().sum(), [x, layer.values])
    # the recomputed forward is not counted a second time
    assert layer.usage.report().reads == 2 * (2 * 5 * 3 * 4)
    layer.usage = None
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    third = torch.autograd.grad(compiled(x).square().sum(), [x, layer.values])
    for a, b, c in zip(wanted, again, third):
        assert torch.equal(a, b)
        torch.testing.assert_close(c, a, **EXACT)


# ---------------------------------------------------------------- training kit


def test_sparse_gradients_are_the_dense_ones_on_the_rows_read():
    dense, sparse = build(), build(sparse_gradients=True)
    for layer in (dense, sparse):
        layer(inputs(2, 2)).square().sum().backward()
    assert sparse.values.grad.is_sparse
    torch.testing.assert_close(sparse.values.grad.to_dense(), dense.values.grad, **EXACT)
    rows = sparse.values.grad.coalesce().indices()[0]
    assert torch.equal(rows, dense.addresses(inputs(2, 2))[1].unique().long())


def test_sparse_adam_moves_only_rows_with_a_gradient():
    layer = build(sparse_gradients=True)
    optimizer = torch.optim.SparseAdam(layer.value_parameters(), lr=0.1)
    before, read = layer.values.detach().clone(), torch.zeros(25, dtype=torch.bool)
    for step in range(3):
        x = inputs(2, 1) + step
        read[layer.addresses(x)[1].flatten().long()] = True
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
    assert 0 < int(read.sum()) < 25
    assert torch.equal(layer.values[~read], before[~read])
    assert bool((layer.values[read] != before[read]).any(1).all())
    moments = optimizer.state[layer.values]["exp_avg"]
    assert not moments[~read].any() and bool(moments[read].any(1).all())


def test_value_tables_have_a_group_of_their_own():
    model = HybridLM(11, 8, 2, layers=["conv", "conv"], memory=["pkm@2"], options={"pkm": SIZES})
    table = model.blocks[1].mlp.values
    assert value_tables(model) == [table]
    decayed, kept, tables = parameter_groups(model, 0.1)
    assert tables["params"] == [table] and tables["lr"] == 1e-3 and tables["weight_decay"] == 0
    others = [id(p) for p in decayed["params"] + kept["params"]]
    assert id(table) not in others and len(others) + 1 == len(list(model.parameters()))
    assert not any(p is table for p in hidden_matrices(model)[0])
    table.requires_grad_(False)
    assert len(parameter_groups(model, 0.1)) == 2


@pytest.mark.parametrize("sparse", [False, True])
def test_clipping_is_separate(sparse):
    layer = build(sparse_gradients=sparse)
    (100 * layer(inputs(2, 3))).square().sum().backward()
    values = layer.values.grad.to_dense() if sparse else layer.values.grad.clone()
    others = torch.cat([p.grad.flatten() for p in layer.other_parameters()])
    norms = clip_gradients(layer, 1.0, value_max_norm=2.0)
    assert norms == pytest.approx((float(others.norm()), float(values.norm())), rel=1e-9) and min(norms) > 2
    clipped = layer.values.grad.to_dense() if sparse else layer.values.grad
    # clip_grad_norm_ adds 1e-6 to a norm of 1e3 and more
    torch.testing.assert_close(clipped, values * (2 / values.norm()), rtol=1e-8, atol=0)
    rest = torch.cat([p.grad.flatten() for p in layer.other_parameters()])
    torch.testing.assert_close(rest, others / others.norm(), rtol=1e-8, atol=0)
    clip_gradients(layer, 10.0)
    torch.testing.assert_close(layer.values.grad.to_dense() if sparse else layer.values.grad, clipped, rtol=0, atol=0)


def test_usage_report_is_counted_by_hand():
    usage = SlotUsage(8)
    assert usage.report()[:4] == (0, 0.0, 0.0, 0.0) and len(usage.report().dead) == 8
    usage.add(torch.tensor([[0, 0, 3], [0, 5, 3]]))
    usage.add(torch.tensor([7, 6]))
    report = usage.report()
    # counts 3 of slot 0, 2 of slot 3, 1 each of 5, 6, 7: 8 reads
    p = [3 / 8, 2 / 8, 1 / 8, 1 / 8, 1 / 8]
    assert report.reads == 8 and report.collision == 5 / 8 and report.coverage == 5 / 8
    assert report.divergence == pytest.approx(sum(x * math.log(8 * x) for x in p), rel=1e-12)
    assert report.dead.tolist() == [1, 2, 4]
    usage.reset()
    usage.add(torch.arange(8))
    assert usage.report()[:4] == (8, 0.0, 1.0, 0.0)
    with pytest.raises(SlotError, match="slots"):
        usage.add(torch.tensor([8]))
    assert usage.report().reads == 8
    with pytest.raises(ValueRangeError, match="num_slots"):
        SlotUsage(0)


# ---------------------------------------------------------------- in the language model


def test_it_takes_the_mlps_place_and_learns():
    torch.manual_seed(0)
    sizes = {"sub_keys": 8, "num_heads": 2, "k": 4, "key_dim": 8}
    model = HybridLM(11, 16, 2, layers=["conv", "conv"], memory=["pkm@1,2"], options={"pkm": sizes})
    assert all(isinstance(block.mlp, ProductKeyMemory) for block in model.blocks)
    twin = HybridLM(**model.config)
    twin.load_state_dict(model.state_dict(), strict=True)
    text = torch.randint(11, (1, 8), generator=torch.Generator().manual_seed(1)).repeat(4, 4)
    assert torch.equal(model(text), twin(text))
    optimizer, losses = torch.optim.AdamW(parameter_groups(model, 0.0), lr=1e-2), []
    for _ in range(40):
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # from about ln 11 = 2.4 nats; after four tokens the continuation is certain
    assert losses[0] > 2.0 and losses[-1] < 1.0


def test_accounting():
    sizes = {"sub_keys": 8, "num_heads": 2, "k": 4, "key_dim": 6, "value_dim": 12}
    common = {"vocab_size": 11, "dim": 16, "num_layers": 1, "layers": ["conv"], "mlp_hidden": 0}
    plain, model = HybridLM(**common), HybridLM(**common, memory=["pkm@1"], options={"pkm": sizes})
    # projections 16 -> 12 and 16 <-> 12, two heads' scores of 2 x 8 halves 3 wide, 8 rows of 12
    flops = 2 * (16 * 12 + 2 * 16 * 12 + 2 * 2 * 8 * 3 + 2 * 4 * 12)
    assert flops_per_token(model)["memory"] == flops == flops_per_token(model.config)["memory"]
    assert flops_per_token(model)["total"] == flops_per_token(plain)["total"] + flops
    counts = parameter_counts(model)
    assert counts["memory"] == 64 * 12 and counts["total"] == sum(p.numel() for p in model.parameters())


# ---------------------------------------------------------------- mistakes

MISTAKES = {
    "sub_keys: expected at least 1": {"sub_keys": 0},
    r"sub_keys: expected fewer than 2\^31 slots": {"sub_keys": 50_000},
    "num_heads": {"num_heads": 0},
    "k: expected 1 to": {"k": 26},
    "key_dim": {"key_dim": 5},
    "value_dim": {"value_dim": 0},
    "weights": {"weights": "sparsemax"},
    "query_norm": {"query_norm": "batch"},
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_say_what_and_how_to_fix(text):
    with pytest.raises(ValueRangeError, match=text) as caught:
        ProductKeyMemory(10, **{**SIZES, **MISTAKES[text]})
    assert "expected" in str(caught.value) and "Fix:" in str(caught.value)


@pytest.mark.parametrize("wrong", [{"dim": "a"}, {"dim": 8.0}, {"sub_keys": True}, {"k": 2.0}, {"value_dim": "4"}])
def test_sizes_are_whole_numbers(wrong):
    with pytest.raises(DtypeError, match=r"ProductKeyMemory: \w+: expected a whole number"):
        ProductKeyMemory(**{"dim": 10, **SIZES, **wrong})


def test_wrong_inputs_are_named():
    for wrong in (torch.zeros(2, 9), torch.zeros(())):
        with pytest.raises(ShapeError, match="x: expected"):
            build()(wrong.double())
