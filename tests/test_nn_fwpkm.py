"""The fast-weight memory layer against its equations in plain torch, its states, and its place in a model."""

import copy

import naive_fwpkm as naive
import pytest
import torch
import torch.nn.functional as F
from fwpkm_layers import EXACT, SIZES, build, inputs

from sdm_lite import FwPKMState, idw_product_key_topk
from sdm_lite.errors import DtypeError, ShapeError, ValueRangeError
from sdm_lite.nn import (
    FwPKM,
    HybridLM,
    HybridState,
    carry_fast_weights,
    flops_per_token,
    hidden_matrices,
    parameter_counts,
    state_elements,
)

OPTIONS = {
    "published": {},
    "heads": {"num_heads": 2},
    "carry": {"pairs": "carry", "scale": "paper"},
    "wrap": {"pairs": "wrap", "scale": "code", "value_rate": 0.3},
    "no_lookahead": {"lookahead": 0},
    "values_only": {"key_rate": 0.0},
    "ungated_writes": {"gated_writes": False},
    "detached": {"detach_every": 1},
    "mse_to_keys": {"mse_to_keys": True, "pairs": "carry", "num_heads": 2},
}


def rms(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight


def equations(layer, x, mask=None, **changes):
    """(y, keys, values) of the layer's definition, with one memory for the batch."""
    options = {**layer.options, **changes}
    q = rms(x, layer.query_norm) @ layer.Wq.weight.T + layer.Wq.bias
    a = rms(x, layer.value_norm) @ layer.Wv.weight.T + layer.Wv.bias
    centred = a - a.mean(-1, keepdim=True)
    v = centred / ((centred.square().sum(-1, keepdim=True) / (a.shape[-1] - 1)).sqrt() + 1e-6)
    g = (rms(x, layer.gate_norm) @ layer.Wgate.weight.T + layer.Wgate.bias)[..., 0].sigmoid()
    mask = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    writes = g if layer.gated_writes else torch.ones_like(g)
    q = q.unflatten(-1, (layer.num_heads, -1))
    read, keys, values = naive.stream(q, v, writes, mask, layer.keys, layer.values, **options)
    o = g[..., None] * read + (1 - g[..., None]) * v
    return rms(o, layer.output_norm) @ layer.Wo.weight.T + layer.Wo.bias, keys, values


@pytest.mark.parametrize("name", OPTIONS)
def test_layer_is_its_equations_with_slow_gradients_through_the_writes(name):
    layer, x = build(**OPTIONS[name]), inputs(2, 13).requires_grad_()
    direction = inputs(2, 13, seed=2)
    y, state = layer(x)
    wanted, keys, values = equations(layer, x)
    torch.testing.assert_close(y, wanted, **EXACT)
    torch.testing.assert_close(state.keys, keys.detach(), **EXACT)
    torch.testing.assert_close(state.values, values.detach(), **EXACT)
    assert not torch.equal(state.values, layer.values), "two chunks were written"
    leaves = [x, *layer.parameters()]
    ours, theirs = (torch.autograd.grad((one * direction).sum(), leaves) for one in (y, wanted))
    for one, other in zip(ours, theirs):
        # through two writes: further sums of sums
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_gradients_do_flow_through_the_writes():
    """The third chunk depends on the first one's tokens through fast weights alone; detached, it does not."""
    for detach_every, reaches in ((None, True), (1, False)):
        layer, x = build(detach_every=detach_every), inputs(1, 13).requires_grad_()
        (gradient,) = torch.autograd.grad(layer(x)[0][:, 10:].sum(), x)
        assert bool(gradient[:, :5].any()) == reaches


def test_no_token_sees_the_future():
    layer, x = build(), inputs(2, 13)
    y = layer(x)[0]
    changed = x.clone()
    changed[:, 9] += 1
    again = layer(changed)[0]
    assert torch.equal(again[:, :9], y[:, :9]) and not torch.allclose(again[:, 9:], y[:, 9:])


def test_per_sequence_does_not_depend_on_batch_mates_and_shared_does():
    x = inputs(3, 12)
    for apart in (True, False):
        layer = build(per_sequence=apart)
        y, state = layer(x)
        alone = torch.cat([layer(x[i : i + 1])[0] for i in range(3)])
        torch.testing.assert_close(alone[:, :5], y[:, :5], **EXACT)  # before the first write
        assert torch.allclose(alone[:, 5:], y[:, 5:]) == apart
        assert state.keys.ndim == (5 if apart else 4)


def test_training_mode_shares_and_eval_mode_does_not():
    layer, x = build(), inputs(2, 3)
    assert not layer.train()(x)[1].per_sequence and layer.eval()(x)[1].per_sequence


@pytest.mark.parametrize("cuts", [(13,), (1,) * 13, (5, 5, 3), (4, 0, 2, 7)], ids=str)
@pytest.mark.parametrize("pairs", ["drop", "carry", "wrap"])
@pytest.mark.parametrize("apart", [True, False])
def test_a_state_carried_over_calls_equals_one_call(cuts, pairs, apart):
    layer, x = build(pairs=pairs, per_sequence=apart), inputs(2, 13)
    with torch.no_grad():
        whole, end = layer(x)
        state, pieces = None, []
        for part in x.split(list(cuts), dim=1):
            y, state = layer(part, state)
            pieces.append(y)
    # matrix products of other sizes round differently; the op itself gives the same bits
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **EXACT)
    torch.testing.assert_close(state.values, end.values, **EXACT)
    torch.testing.assert_close(state.keys, end.keys, **EXACT)


