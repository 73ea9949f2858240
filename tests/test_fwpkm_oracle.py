"""Fast-weight product keys against their definition: brute force, autograd of the local losses, properties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fwpkm_cases import make_mask, make_stream
from naive_fwpkm import address_loss, read, stream, write
from tolerances import relative_error, tolerance

import sdm_lite
from sdm_lite import FwPKMState, fwpkm, rooms
from sdm_lite import fwpkm_equations as eq

BACKENDS = ["reference", "cpu"]
EPSILON = 1e-3
PLAIN = {"k": 3, "lookahead": 1, "pairs": "drop", "scale": "norm", "value_rate": 1.0, "key_rate": 1.0}


def torch_of(*arrays):
    return [torch.tensor(x) for x in arrays]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    ("H", "m", "half", "k", "T"), [(1, 4, 3, 5, 9), (3, 6, 5, 8, 9), (2, 3, 1, 9, 4), (2, 40, 17, 4, 40)]
)
def test_retrieval_is_brute_force_over_all_slots(H, m, half, k, T, dtype, backend):
    x = make_stream(B=2, T=T, H=H, m=m, half=half, dtype=dtype)
    weights, slots = sdm_lite.idw_product_key_topk(x.queries, x.keys, k, backend=backend)
    halves = x.queries.astype(np.float64).reshape(2, T, H, 2, 1, half)
    inverse = 1 / (EPSILON + np.square(halves - x.keys.astype(np.float64)).sum(-1))
    products = (inverse[:, :, :, 0, :, None] * inverse[:, :, :, 1, None, :]).reshape(2, T, H, m * m)
    best = np.sort(np.argsort(-products, axis=-1, kind="stable")[..., :k], axis=-1)
    np.testing.assert_array_equal(slots, best)
    chosen = np.take_along_axis(products, best, -1)
    assert relative_error(weights, chosen / chosen.sum((2, 3), keepdims=True)) <= tolerance(
        "product_keys", dtype.__name__
    )
    assert weights.dtype == dtype and slots.dtype == np.int32


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_lowest_slot(backend):
    # all sub-keys alike: every sum ties; a batch large enough to be screened, and one token
    for tokens in (1, 70):
        found = sdm_lite.idw_product_key_topk(
            np.ones((tokens, 1, 4), np.float32), np.zeros((1, 2, 30, 2), np.float32), 3, backend=backend
        )
        np.testing.assert_array_equal(found[1], np.broadcast_to([0, 1, 2], (tokens, 1, 3)))
        np.testing.assert_allclose(found[0], 1 / 3, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_on_a_large_key_is_found_with_its_exact_distance(backend):
    # |q|^2 - 2 q K + |K|^2 in float32 is off by whole units here; differences are exact
    rng = np.random.default_rng(0)
    keys = (100 * rng.standard_normal((1, 2, 64, 8))).astype(np.float32)
    queries = np.concatenate([keys[0, 0], keys[0, 1]], axis=-1)[:, None]
    found = rooms.room(backend, "test").idw_product_key_topk_forward(queries, keys, 1, EPSILON)
    np.testing.assert_array_equal(found.slots.ravel(), np.arange(64) * 65)
    np.testing.assert_array_equal(found.distances, np.float32(EPSILON))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", ["norm", "paper", "code"])
@pytest.mark.parametrize("pairs", ["drop", "carry", "wrap"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("mse_to_keys", [False, True])
def test_writes_are_the_gradients_of_the_local_losses(mse_to_keys, dtype, pairs, scale, backend):
    exact = make_stream(T=8, m=5)
    mask = make_mask((2, 8))
    x = exact.astype(dtype)
    options = {**PLAIN, "pairs": pairs, "scale": scale, "mse_to_keys": mse_to_keys}
    _, state = fwpkm(*x.call, FwPKMState(x.keys, x.table), chunk=4, mask=mask, backend=backend, **options)
    # the float64 oracle on the rounded numbers, so that only arithmetic differs
    rounded = torch_of(*x.astype(np.float64)[:3], mask, *x.astype(np.float64)[3:])
    keys, table = (a.detach() for a in stream(*rounded, chunk=4, epsilon=EPSILON, **options)[1:])
    for got, want, start in ((state.keys, keys, x.keys), (state.values, table, x.table)):
        change = np.abs(want.numpy() - start).max()
        assert change > 0.01, "the write has to be seen"
        assert np.abs(got - want.numpy()).max() <= tolerance("fwpkm", np.dtype(dtype).name) * change


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rate", ["value_rate", "key_rate"])
def test_a_rate_of_zero_leaves_its_weights_bit_for_bit(rate, backend):
    x = make_stream(T=4)
    _, state = fwpkm(*x.call, FwPKMState(x.keys, x.table), k=3, chunk=4, backend=backend, **{rate: 0.0})
    same_values, same_keys = (a.tobytes() == b.tobytes() for a, b in ((state.values, x.table), (state.keys, x.keys)))
    assert (same_values, same_keys) == (rate == "value_rate", rate == "key_rate")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_small_key_step_raises_the_marginal_entropy(backend):
    x = make_stream(B=1, T=64, m=8)
    queries, keys = torch_of(x.queries[0], x.keys)

    def entropy(keys):
        return -float(address_loss(read(queries, keys, torch.zeros(64, 1).double(), 3, EPSILON)[3], 3))

    for rate in (1e-3, 1e-2):
        _, state = fwpkm(*x.call, FwPKMState(x.keys, x.table), k=3, chunk=64, key_rate=rate, backend=backend)
        assert entropy(torch.tensor(state.keys)) > entropy(keys)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_values_loss_moves_keys_when_asked_and_falls_by_it(backend):
    x = make_stream(B=1, T=32, m=8)
    options = {"k": 3, "chunk": 32, "value_rate": 0.0, "key_rate": 1e-3, "scale": "paper", "backend": backend}
    found = {
        flag: fwpkm(*x.call, FwPKMState(x.keys, x.table), mse_to_keys=flag, **options)[1] for flag in (False, True)
    }

    def loss(state):
        read_again, _ = fwpkm(*x.call, state, **{**options, "chunk": 33})
        return (x.gates[:, :-1] * np.square(x.values[:, 1:] - read_again[:, :-1]).sum(-1)).sum() / 2

    assert all(state.values.tobytes() == x.table.tobytes() for state in found.values())
    assert loss(found[True]) < loss(FwPKMState(x.keys, x.table))
    assert loss(found[True]) < loss(found[False])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_with_slots_of_its_own_closes_the_gates_share_of_its_error(backend):
    # C = 2, and the second token's query is far away: the first token's slots are read once
    x = make_stream(B=1, T=2, H=1, m=8)
    keys = x.keys.copy()
    keys[:, :, 4:] += 50
    queries = x.queries.copy()
    queries[0, 1] += 50
    gate = np.full((1, 2), 0.6)
    before = FwPKMState(keys, x.table)
    old, after = fwpkm(queries, x.values, gate, before, k=4, chunk=2, key_rate=0.0, backend=backend)
    new, _ = fwpkm(queries, x.values, gate, after, k=4, chunk=2, update=False, backend=backend)
    want = old[0, 0] + 0.6 * (x.values[0, 1] - old[0, 0])
    np.testing.assert_allclose(new[0, 0], want, rtol=0, atol=1e-14 * np.abs(want).max() * 10)


@pytest.mark.parametrize("scale", ["norm", "paper"])
@pytest.mark.parametrize("spread", [0.05, 1.0, 5.0])
def test_a_write_never_amplifies_errors(scale, spread):
    # sqrt(Gamma) S D^-1 S^T sqrt(Gamma) with Gamma = c g: eigenvalues in [0, max g]
    x = make_stream(B=1, T=40, H=2, m=6)
    weights, slots = sdm_lite.idw_product_key_topk(spread * x.queries, x.keys, 4)
    flat = weights.reshape(40, 8)
    matrix = np.zeros((40, 36))
    np.add.at(matrix, (np.arange(40)[:, None], slots.reshape(40, 8)), flat)
    counts = np.bincount(slots.ravel(), minlength=36).clip(1)
    root = np.sqrt(eq.step_factor(flat, scale) * x.gates[0])[:, None]
    eigenvalues = np.linalg.eigvalsh((root * matrix / counts) @ (root * matrix).T)
    assert eigenvalues.min() > -1e-12
    assert eigenvalues.max() <= x.gates.max() + 1e-12


def test_step_factors():
    weights = np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    assert eq.step_factor(weights, "norm").tolist() == [2.0, 1.0]
    assert eq.step_factor(weights, "paper").tolist() == [1.0, 1.0]
    assert eq.step_factor(weights, "code").tolist() == [3.0, 3.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pairs", ["drop", "carry", "wrap"])
def test_a_masked_token_is_as_good_as_absent_from_the_losses(pairs, backend):
    x = make_stream(B=1, T=6)
    mask = np.ones((1, 6), bool)
    mask[0, [0, 3]] = False
    _, state = fwpkm(*x.call, FwPKMState(x.keys, x.table), k=3, chunk=6, mask=mask, pairs=pairs, backend=backend)
    queries, values, gates = torch_of(*x.call)
    keys, table = torch_of(x.keys, x.table)
    # by hand: the pairs that are left, and the tokens that are left for counts and marginal
    left = [(1, 2), (4, 5)]
    table_leaf = table.clone().requires_grad_()
    source = [s for s, _ in left]
    retrieved, weights, _, _ = read(queries[0, source], keys, table_leaf, 3, EPSILON)
    factor = 1 / weights.flatten(1).square().sum(-1)
    error = values[0, [t for _, t in left]] - retrieved
    (0.5 * (factor * gates[0, source])[:, None] * error.square()).sum().backward()
    slots = read(queries[0, [1, 2, 4, 5]], keys, table, 3, EPSILON)[2]
    counts = torch.bincount(slots.flatten(), minlength=16).clamp(min=1)
    assert relative_error(state.values, table - table_leaf.grad / counts[:, None]) <= 1e-14
    leaf = keys.clone().requires_grad_()
    address_loss(read(queries[0, [1, 2, 4, 5]], leaf, table, 3, EPSILON)[3], 3).backward()
    assert relative_error(state.keys, keys - leaf.grad) <= 1e-14


def test_value_step_derivatives_are_those_of_the_definition():
    # section by section: dtarget, dgate and the share of dw that runs through c_t, against autograd
    rng = np.random.default_rng(3)
    weights, gates, error = rng.dirichlet(np.ones(6), 4), rng.uniform(0.2, 0.9, 4), rng.standard_normal((4, 5))
    upstream = rng.standard_normal((4, 5))
    for scale in ("norm", "paper", "code"):
        w, g, e = (torch.tensor(a, requires_grad=True) for a in (weights, gates, error))
        factor = (
            1 / w.square().sum(1)
            if scale == "norm"
            else torch.full((4,), 1.0 if scale == "paper" else 6.0) + 0 * w.sum()
        )
        ((0.7 * factor * g)[:, None] * e * torch.tensor(upstream)).sum().backward()
        step = eq.ValueStep(0.7 * eq.step_factor(weights, scale), gates, error)
        derror, dgates, dweights = eq.value_step_backward(step, upstream, weights, scale)
        for got, want in ((derror, e.grad), (dgates, g.grad), (dweights, w.grad)):
            np.testing.assert_allclose(got, want.numpy(), atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_agrees_with_float64_where_slots_do(backend):
    x = make_stream(B=1, T=256, H=2, m=32, half=16)
    rounded = x.astype(np.float32)
    low = sdm_lite.idw_product_key_topk(rounded.queries, rounded.keys, 8, backend=backend)
    exact = rounded.astype(np.float64)
    high = sdm_lite.idw_product_key_topk(exact.queries, exact.keys, 8, backend=backend)
    same = (low[1] == high[1]).all((0, 2, 3))
    assert same.mean() > 0.95
    assert relative_error(low[0][:, same], high[0][:, same]) <= tolerance("product_keys", "float32")


def test_the_oracle_notices_a_wrong_write():
    # a write that is off by 0.1 % lies outside of every bound above
    x = make_stream(T=4)
    q, v, g, keys, table = torch_of(*x)
    options = {**PLAIN, "epsilon": EPSILON}
    want = write(q, v, g, torch.ones(2, 4, dtype=torch.bool), None, keys, table, **options)[1].detach()
    change = (want - table).abs().max()
    assert (0.001 * (want - table)).abs().max() > tolerance("fwpkm", "float32") * change
