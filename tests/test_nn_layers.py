"""The torch mixers against naive loops, their options, states, and what they say to mistakes."""

import copy

import naive_torch as naive
import pytest
import torch
from mixers import GDN_OPTIONS, MIXERS, SDM_OPTIONS, SIZES

from sdm_lite import sparse_delta_rule
from sdm_lite.errors import ShapeError
from sdm_lite.nn import (
    FullAttention,
    GatedDeltaNet,
    MixerState,
    ShortConv,
    SlidingWindowAttention,
    SparseDeltaMemory,
    gated_delta_rule,
    parameter_groups,
)

# float64 on both sides, sums of at most a few hundred terms in another order
EXACT = {"rtol": 1e-9, "atol": 1e-11}
# float32: the same sums, whose rounding is about 1e-7 a term, after norms that may enlarge it
SINGLE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def assert_same(f, g, inputs, tolerance=EXACT):
    """Outputs and all gradients of f and g agree, under one random upstream gradient."""
    y, expected = f(), g()
    torch.testing.assert_close(y, expected, **tolerance)
    upstream = torch.randn_like(y)
    got = torch.autograd.grad(y, inputs, upstream, allow_unused=True)
    wanted = torch.autograd.grad(expected, inputs, upstream, allow_unused=True)
    for x, one, two in zip(inputs, got, wanted):
        zero = torch.zeros_like(x)  # unused on one side is a zero gradient on the other
        torch.testing.assert_close(zero if one is None else one, zero if two is None else two, **tolerance)


# ---------------------------------------------------------------- sparse delta memory


@pytest.mark.parametrize("name", SDM_OPTIONS)
def test_sparse_layer_is_the_naive_loop(name):
    layer = SparseDeltaMemory(8, **SIZES, **SDM_OPTIONS[name]).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    assert_same(lambda: layer(x)[0], lambda: naive.sparse_layer(layer, x)[0], inputs)
    memory, expected = layer.eval()(x)[1].memory, naive.sparse_layer(layer, x)[1]
    torch.testing.assert_close(memory, expected, **EXACT)


def test_sparse_layer_in_single_precision():
    layer = SparseDeltaMemory(8, **SIZES, **SDM_OPTIONS["recipe"])
    x = torch.randn(2, 33, 8, requires_grad=True)
    inputs = [x, *layer.parameters()]
    assert_same(lambda: layer(x)[0], lambda: naive.sparse_layer(layer, x)[0], inputs, SINGLE)


def test_dense_limit_is_the_gated_delta_rule():
    """N = W = R = d_k with dense l2-normalised keys and a zero memory (spec section 4)."""
    B, T, H, N, D = 2, 13, 2, 6, 5
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, H, N, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(B, T, H, D, dtype=torch.float64)
    log_decay, beta = -torch.rand(B, T, H, dtype=torch.float64), torch.rand(B, T, H, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, log_decay, beta)]
    slots = torch.arange(N, dtype=torch.int32).expand(B, T, H, N)
    zero = torch.zeros(H, N, D, dtype=torch.float64)
    sparse = lambda: sparse_delta_rule(v, slots, k, log_decay, beta, slots, q, zero)[0]  # noqa: E731
    dense = lambda: gated_delta_rule(q, k, v, log_decay, beta, chunk=4)[0]  # noqa: E731
    assert_same(sparse, dense, inputs)


