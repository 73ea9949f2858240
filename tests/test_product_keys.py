"""Retrieval, lookup and weighted sums of rows: rooms against each other, gradients, torch's embedding_bag, mistakes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import distinct_slots
from foreign import ForeignArray
from tolerances import assert_close

import sdm_lite
from sdm_lite import cpu, errors, reference
from sdm_lite.autograd import Tensor, check_grads

BACKENDS = ["reference", "cpu"]
DTYPES = [np.float32, np.float64]
#: tokens, heads, sub-keys, half width, k, D
SHAPES = [
    (7, 2, 4, 3, 3, 5),
    (0, 1, 3, 2, 2, 4),
    (70, 1, 40, 17, 5, 16),
    (100, 2, 64, 33, 8, 100),
    (130, 3, 3, 5, 9, 3),
    (65, 1, 30, 16, 20, 64),
    (1, 1, 1, 1, 1, 1),
]


def arrays_of(shape, dtype):
    n, heads, m, half, k, width = shape
    rng = np.random.default_rng([11, *shape])
    queries, keys = rng.standard_normal((n, heads, 2 * half)), rng.standard_normal((heads, 2, m, half))
    table, upstream = rng.standard_normal((m * m, width)), rng.standard_normal((n, width))
    return [x.astype(dtype) for x in (queries, keys, table, upstream)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rooms_agree(shape, dtype):
    queries, keys, table, upstream = arrays_of(shape, dtype)
    n, heads, m, _, k, _ = shape
    want, got = (room.idw_product_key_topk_forward(queries, keys, k, 1e-3) for room in (reference, cpu))
    np.testing.assert_array_equal(got.slots, want.slots)
    np.testing.assert_array_equal(got.columns, want.columns)
    rng = np.random.default_rng(0)
    rates = rng.standard_normal(want.distances.shape).astype(dtype)
    dkeys = rng.standard_normal(keys.shape).astype(dtype)
    slots, weights = want.slots.reshape(n, heads * k), want.weights.reshape(n, heads * k)
    pairs = [(got.weights, want.weights), (got.distances, want.distances)]
    doors = [
        ("distances_backward", (rates, queries, keys, want.columns)),
        ("key_step_forward", (rates, queries, keys, want.columns)),
        ("key_step_backward", (dkeys, rates, queries, keys, want.columns)),
        ("embedding_bag_forward", (table, slots, weights)),
        ("embedding_bag_backward", (upstream, slots, weights, m * m)),
        ("embedding_bag_weights_backward", (upstream, table, slots)),
        ("number_slots", (slots, m * m)),
    ]
    for name, arguments in doors:
        results = [getattr(room, name)(*arguments) for room in (cpu, reference)]
        results = [r if isinstance(r, tuple) else (r,) for r in results]
        pairs += [(*pair, name) for pair in zip(*results, strict=True)]
    for a, b, *what in pairs:
        assert a.dtype == b.dtype
        assert_close(a, b, "product_keys", np.dtype(dtype).name, what=str(what))


@pytest.mark.usefixtures("threads_at_any_size")
def test_doors_give_the_same_bits_for_any_thread_count(monkeypatch):
    queries, keys, table, upstream = arrays_of((130, 2, 40, 35, 6, 70), np.float32)
    results = []
    for threads in ("1", "3"):
        monkeypatch.setenv("SDM_LITE_NUM_THREADS", threads)
        found = cpu.idw_product_key_topk_forward(queries, keys, 6, 1e-3)
        slots, weights = found.slots.reshape(130, 12), found.weights.reshape(130, 12)
        step = (found.distances, queries, keys, found.columns)
        results.append(
            [
                *found,
                *cpu.distances_backward(*step),
                cpu.key_step_forward(*step),
                *cpu.key_step_backward(keys, *step),
                cpu.embedding_bag_forward(table, slots, weights),
                cpu.embedding_bag_backward(upstream, slots, weights, 1600),
                cpu.embedding_bag_weights_backward(upstream, table, slots),
            ]
        )
    assert [a.tobytes() for a in results[0]] == [a.tobytes() for a in results[1]]


def test_a_row_gets_the_same_bits_alone_and_screened_in_a_batch():
    queries, keys, *_ = arrays_of((200, 1, 64, 20, 5, 4), np.float32)
    queries[3] = np.nan
    queries[5, 0, :20] = np.inf
    keys[0, 0, 10:20] = keys[0, 0, 9]  # ties
    keys[0, 1] *= 1e-3
    batch = cpu.idw_product_key_topk_forward(queries, keys, 5, 1e-3)
    for t in (0, 3, 5, 7, 100, 199):
        alone = cpu.idw_product_key_topk_forward(queries[t : t + 1], keys, 5, 1e-3)
        assert all(a[0].tobytes() == b[t].tobytes() for a, b in zip(alone, batch))
    want = reference.idw_product_key_topk_forward(queries, keys, 5, 1e-3)
    np.testing.assert_array_equal(batch.slots[[3, 5]], want.slots[[3, 5]])
    # the second half's keys nearly coincide: rooms that sum in another order may name another of two equal distances
    assert (batch.slots == want.slots).all((1, 2)).mean() > 0.95
    assert np.isnan(batch.weights[3]).all() and np.isfinite(np.delete(batch.weights, [3, 5], 0)).all()


def hard_for_a_screen(kind, dtype):
    rng = np.random.default_rng(3)
    queries, keys = rng.standard_normal((70, 1, 80)), 0.3 * rng.standard_normal((1, 2, 100, 40))
    if kind == "ties":
        queries, keys = np.round(2 * queries), np.round(2 * keys)
        keys[:, :, 50:] = keys[:, :, :50]
    elif kind == "lost in epsilon":  # every distance rounds to epsilon: all are equal
        queries, keys = 1e-22 * queries, 1e-22 * keys
    elif kind == "not finite":
        queries[3], queries[5, 0, 1], queries[6], queries[7] = np.nan, np.inf, 1e18, 1e30
        keys[0, 0, 1], keys[0, 1, 2], keys[0, 0, 3, 0], keys[0, 1, :40] = np.nan, -np.inf, 1e30, np.nan
    elif kind == "on large keys":
        keys[:, :, ::7] *= 30
        queries[:, :, :40] = keys[0, 0, rng.integers(0, 100, (70, 1))]
    elif kind == "nearly equal keys":
        keys = 50 + keys[:, :, :1] + 1e-5 * keys
    return queries.astype(dtype), keys.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind", ["plain", "ties", "lost in epsilon", "not finite", "on large keys", "nearly equal keys"]
)
def test_the_screen_shows_in_no_bit(kind, dtype, monkeypatch):
    queries, keys = hard_for_a_screen(kind, dtype)
    for k in (1, 8, 60):
        screened = cpu.idw_product_key_topk_forward(queries, keys, k, 1e-3)
        with monkeypatch.context() as patch:
            patch.setattr(cpu.nearest, "SCREEN_FROM", len(queries) + 1)
            without = cpu.idw_product_key_topk_forward(queries, keys, k, 1e-3)
        assert [x.tobytes() for x in screened] == [x.tobytes() for x in without]


@pytest.mark.parametrize("backend", BACKENDS)
def test_retrieval_gradients_agree_with_differences(backend):
    queries, keys, *_ = arrays_of((6, 2, 3, 2, 9, 1), np.float64)  # every slot is selected: no kink
    check_grads(lambda q, keys: sdm_lite.idw_product_key_topk(q, keys, 9, backend=backend)[0], [queries, keys])


@pytest.mark.parametrize("backend", BACKENDS)
def test_lookup_is_brute_force_with_a_softmax_in_each_head(backend):
    queries, keys, *_ = arrays_of((20, 3, 7, 4, 6, 1), np.float64)
    queries = queries.reshape(4, 5, 3, 8)
    weights, slots = sdm_lite.product_key_lookup(queries, keys, 6, backend=backend)
    first, second = np.split(queries, 2, axis=-1)
    one, two = (np.einsum("bthd,hnd->bthn", q, keys[:, half]) for half, q in enumerate((first, second)))
    sums = (one[..., :, None] + two[..., None, :]).reshape(4, 5, 3, 49)
    best = np.sort(np.argsort(-sums, axis=-1, kind="stable")[..., :6], axis=-1)
    np.testing.assert_array_equal(slots, best)
    chosen = np.exp(np.take_along_axis(sums, best, -1))
    np.testing.assert_allclose(weights, chosen / chosen.sum(-1, keepdims=True), rtol=1e-12)


@pytest.mark.parametrize("kind", ["tape", "torch"])
def test_lookup_gradients(kind):
    queries, keys, *_ = arrays_of((5, 2, 3, 2, 9, 1), np.float64)
    if kind == "tape":
        check_grads(lambda q, keys: sdm_lite.product_key_lookup(q, keys, 9)[0], [queries, keys])
        return
    leaves = [torch.tensor(x, requires_grad=True) for x in (queries, keys)]
    assert torch.autograd.gradcheck(lambda q, keys: sdm_lite.product_key_lookup(q, keys, 9)[0], leaves, fast_mode=True)


# ---- weighted sums of rows --------------------------------------------------------------------------------------


def bag(dtype=np.float64, S=12, D=7, n=9, k=4, repeated=True):
    rng = np.random.default_rng(4)
    slots = rng.integers(0, S, (3, n // 3, k)) if repeated else distinct_slots(rng, (3, n // 3), k, S)
    return rng.standard_normal((S, D)).astype(dtype), slots, rng.standard_normal((3, n // 3, k)).astype(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sparse", [False, True])
def test_bag_is_torchs_with_weights_per_sample(sparse, dtype, backend):
    table, slots, weights = (torch.tensor(x) for x in bag())
    leaves = [table.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()]
    got = sdm_lite.embedding_bag(leaves[0], slots, leaves[1], sparse_gradient=sparse, backend=backend)
    upstream = torch.randn(got.shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    got.backward(upstream)
    assert leaves[0].grad.is_sparse == sparse
    if sparse:
        # distinct and ascending as they are (torch drops the flag when it stores a gradient)
        assert leaves[0].grad._indices()[0].equal(slots.unique())
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = torch.nn.functional.embedding_bag(
        slots.flatten(0, 1), exact[0], per_sample_weights=exact[1].flatten(0, 1), mode="sum"
    )
    want.view(got.shape).backward(upstream.double())
    name = str(dtype).removeprefix("torch.")
    assert_close(got.detach(), want.detach().view(got.shape), "product_keys", name)
    assert_close(leaves[0].grad.to_dense(), exact[0].grad, "product_keys", name)
    assert_close(leaves[1].grad, exact[1].grad, "product_keys", name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bag_gradients_agree_with_differences(backend):
    table, slots, weights = bag()
    check_grads(lambda v, w: sdm_lite.embedding_bag(v, slots, w, backend=backend), [table, weights])


@pytest.mark.parametrize("backend", BACKENDS)
def test_coalesced_gradient_is_the_dense_one_at_the_rows_that_were_read(backend):
    table, slots, weights = bag(S=40)
    dense = Tensor(table, requires_grad=True)
    readings = sdm_lite.embedding_bag(dense, slots, weights, backend=backend)
    upstream = np.random.default_rng(0).standard_normal(readings.shape)
    readings.backward(upstream)
    rows, gradient = sdm_lite.embedding_bag_gradient(upstream, slots, weights, 40, backend=backend)
    np.testing.assert_array_equal(rows, np.unique(slots))
    np.testing.assert_array_equal(gradient, dense.grad[rows])
    assert not np.delete(dense.grad, rows, axis=0).any()


def test_sparse_adam_takes_the_sparse_gradient():
    table, slots, weights = (torch.tensor(x) for x in bag(S=40))
    table.requires_grad_()
    before = table.detach().clone()
    sdm_lite.embedding_bag(table, slots, weights, sparse_gradient=True).sum().backward()
    torch.optim.SparseAdam([table], lr=0.1).step()
    moved = (table != before).any(1).nonzero().flatten()
    assert moved.tolist() == slots.unique().tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_row_reaches_only_the_bags_that_read_it(backend):
    table, slots, weights = bag(S=40)
    table[slots[0, 0, 0]] = np.nan
    readings = sdm_lite.embedding_bag(table, slots, weights, backend=backend)
    np.testing.assert_array_equal(np.isnan(readings).any(-1), (slots == slots[0, 0, 0]).any(-1))


def test_foreign_arrays_and_other_dtypes():
    table, slots, weights = bag(np.float32)
    want = sdm_lite.embedding_bag(table, slots, weights)
    foreign = sdm_lite.embedding_bag(*map(ForeignArray, (table, slots, weights)))
    assert isinstance(foreign, ForeignArray) and np.array_equal(foreign.array, want)
    np.testing.assert_array_equal(sdm_lite.embedding_bag(table, slots.astype(np.int32), weights), want)
    half = weights.astype(np.float16)
    want = sdm_lite.embedding_bag(table, slots, half.astype(np.float32))
    np.testing.assert_array_equal(sdm_lite.embedding_bag(table, slots, half), want)


# ---- mistakes ---------------------------------------------------------------------------------------------------

TABLE, SLOTS, WEIGHTS = bag(np.float32)
Q, KEYS = np.zeros((2, 1, 4), np.float32), np.zeros((1, 2, 3, 2), np.float32)


@pytest.mark.parametrize(
    ("op", "arguments", "error", "words"),
    [
        ("idw_product_key_topk", (Q[..., :3], KEYS, 2), errors.ShapeError, "queries"),
        ("idw_product_key_topk", (Q, KEYS[:, :1], 2), errors.ShapeError, "keys"),
        ("idw_product_key_topk", (Q, KEYS, 10), errors.ValueRangeError, "k: expected 1 to 9"),
        ("idw_product_key_topk", (Q, KEYS, True), errors.DtypeError, "k"),
        ("idw_product_key_topk", (Q.astype(int), KEYS, 2), errors.DtypeError, "queries"),
        ("idw_product_key_topk", (Q, torch.tensor(KEYS), 2), errors.DtypeError, "one kind"),
        ("product_key_lookup", (Q, KEYS.astype(np.float64), 2), errors.DtypeError, "keys"),
        ("product_key_lookup", (Q[0, 0], KEYS, 2), errors.ShapeError, "queries"),
        ("embedding_bag", (TABLE[0], SLOTS, WEIGHTS), errors.ShapeError, "values"),
        ("embedding_bag", (TABLE, SLOTS, WEIGHTS[..., :3]), errors.ShapeError, "weights"),
        ("embedding_bag", (TABLE, SLOTS.astype(float), WEIGHTS), errors.DtypeError, "slots"),
        ("embedding_bag", (TABLE, SLOTS + 1, WEIGHTS), errors.SlotError, "12"),
        ("embedding_bag", (TABLE, SLOTS - 1, WEIGHTS), errors.SlotError, "-1"),
        ("embedding_bag", (TABLE, SLOTS + 2**33, WEIGHTS), errors.SlotError, "slots"),
        ("embedding_bag", (TABLE.astype(np.float16), SLOTS, WEIGHTS), errors.DtypeError, "values"),
        ("embedding_bag_gradient", (TABLE[:2], SLOTS, WEIGHTS, 12), errors.ShapeError, "dreadings"),
        ("embedding_bag_gradient", (np.zeros((3, 3, 7), np.float32), SLOTS, WEIGHTS, 5), errors.SlotError, "slots"),
    ],
)
def test_mistakes_name_op_argument_and_fix(op, arguments, error, words):
    with pytest.raises(error, match=rf"^{op}: .*{words}.* Fix: "):
        getattr(sdm_lite, op)(*arguments)


def test_options_are_checked():
    with pytest.raises(errors.ValueRangeError, match="epsilon"):
        sdm_lite.idw_product_key_topk(Q, KEYS, 2, epsilon=-1.0)
    with pytest.raises(errors.ValueRangeError, match="sparse_gradient"):
        sdm_lite.embedding_bag(TABLE, SLOTS, WEIGHTS, sparse_gradient=True)
    for op, arguments in (("embedding_bag", (TABLE, SLOTS, WEIGHTS)), ("idw_product_key_topk", (Q, KEYS, 2))):
        with pytest.raises(errors.BackendError, match="cuda"):
            getattr(sdm_lite, op)(*arguments, backend="cuda")


@pytest.mark.parametrize("epsilon", [1e-60, 1e60, 10**400, float("nan"), float("inf"), 0])
def test_an_epsilon_is_one_in_the_compute_dtype(epsilon):
    for q, keys in ((Q, KEYS), (torch.tensor(Q), torch.tensor(KEYS)), (Tensor(Q), KEYS)):
        with pytest.raises(errors.ValueRangeError, match="idw_product_key_topk: epsilon: expected a finite number"):
            sdm_lite.idw_product_key_topk(q, keys, 2, epsilon=epsilon)


def test_a_float64_epsilon_may_be_what_float32_does_not_hold():
    weights = sdm_lite.idw_product_key_topk(Q.astype(np.float64), KEYS.astype(np.float64), 2, epsilon=1e-60)[0]
    assert np.isfinite(weights).all()


@pytest.mark.parametrize("num_slots", [-1, 2**31, 2**70])
def test_a_table_has_fewer_slots_than_int32_counts(num_slots):
    with pytest.raises(errors.ValueRangeError, match="embedding_bag_gradient: num_slots"):
        sdm_lite.embedding_bag_gradient(np.ones((0, 3)), np.zeros((0, 2), int), np.ones((0, 2)), num_slots)


def test_a_table_of_another_byte_order_is_refused():
    swapped = TABLE.astype(TABLE.dtype.newbyteorder(">"))
    with pytest.raises(errors.DtypeError, match="embedding_bag: values: expected native byte order"):
        sdm_lite.embedding_bag(swapped, SLOTS, WEIGHTS)


@pytest.mark.parametrize("sparse", [False, True])
def test_empty_bags_have_gradients(sparse):
    values = torch.ones(10, 3, requires_grad=True)
    weights = torch.ones(4, 0, requires_grad=True)
    y = sdm_lite.embedding_bag(values, torch.zeros(4, 0, dtype=torch.long), weights, sparse_gradient=sparse)
    y.sum().backward()
    assert y.shape == (4, 3) and weights.grad.shape == (4, 0) and not values.grad.to_dense().any()


@pytest.mark.parametrize("cut", [np.s_[:0], np.s_[:, :, :0], np.s_[..., :0]])
@pytest.mark.parametrize("op", ["idw_product_key_topk", "product_key_lookup"])
def test_keys_without_numbers_are_refused(op, cut):
    keys = KEYS[cut]
    queries = np.ones((2, keys.shape[0], 2 * keys.shape[3]), np.float32)
    for kind in (np.asarray, torch.tensor):
        with pytest.raises(errors.ShapeError, match=f"{op}: keys"):
            getattr(sdm_lite, op)(kind(queries), kind(keys), 1)