def test_without_update_nothing_is_written_and_a_state_stays_as_it_is():
    layer, x = build(), inputs(2, 12)
    _, state = layer(x)
    before = state.keys.clone(), state.values.clone(), state.position
    y, after = layer(inputs(2, 12, seed=3), state, update=False)
    assert torch.equal(after.values, before[1]) and after.position == before[2]
    moved, moved_state = layer(inputs(2, 12, seed=3), state)
    assert not torch.equal(moved_state.values, before[1])
    assert torch.equal(state.keys, before[0]) and torch.equal(state.values, before[1])
    # until the open chunk closes (12 = 2 chunks and 2 tokens) reading and writing calls read the same
    assert torch.equal(moved[:, :3], y[:, :3]) and not torch.equal(moved, y)


def test_masked_tokens_do_not_write():
    layer, x = build(), inputs(2, 10)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, 1:4] = mask[1, 7] = False
    y, state = layer(x, mask=mask)
    wanted, keys, values = equations(layer, x, mask)
    torch.testing.assert_close(y, wanted, **EXACT)
    torch.testing.assert_close(state.values, values.detach(), **EXACT)
    torch.testing.assert_close(state.keys, keys.detach(), **EXACT)
    _, state = layer(x, mask=torch.zeros_like(mask))
    assert torch.equal(state.values, layer.values) and torch.equal(state.keys, layer.keys)


def test_addresses_are_what_the_next_token_reads():
    layer, x = build(num_heads=2), inputs(2, 12)
    _, state = layer(x)
    for keys, found in ((layer.keys, layer.addresses(x)), (state.keys, layer.addresses(x, state))):
        wanted = idw_product_key_topk(layer.queries(x), keys, 3)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    apart = layer.eval()(x)[1]
    weights, slots = layer.addresses(x, apart)
    wanted = idw_product_key_topk(layer.queries(x)[1], apart.keys[1], 3)
    assert torch.equal(weights[1], wanted[0]) and torch.equal(slots[1], wanted[1])


def test_initialisation_follows_the_page():
    torch.manual_seed(0)
    layer = FwPKM(64, sub_keys=32, key_dim=64, value_dim=16)
    bound = 64**-0.5
    assert 0.99 * bound < layer.keys.abs().max() <= bound
    # thousands of draws: a standard deviation is known to a few per cent
    assert abs(layer.values.std() / 16**-0.5 - 1) < 0.05 and abs(layer.Wq.weight.std() / 0.02 - 1) < 0.05
    assert not any(linear.bias.any() for linear in (layer.Wq, layer.Wv, layer.Wgate, layer.Wo))


def test_state_dict_holds_the_fast_weights_which_are_no_parameters():
    layer, fast = build(), {"keys", "values"}
    assert fast <= set(layer.state_dict()) and not fast & set(dict(layer.named_parameters()))
    twin = FwPKM(8, **SIZES).double()
    twin.load_state_dict(layer.state_dict(), strict=True)
    x = inputs(2, 11)
    assert torch.equal(twin(x)[0], layer(x)[0]) and torch.equal(copy.deepcopy(layer)(x)[0], layer(x)[0])