def test_published_checkpoint_loads_strictly():
    dim, heads, n = 12, 2, 4
    columns, width = heads * 2 * n, dim // heads
    shapes = {
        "Wq_read.weight": (columns, dim),
        "Wq_read.bias": (columns,),
        "Wk_write.weight": (columns, dim),
        "Wk_write.bias": (columns,),
        "Wv_write.weight": (dim, dim),
        "Wv_write.bias": (dim,),
        "a_proj.weight": (heads, dim),
        "a_proj.bias": (heads,),
        "b_proj.weight": (heads, dim),
        "b_proj.bias": (heads,),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "Wo.weight": (dim, dim),
        "Wo.bias": (dim,),
        "Wog.weight": (dim, dim),
        "Wog.bias": (dim,),
        "memory": (heads, n * n, width),
        "readings_norm.weight": (width,),
    }
    layer = SparseDeltaMemory(dim, num_heads=heads, slots_per_head=n * n, num_writes=3, num_reads=3, output_gate=True)
    published = {name: torch.randn(shape) for name, shape in shapes.items()}
    layer.load_state_dict(published, strict=True)
    assert torch.equal(layer.memory, published["memory"])
    plain = SparseDeltaMemory(dim, num_heads=heads, slots_per_head=n * n, num_writes=3, num_reads=3)
    assert set(shapes) - set(plain.state_dict()) == {"Wog.weight", "Wog.bias"}
    unlearned = SparseDeltaMemory(dim, slots_per_head=16, num_writes=3, num_reads=3, learn_memory=False)
    assert "memory" not in unlearned.state_dict() and not any("zero" in name for name in unlearned.state_dict())


def test_a_training_step_makes_no_copy_of_the_table():
    layer, x = SparseDeltaMemory(8, **SIZES), torch.randn(2, 5, 8)
    assert layer(x)[1] is None
    assert layer(x, return_state=True)[1].memory.shape == (2, 1, 16, 8)
    assert layer(x, MixerState())[1].position == 5
    assert layer.eval()(x)[1].memory.shape == (2, 1, 16, 8)
    assert layer(x, return_state=False)[1] is None


def test_reading_only_is_the_op_without_writes_and_leaves_the_memory():
    layer = SparseDeltaMemory(8, **SIZES, memory_init_std=0.5).eval()
    x = torch.randn(2, 5, 8)
    _, state = layer(x)
    layer.write = False
    before = state.memory.clone()
    y, after = layer(x, state)
    assert torch.equal(after.memory, before)
    again, _ = layer(x, state)
    assert torch.equal(y, again)  # a memory that no token changed
    assert not torch.allclose(y, layer(x)[0])  # it reads the state that was passed, not the initial memory


def test_hash_addressing_goes_by_position_unless_ids_are_given():
    layer = SparseDeltaMemory(8, **SIZES, addressing="hash").eval()
    x = torch.randn(2, 6, 8)
    positions = torch.arange(6).expand(2, 6)
    y, _ = layer(x)
    assert torch.equal(y, layer(x, ids=positions)[0])
    assert torch.equal(y, layer(x, ids=(positions, positions))[0])
    assert not torch.allclose(y, layer(x, ids=(positions, positions + 100))[0])
    with pytest.raises(ShapeError, match="ids"):
        layer(x, ids=positions[:, :3])


def test_decode_in_place_updates_the_passed_memory_only_when_asked():
    layer = SparseDeltaMemory(8, **SIZES).eval()
    with torch.no_grad():
        _, state = layer(torch.randn(2, 5, 8))
        before, x = state.memory.clone(), torch.randn(2, 1, 8)
        copied, after = layer(x, state)
        assert torch.equal(state.memory, before) and not torch.equal(after.memory, before)
        inplace, same = layer(x, state, inplace=True)
    assert same.memory is state.memory and torch.equal(state.memory, after.memory)
    assert torch.equal(copied, inplace)


def test_autocast_keeps_gates_and_memory_in_single_precision():
    layer = SparseDeltaMemory(8, **SIZES, **SDM_OPTIONS["recipe"]).eval()
    x = torch.randn(2, 7, 8)
    y, _ = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow, state = layer(x)
        narrow.float().square().mean().backward()
    assert state.memory.dtype == torch.float32
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in layer.parameters())
    # bf16 has 8 bits, and a projection rounded to it may select other slots: the same layer, not the same numbers
    assert (narrow - y).abs().mean() < 0.2 * y.abs().mean()


