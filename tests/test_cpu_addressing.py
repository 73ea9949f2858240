"""The CPU room's addressing: the same bits as the reference room, whatever the scores, threads and batch."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdm_lite.cpu import addressing, select
from sdm_lite.reference import addressing as reference

DTYPES = (np.float32, np.float64)
WIDTHS = [(1,), (40,), (300,), (1, 1), (1, 9), (9, 1), (3, 3), (7, 90), (24, 24), (240, 240)]
WIDTHS += [(2, 3, 4), (5, 1, 30), (1, 5, 1, 6), (4, 4, 4, 4)]


def normal(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


def few_values(rng, shape, dtype):
    return rng.integers(-2, 3, shape).astype(dtype)


def bf16_rounded(rng, shape, dtype):
    bits = rng.standard_normal(shape).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(dtype)


def special(rng, shape, dtype):
    return rng.choice(np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0], dtype), shape)


def all_nan(rng, shape, dtype):
    return np.full(shape, np.nan, dtype)


def any_magnitude(rng, shape, dtype):
    # every exponent of the dtype, subnormals and sums that overflow included; NaN and inf among the bit patterns
    integer = np.dtype(f"u{np.dtype(dtype).itemsize}")
    return rng.integers(0, np.iinfo(integer).max, shape, integer, endpoint=True).view(dtype)


def tiny_beside_great(rng, shape, dtype):
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-30, 30, shape)).astype(dtype)


SCORES = (normal, few_values, bf16_rounded, special, all_nan, any_magnitude, tiny_beside_great)


def numbers_of_slots(widths):
    """k = 1, N, and around the places where the rule changes: a factor's width, the sorts' limit."""
    total = math.prod(widths)
    wanted = {1, 2, 3, 5, 31, 64, 200, widths[0], widths[-1] + 1, total if total <= 700 else 400}
    return sorted(k for k in wanted if k <= total)


def assert_same_bits(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a, b)
        assert a.tobytes() == b.tobytes()  # tells -0 from +0 too


@pytest.mark.parametrize("scores_of", SCORES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_selection_is_the_references(widths, scores_of):
    rng = np.random.default_rng(len(widths) + sum(widths))
    for dtype, k in itertools.product(DTYPES, numbers_of_slots(widths)):
        scores = scores_of(rng, (5, sum(widths)), dtype)
        got = addressing.product_key_topk_forward(scores, widths, k)
        assert_same_bits(got, reference.product_key_topk_forward(scores, widths, k))
        assert (np.diff(got[1], axis=1) > 0).all() and got[1].min() >= 0 and got[1].max() < math.prod(widths)


@pytest.mark.parametrize(
    ("widths", "k", "dtype"), [((2000,), 900, np.float32), ((600, 600), 512, np.float64), ((64, 64), 4096, np.float32)]
)
def test_large_k_is_the_references(widths, k, dtype):
    rng = np.random.default_rng(k)
    for scores_of in (normal, few_values, any_magnitude):
        scores = scores_of(rng, (2, sum(widths)), dtype)
        got = addressing.product_key_topk_forward(scores, widths, k)
        assert_same_bits(got, reference.product_key_topk_forward(scores, widths, k))


@given(
    widths=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    palette=st.lists(st.floats(width=32), min_size=1, max_size=5),
    data=st.data(),
)
@settings(max_examples=150)
def test_any_scores_give_the_references_selection(widths, palette, data):
    k = data.draw(st.integers(1, math.prod(widths)))
    count = 3 * sum(widths)
    drawn = data.draw(st.lists(st.sampled_from(palette), min_size=count, max_size=count))
    scores = np.array(drawn, np.float32).reshape(3, -1)
    got = addressing.product_key_topk_forward(scores, widths, k)
    assert_same_bits(got, reference.product_key_topk_forward(scores, widths, k))


@pytest.mark.parametrize("k", range(1, 13))
def test_the_k_best_of_all_sums(k):
    # small integers add exactly, so the search over all sums is the definition, ties included
    rng = np.random.default_rng(k)
    scores = rng.integers(0, 4, (50, 7)).astype(np.float32)
    values, slots = addressing.product_key_topk_forward(scores, (3, 4), k)
    sums = (scores[:, :3, None] + scores[:, None, 3:]).reshape(50, 12)
    want = np.sort(np.argsort(-sums, axis=1, kind="stable")[:, :k], axis=1)
    np.testing.assert_array_equal(slots, want)
    np.testing.assert_array_equal(values, np.take_along_axis(sums, want, 1))


def test_hand_worked_ties_and_nan():
    scores = np.array([[1, 1, 0, 0, 0, -1]], np.float32)
    for k, want in ((2, [0, 1]), (3, [0, 1, 3]), (4, [0, 1, 3, 4]), (9, list(range(9)))):
        assert addressing.product_key_topk_forward(scores, (3, 3), k)[1].tolist() == [want]
    scores[0, 0] = np.nan
    assert addressing.product_key_topk_forward(scores, (3, 3), 2)[1].tolist() == [[3, 4]]
    nothing = np.full((1, 6), np.nan, np.float32)
    values, slots = addressing.product_key_topk_forward(nothing, (3, 3), 3)
    assert slots.tolist() == [[0, 1, 2]] and (values == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(4,), (3, 5), (2, 3, 2)], ids=str)
def test_no_rows(widths, dtype):
    values, slots = addressing.product_key_topk_forward(np.empty((0, sum(widths)), dtype), widths, 3)
    assert values.shape == slots.shape == (0, 3) and values.dtype == dtype and slots.dtype == np.int32
    assert addressing.product_key_topk_backward(values, slots, widths).shape == (0, sum(widths))
    assert addressing.hash_slots_forward(np.empty(0, np.int64), 9, 3, 0).shape == (0, 3)


def mixed_rows(dtype):
    """Rows of every kind in turn, so that what one row suggests to the next one's search is mostly wrong."""
    rng = np.random.default_rng(3)
    blocks = [scores_of(rng, (40, 80), dtype) for scores_of in SCORES]
    return rng.permutation(np.concatenate(blocks))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype):
    scores = mixed_rows(dtype)
    whole = addressing.product_key_topk_forward(scores, (40, 40), 17)
    alone = [addressing.product_key_topk_forward(row[None], (40, 40), 17) for row in scores]
    assert_same_bits(whole, [np.concatenate(parts) for parts in zip(*alone, strict=True)])
    backwards = addressing.product_key_topk_forward(scores[::-1], (40, 40), 17)  # also: a strided input
    assert_same_bits(whole, [part[::-1] for part in backwards])