def test_half_precision_keeps_the_fast_weights_wide():
    layer = FwPKM(8, **SIZES)
    before = layer.values.clone()
    layer.bfloat16()
    assert layer.Wq.weight.dtype == torch.bfloat16
    assert layer.values.dtype == torch.float32 and torch.equal(layer.values, before)
    y, state = layer(inputs(2, 12).bfloat16())
    assert y.dtype == torch.bfloat16 and state.values.dtype == torch.float32


def test_autocast_computes_the_memory_in_float32():
    layer, x = build().float(), inputs(2, 12).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = layer(x)
        assert layer.queries(x).dtype == layer.targets(x).dtype == torch.float32
    assert y.dtype == torch.bfloat16 and state.values.dtype == torch.float32
    y.sum().backward()
    assert torch.isfinite(x.grad).all()


# ---------------------------------------------------------------- in the language model

VOCAB = 11
MODEL = {"layers": ["conv", "sdm"], "slots_per_head": 16, "num_writes": 4, "num_reads": 4}
MEMORY = {"memory": ["fwpkm@1,2", "pkm@2"], "options": {"fwpkm": SIZES, "pkm": {"sub_keys": 4, "k": 2, "key_dim": 4}}}


def model(**options):
    torch.manual_seed(0)
    return HybridLM(VOCAB, 8, 2, **{**MODEL, **MEMORY, **options}).double()


def prompt(batch, tokens):
    return torch.randint(VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(1))


def test_it_stands_before_the_mixer():
    lm, ids = model(memory=["fwpkm@1"], layers=["conv", "conv"]).eval(), prompt(2, 7)
    block, x = lm.blocks[0], lm.embedding(ids)
    x = x + block.fwpkm(x)[0]
    x = x + block.mixer(block.mixer_norm(x))[0]
    x = x + block.mlp(block.mlp_norm(x))
    torch.testing.assert_close(block(lm.embedding(ids), None, None, False, False)[0], x, **EXACT)
    assert lm.blocks[1].fwpkm is None


def test_a_model_with_memories_round_trips_and_goes_on_from_its_state():
    lm, ids = model().eval(), prompt(2, 17)
    twin = HybridLM(**lm.config).double().eval()
    twin.load_state_dict(lm.state_dict(), strict=True)
    whole = lm(ids)
    assert torch.equal(twin(ids), whole)
    state, pieces = HybridState(), []
    for part in ids.split([6, 1, 1, 9], dim=1):
        logits, state = lm(part, state)
        pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-6, atol=1e-9)
    assert state.layers[0].fast.position == (17, 17)
    frozen, after = lm(ids, state, update=False)
    assert torch.equal(after.layers[0].fast.values, state.layers[0].fast.values)
    out = lm.generate(ids[:, :4], 5)
    for length in range(4, 9):  # decoding token by token, from states, is the forward pass
        assert torch.equal(lm(out[:, :length])[:, -1].argmax(-1), out[:, length])