@pytest.mark.parametrize("kind", ["fla", "slow", "stratified"])
def test_decay_at_the_start(kind):
    layer = SparseDeltaMemory(64, **SIZES, num_heads=8, decay_init=kind)
    rate = (layer.A_log.exp() * torch.nn.functional.softplus(layer.dt_bias)).detach()
    if kind == "slow":
        torch.testing.assert_close(rate, torch.full_like(rate, 0.001))
    elif kind == "stratified":
        assert 0.001 < rate[0] < rate[-1] < 0.1 and bool((rate.diff() > 0).all())
    else:
        assert 0 < rate.min() and rate.max() <= 1.6 and rate.unique().numel() == 8


# ---------------------------------------------------------------- gated delta net


@pytest.mark.parametrize("name", GDN_OPTIONS)
@pytest.mark.parametrize("tokens", [1, 3, 4, 9])
def test_dense_layer_is_the_naive_loop(name, tokens):
    layer = GatedDeltaNet(8, head_k_dim=4, head_v_dim=6, chunk=4, **GDN_OPTIONS[name]).double()
    x = torch.randn(2, tokens, 8, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    assert_same(lambda: layer(x)[0], lambda: naive.dense_layer(layer, x)[0], inputs)
    torch.testing.assert_close(layer.eval()(x)[1].memory, naive.dense_layer(layer, x)[1], **EXACT)


def dense_call(tokens, dtype, log_decay=None):
    q, k = (torch.nn.functional.normalize(torch.randn(1, tokens, 2, 5, dtype=dtype), dim=-1) for _ in range(2))
    v, beta = torch.randn(1, tokens, 2, 3, dtype=dtype), torch.rand(1, tokens, 2, dtype=dtype)
    log_decay = -torch.rand(1, tokens, 2, dtype=dtype) if log_decay is None else log_decay
    return [x.requires_grad_() for x in (q, k, v, log_decay, beta, torch.randn(1, 2, 5, 3, dtype=dtype))]


@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 150])
def test_chunked_rule_is_the_token_loop(tokens):
    inputs = dense_call(tokens, torch.float64)
    assert_same(
        lambda: torch.cat([part.flatten() for part in gated_delta_rule(*inputs)]),
        lambda: torch.cat([part.flatten() for part in naive.gated_delta_rule(*inputs)]),
        inputs,
    )


@pytest.mark.parametrize("gate", [0.0, -88.0, -104.0, -1e4, -torch.inf])
def test_extreme_gates_stay_right(gate):
    log_decay = -0.01 * torch.rand(1, 70, 2)
    log_decay[:, [0, 5, 6, 40, 69]] = gate
    inputs = dense_call(70, torch.float32, log_decay)
    y, state = gated_delta_rule(*inputs)
    expected, last = naive.gated_delta_rule(*inputs)
    torch.testing.assert_close(y, expected, **SINGLE)
    torch.testing.assert_close(state, last, **SINGLE)
    gradients = torch.autograd.grad(y.sum() + state.sum(), inputs)
    assert all(bool(g.isfinite().all()) for g in gradients)
    if gate < -104:
        assert bool((gradients[3][:, [0, 5, 6, 40, 69]] == 0).all())


def test_empty_sequence_hands_the_state_through():
    *call, state = dense_call(3, torch.float32)
    y, after = gated_delta_rule(*(x[:, :0] for x in call), state)
    assert y.shape == (1, 0, 2, 3) and torch.equal(after, state)


# ---------------------------------------------------------------- convolution and attention