@pytest.mark.usefixtures("threads_at_any_size")
@pytest.mark.parametrize("threads", ["2", "5"])
def test_the_number_of_threads_does_not_matter(monkeypatch, threads):
    scores, ids = mixed_rows(np.float32), np.arange(-140, 140)
    dvalues = normal(np.random.default_rng(0), (len(scores), 17), np.float32)

    def everything():
        values, slots = addressing.product_key_topk_forward(scores, (40, 40), 17)
        dscores = addressing.product_key_topk_backward(dvalues, slots, (40, 40))
        return values, slots, dscores, addressing.hash_slots_forward(ids, 1000, 30, 1)

    monkeypatch.setenv("SDM_LITE_NUM_THREADS", "1")
    one = everything()
    monkeypatch.setenv("SDM_LITE_NUM_THREADS", threads)
    assert_same_bits(everything(), one)


@pytest.mark.usefixtures("threads_at_any_size")
def test_callers_in_several_threads():
    scores = mixed_rows(np.float32)
    want = addressing.product_key_topk_forward(scores, (40, 40), 17)
    results = [None] * 4

    def call(i):
        results[i] = [addressing.product_key_topk_forward(scores, (40, 40), 17) for _ in range(5)]

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for got in itertools.chain.from_iterable(results):
        assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(40,), (1, 9), (24, 24), (2, 3, 4), (1, 5, 1, 6)], ids=str)