def test_a_model_with_fast_weights_learns_and_carries_them():
    torch.manual_seed(0)
    sizes = {**SIZES, "sub_keys": 8, "key_dim": 16, "value_dim": 16, "chunk": 8}
    lm = HybridLM(VOCAB, 16, 1, layers=["conv"], memory="fwpkm@1", options={"fwpkm": sizes}, embedding_std=0.5)
    start = lm.blocks[0].fwpkm.values.clone()
    text = prompt(1, 8).repeat(4, 4)
    optimizer, losses = torch.optim.AdamW(lm.parameters(), lr=1e-2), []
    for _ in range(40):
        loss = F.cross_entropy(lm(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        carry_fast_weights(lm)
    # from at least ln 11 = 2.4 nats; after four tokens the continuation is certain
    assert losses[0] > 2.3 and losses[-1] < 1.0
    assert not torch.equal(lm.blocks[0].fwpkm.values, start)
    assert all(p.grad is not None for p in lm.blocks[0].fwpkm.parameters())


def test_accounting():
    common = {"vocab_size": VOCAB, "dim": 8, "num_layers": 1, "layers": ["conv"]}
    plain, lm = HybridLM(**common), HybridLM(**common, memory=["fwpkm@1"], options={"fwpkm": {**SIZES, "num_heads": 2}})
    # projections to 12, 7, 1 and from 7; 2 x 2 x 4 sub-keys 3 wide; 6 rows of 7 three times; 2 x 2 x 3 sub-keys moved
    flops = 2 * (8 * (12 + 7 + 1 + 7) + 2 * 2 * 4 * 3 + 3 * 6 * 7 + 2 * 2 * 3 * 3)
    assert flops_per_token(lm)["memory"] == flops == flops_per_token(lm.config)["memory"]
    assert flops_per_token(lm)["total"] == flops_per_token(plain)["total"] + flops
    state, before = state_elements(lm), state_elements(plain)
    assert state["recurrent"] - before["recurrent"] == 2 * 2 * 4 * 3 + 16 * 7 + 4 * (12 + 7 + 1)
    assert state["access"] - before["access"] == 6 * 7
    assert parameter_counts(lm)["memory"] == 0
    assert parameter_counts(lm)["total"] == sum(p.numel() for p in lm.parameters())
    assert not any(p is lm.blocks[0].fwpkm.Wgate.weight for p in hidden_matrices(lm)[0])


# ---------------------------------------------------------------- mistakes

MISTAKES = {
    "sub_keys": {"sub_keys": 0},
    "num_heads": {"num_heads": 0},
    "k: expected 1 to": {"k": 17},
    "key_dim": {"key_dim": 3},
    "value_dim": {"value_dim": 1},
    "chunk": {"chunk": 1},
    "lookahead": {"lookahead": -1},
    "pairs": {"pairs": "all"},
    "scale": {"scale": "none"},
    "per_sequence": {"per_sequence": "yes"},
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_say_what_and_how_to_fix(text):
    with pytest.raises(ValueRangeError, match=text) as caught:
        FwPKM(8, **{**SIZES, **MISTAKES[text]})
    assert "expected" in str(caught.value) and "Fix:" in str(caught.value)


@pytest.mark.parametrize(
    "memory", [["fwpkm"], ["fwpkm@0"], ["fwpkm@3"], ["fwpkm@1", "fwpkm@1"], ["pkm@x"], ["lstm@1"], ["pkm@1,,2"], [3]]
)
def test_wrong_places_are_named(memory):
    with pytest.raises(ValueRangeError, match=r"HybridLM: memory: expected .* Fix:"):
        model(memory=memory)


@pytest.mark.parametrize(
    "wrong", [{"dim": "a"}, {"k": 2.0}, {"sub_keys": True}, {"key_dim": 6.0}, {"chunk": 5.0}, {"num_heads": None}]
)
def test_sizes_are_whole_numbers(wrong):
    with pytest.raises(DtypeError, match=r"FwPKM: \w+: expected a whole number"):
        FwPKM(**{"dim": 8, **SIZES, **wrong})
    with pytest.raises(ValueRangeError, match="FwPKM: epsilon"):
        FwPKM(8, **SIZES, epsilon=0.0)


def test_addresses_follow_the_states_sequences():
    layer, x = build(per_sequence=True), inputs(2, 7)
    fresh, (_, state) = layer.new_state(), layer(x)
    for got, want in zip(layer.addresses(x, fresh), layer.addresses(x)):
        assert torch.equal(got, want)
    weights, slots = layer.addresses(x, state)
    for i, own in enumerate(state.keys):
        one = idw_product_key_topk(layer.queries(x)[i], own, layer.k, epsilon=layer.options["epsilon"])
        assert torch.equal(weights[i], one[0]) and torch.equal(slots[i], one[1])
    with pytest.raises(ShapeError, match="x: expected B = 2, the sequences of the state"):
        layer.addresses(inputs(3, 7), state)
    with pytest.raises(ShapeError, match="x: expected"):
        layer.addresses(torch.zeros(2, 7, 9).double())
    with pytest.raises(DtypeError, match="state: expected an FwPKMState"):
        layer.addresses(x, {})
    assert layer.addresses(inputs(0, 7), state.fork([]))[1].shape == (0, 7, 1, 3)


def test_wrong_inputs_and_states_are_named():
    layer = build()
    with pytest.raises(ShapeError, match="x: expected"):
        layer(torch.zeros(2, 8).double())
    with pytest.raises(DtypeError, match="state: expected an FwPKMState"):
        layer(inputs(1, 2), HybridState())
    _, state = layer(inputs(2, 3))
    with pytest.raises(ShapeError, match="sequences of this state"):
        layer(inputs(3, 3), state)
    other = FwPKMState(torch.zeros(1, 2, 4, 5).double(), torch.zeros(16, 7).double())
    with pytest.raises(ShapeError, match="queries"):
        layer(inputs(2, 3), other)
    with pytest.raises(ShapeError, match="mask"):
        layer(inputs(2, 3), mask=torch.ones(2, 4, dtype=torch.bool))