def test_short_conv_is_its_equation():
    conv, x = ShortConv(5, 4).double(), torch.randn(2, 7, 5, dtype=torch.float64, requires_grad=True)
    assert_same(lambda: conv(x)[0], lambda: naive.causal_conv(x, conv.weight), [x, conv.weight])
    assert bool((conv.weight[..., -2:] > 0.6).all()) and bool((conv.weight[..., :2].abs() <= 0.05).all())


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_window_attention_is_banded_dense_attention(tokens, groups):
    layer = SlidingWindowAttention(16, 4, groups, window=4).double()
    x = torch.randn(2, tokens, 16, dtype=torch.float64, requires_grad=True)
    # rotary angles are made in float32
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    assert_same(lambda: layer(x)[0], lambda: naive.attention_layer(layer, x), [x, *layer.parameters()], tolerance)


@pytest.mark.parametrize("rope", [True, False])
def test_full_attention_is_dense_attention(rope):
    layer = FullAttention(16, 4, 2, rope=rope).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if rope else EXACT
    assert_same(lambda: layer(x)[0], lambda: naive.attention_layer(layer, x), [x, *layer.parameters()], tolerance)


def test_attention_keeps_no_more_than_its_window():
    state = SlidingWindowAttention(8, 2, window=4).eval()(torch.randn(2, 50, 8))[1]
    assert state.keys.shape == (2, 2, 3, 4) and state.position == 50
    assert state.keys.untyped_storage().nbytes() == state.keys.numel() * 4  # a copy, not a view of 50 tokens


# ---------------------------------------------------------------- all mixers


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("cuts", [(5, 8), (1, 12), (0, 13), (4, 4, 1, 1, 3)])
def test_a_sequence_in_pieces_is_the_whole(name, cuts):
    layer = MIXERS[name]().double().eval()
    x = torch.randn(2, 13, 8, dtype=torch.float64)
    whole, end = layer(x)
    state, pieces = None, []
    for piece in x.split(list(cuts), 1):
        y, state = layer(piece, state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **EXACT)
    assert state.position == end.position == 13
    for attribute in ("memory", "keys", "values"):
        one, two = getattr(state, attribute), getattr(end, attribute)
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two, **EXACT)
    for tap in end.taps:
        torch.testing.assert_close(state.taps[tap], end.taps[tap], **EXACT)


@pytest.mark.parametrize("name", MIXERS)
def test_every_option_trains_and_copies(name):
    layer = MIXERS[name]()
    groups = parameter_groups(layer, 0.1)
    optimiser = torch.optim.AdamW(groups, lr=1e-2)
    x, target = torch.randn(4, 6, 8), torch.randn(4, 6, 8)
    losses = []
    for _ in range(8):
        loss = (layer(x)[0] - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x)[0], layer(x)[0])
    assert len(parameter_groups(twin, 0.1)[1]["params"]) == len(groups[1]["params"])
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    assert not torch.equal(next(twin.parameters()), next(layer.parameters()))


def test_gates_and_memories_do_not_decay():
    layer = SparseDeltaMemory(8, **SIZES)
    decayed, kept = (group["params"] for group in parameter_groups(layer, 0.1))
    assert {id(p) for p in decayed} == {
        id(p) for n, p in layer.named_parameters() if n.endswith(".weight") and p.ndim > 1
    }
    assert {id(layer.memory), id(layer.A_log), id(layer.dt_bias)} <= {id(p) for p in kept}


def test_states_can_be_mapped():
    _, state = SparseDeltaMemory(8, **SIZES, conv=4)(torch.randn(2, 5, 8), MixerState())
    cut = state.map(torch.Tensor.detach)
    assert state.memory.requires_grad and not cut.memory.requires_grad
    assert cut.position == 5 and set(cut.taps) == {"read", "write", "value"}


def test_decoding_in_place_never_writes_the_layers_own_memory():
    for learn in (False, True):
        layer = SparseDeltaMemory(8, slots_per_head=16, num_writes=4, num_reads=4, learn_memory=learn).eval()
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            layer.write = False
            _, state = layer(x)
            layer.write = True
            layer(x, state, inplace=True)
            assert not state.memory.eq(0).all() and layer.initial_memory().eq(0).all()