def test_backward_is_the_references(widths, dtype):
    rng = np.random.default_rng(5)
    for k in numbers_of_slots(widths):
        slots = reference.product_key_topk_forward(normal(rng, (6, sum(widths)), dtype), widths, k)[1]
        dvalues = normal(rng, (6, k), dtype)
        got = addressing.product_key_topk_backward(dvalues, slots, widths)
        assert_same_bits([got], [reference.product_key_topk_backward(dvalues, slots, widths)])


def test_backward_is_the_dense_one_hot_product():
    rng = np.random.default_rng(6)
    widths = (5, 3, 4)
    slots = np.stack([rng.permutation(60)[:20] for _ in range(7)]).astype(np.int32)
    dvalues = rng.integers(-9, 10, (7, 20)).astype(np.float64)  # integers: exact in any order of summation
    columns = np.unravel_index(slots, widths)
    dense = [np.einsum("nk,nkc->nc", dvalues, np.eye(w)[c]) for w, c in zip(widths, columns, strict=True)]
    got = addressing.product_key_topk_backward(dvalues, slots, widths)
    np.testing.assert_array_equal(got, np.concatenate(dense, axis=1))


def test_backward_is_the_slope_of_the_forward():
    # the sums are linear in the scores while the selection stays: here steps of 2^-20 are exact and change no order
    rng = np.random.default_rng(7)
    scores = rng.permutation(np.arange(64.0)).reshape(4, 16)
    direction = rng.integers(-8, 9, scores.shape) * 2.0**-20
    dvalues = rng.integers(-9, 10, (4, 6)).astype(np.float64)
    values, slots = addressing.product_key_topk_forward(scores, (8, 8), 6)
    moved, same = addressing.product_key_topk_forward(scores + direction, (8, 8), 6)
    np.testing.assert_array_equal(slots, same)
    dscores = addressing.product_key_topk_backward(dvalues, slots, (8, 8))
    assert ((moved - values) * dvalues).sum() == (dscores * direction).sum() != 0


@pytest.mark.parametrize(("num_slots", "k"), [(1, 1), (7, 7), (100, 64), (300, 299), (57_600, 64), (2**31 - 1, 9)])
def test_hash_is_the_references(num_slots, k):
    ids = np.concatenate([np.arange(-5, 40), [2**63 - 1, -(2**63)]])
    for seed in (0, 1, -3, 2**64 + 1, 2**63):
        got = addressing.hash_slots_forward(ids, num_slots, k, seed)
        assert_same_bits([got], [reference.hash_slots_forward(ids, num_slots, k, seed)])
        assert (np.diff(got, axis=1) > 0).all()


def test_one_compilation_per_dtype():
    for widths, k, rows in (((5, 5), 3, 1), ((9, 9), 20, 2), ((30,), 4, 3), ((2, 3, 4), 6, 40)):
        for dtype in DTYPES:
            addressing.product_key_topk_forward(np.zeros((rows, sum(widths)), dtype), widths, k)
            slots = np.zeros((rows, k), np.int32)
            addressing.product_key_topk_backward(np.zeros((rows, k), dtype), slots, widths)
        addressing.hash_slots_forward(np.arange(rows), math.prod(widths), k, rows)
    compiled = (select.topk_rows, addressing._scatter_rows, addressing._hash_rows)
    assert [len(kernel.signatures) for kernel in compiled] == [2, 2, 1]


def test_importing_compiles_nothing():
    code = (
        "from numba.core.dispatcher import Dispatcher\n"
        "from sdm_lite.cpu import addressing, select\n"
        "kernels = [x for m in (addressing, select) for x in vars(m).values() if isinstance(x, Dispatcher)]\n"
        "print(len(kernels) > 0, sum(len(x.signatures) for x in kernels))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["True", "0"]
