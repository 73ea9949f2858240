"""The reference room's addressing: worked cases, brute force, the rule written a second time, the hash."""

from __future__ import annotations

import itertools

import cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdm_lite.reference import hash_slots_forward, product_key_topk_backward, product_key_topk_forward

WIDTHS = [(9,), (5, 7), (3, 4, 5), (2, 3, 1, 4)]


def select(factors, k, dtype=np.float32):
    scores = np.concatenate([np.asarray(f, dtype) for f in factors])[None]
    values, slots = product_key_topk_forward(scores, [len(f) for f in factors], k)
    return values[0], slots[0].tolist()


def brute_force(scores, widths, k):
    """The k greatest of all N sums (left to right), ties to the lower slot."""
    slots = []
    for row in scores:
        factors = np.split(row, np.cumsum(widths)[:-1])
        sums = factors[0]
        for factor in factors[1:]:
            sums = (sums[:, None] + factor).ravel()
        slots.append(np.sort(np.argsort(-sums, kind="stable")[:k]))
    return np.array(slots)


def rule_in_words(row, widths, k):
    """The selection rule once more, in plain Python over lists: {slot: sum}."""

    def lowest(x):
        return x if x == x else x.dtype.type(-np.inf)

    def ranks(factor):
        return sorted(((lowest(score), column) for column, score in enumerate(factor)), key=lambda p: (-p[0], p[1]))

    factors = np.split(row, np.cumsum(widths)[:-1])
    best = ranks(factors[0])[:k]
    for factor in factors[1:]:
        found = []
        for (i, (a, slot)), (j, (b, column)) in itertools.product(enumerate(best), enumerate(ranks(factor))):
            if (i + 1) * (j + 1) <= k:
                with np.errstate(invalid="ignore"):
                    found.append((lowest(a + b), slot * len(factor) + column))
        best = sorted(found, key=lambda p: (-p[0], p[1]))[:k]
    return {slot: value for value, slot in best}


def test_worked_ties():
    a, b = [1, 1, 0], [0, 0, -1]
    assert select([a, b], 2)[1] == [0, 1]
    assert select([a, b], 3)[1] == [0, 1, 3]
    assert select([a, b], 4)[1] == [0, 1, 3, 4]
    values, slots = select([a, b], 9)
    assert slots == list(range(9))
    np.testing.assert_array_equal(values, np.add.outer(a, b).ravel())
    assert select([[np.nan, 1, 0], b], 2)[1] == [3, 4]


def test_zeros_of_both_signs_are_equal():
    assert select([[-0.0, 0.0, -0.0]], 2)[1] == [0, 1]
    assert select([[-0.0, 0.0], [0.0, -0.0]], 3)[1] == [0, 1, 2]


@pytest.mark.parametrize("widths", WIDTHS)
def test_all_nan_gives_distinct_slots_in_range(widths):
    k = int(np.prod(widths)) // 2
    values, slots = select([[np.nan] * width for width in widths], k)
    assert slots == list(range(k))
    assert (values == -np.inf).all()


def test_infinities():
    inf = np.inf
    values, slots = select([[-inf, inf], [-inf, 0]], 4)
    assert slots == [0, 1, 2, 3]
    np.testing.assert_array_equal(values, [-inf, -inf, -inf, inf])  # inf + -inf is NaN, and counts as -inf
    assert select([[-inf, inf], [-inf, 0]], 1)[1] == [3]


def test_sums_that_round_alike_are_decided_by_the_staircase():
    # in float32 all four sums are 1; the best column of the first factor is 1, so slot 2 is the one candidate
    assert select([[0, 1e-9], [1, 1]], 1, np.float32)[1] == [2]
    # among candidates of equal rounded sum the lower slot comes first
    assert select([[0, 1e-9], [1, 1]], 2, np.float32)[1] == [0, 2]
    assert select([[0, 1e-9], [1, 1]], 2, np.float64)[1] == [2, 3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("kind", ["distinct", "ties"])
def test_equals_brute_force_where_sums_are_exact(kind, widths, dtype):
    scores = cases.make_scores(kind, 20, widths, dtype=dtype)
    num_slots = int(np.prod(widths))
    for k in {1, 2, num_slots // 3, num_slots - 1, num_slots}:
        values, slots = product_key_topk_forward(scores, widths, k)
        assert values.dtype == dtype and slots.dtype == np.int32
        np.testing.assert_array_equal(slots, brute_force(scores, widths, k))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_equals_the_rule_in_words(data):
    widths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    k = data.draw(st.integers(1, int(np.prod(widths))))
    score = st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1.0 + 2**-23, 0.1, 0.3, 2.0**-24, -1.0, 3e38])
    row = data.draw(st.lists(score, min_size=sum(widths), max_size=sum(widths)))
    scores = np.array([row, row[::-1]], np.float32)
    with np.errstate(over="ignore"):
        want = [rule_in_words(r, widths, k) for r in scores]
    values, slots = product_key_topk_forward(scores, widths, k)
    for row_values, row_slots, expected in zip(values, slots, want, strict=True):
        assert row_slots.tolist() == sorted(expected)
        np.testing.assert_array_equal(row_values, [expected[slot] for slot in row_slots.tolist()])


def test_a_row_does_not_depend_on_its_batch():
    scores = cases.make_scores("extreme", 30, (8, 8))
    together = product_key_topk_forward(scores, (8, 8), 12)
    for row in range(30):
        for all_rows, alone in zip(together, product_key_topk_forward(scores[row : row + 1], (8, 8), 12), strict=True):
            np.testing.assert_array_equal(all_rows[row], alone[0])
    values, slots = product_key_topk_forward(scores[:0], (8, 8), 12)
    assert values.shape == slots.shape == (0, 12)


@pytest.mark.parametrize("widths", WIDTHS)
def test_backward_is_the_transpose_of_the_forward(widths):
    # for a fixed selection the sums are linear in the scores: <dvalues, J x> == <J^T dvalues, x> for any x
    rng = np.random.default_rng(3)
    scores = cases.make_scores("distinct", 6, widths, dtype=np.float64)
    k = int(np.prod(widths)) // 2
    _, slots = product_key_topk_forward(scores, widths, k)
    direction = rng.standard_normal(scores.shape)
    columns = np.stack(np.unravel_index(slots, widths), axis=-1) + np.cumsum([0, *widths[:-1]])
    forward = np.take_along_axis(direction[:, None], columns, axis=2).sum(axis=2)
    dvalues = rng.standard_normal((6, k))
    dscores = product_key_topk_backward(dvalues, slots, widths)
    np.testing.assert_allclose((dvalues * forward).sum(1), (dscores * direction).sum(1), rtol=1e-12)  # float64 sums


def test_backward_adds_in_ascending_position():
    # 2^24 + 1 + 1 in float32 is 2^24, 1 + 1 + 2^24 is 2^24 + 2: the order shows
    slots = np.array([[0, 1, 2]], np.int32)
    for dvalues, want in (([2**24, 1, 1], 2**24), ([1, 1, 2**24], 2**24 + 2)):
        got = product_key_topk_backward(np.array([dvalues], np.float32), slots, (3, 3))
        assert got.dtype == np.float32
        assert got[0, 0] == want
        np.testing.assert_array_equal(got[0, 3:], dvalues)


def hash_in_words(identity, num_slots, k, seed):
    """The hash once more, over Python's unbounded integers."""
    word, golden = 2**64, 0x9E3779B97F4A7C15

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % word
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % word
        return z ^ (z >> 31)

    start, drawn = mix(identity % word ^ mix((seed + golden) % word)), []
    for j in range(k):
        top = num_slots - k + j
        slot = mix((start + (j + 1) * golden) % word) % (top + 1)
        drawn.append(top if slot in drawn else slot)
    return sorted(drawn)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4), st.integers(-(2**70), 2**70), st.data())
def test_hash_equals_its_definition(ids, seed, data):
    num_slots = data.draw(st.one_of(st.integers(1, 20), st.integers(1000, 2**31 - 1)))
    k = data.draw(st.integers(1, min(num_slots, 20)))
    slots = hash_slots_forward(np.array(ids, np.int64), num_slots, k, seed)
    assert slots.dtype == np.int32
    assert slots.tolist() == [hash_in_words(i, num_slots, k, seed) for i in ids]
    assert all(len(set(row)) == k and 0 <= min(row) and max(row) < num_slots for row in slots.tolist())


def test_hash_pinned_numbers():
    # the same in every release and in every room: states saved on disk depend on it
    slots = hash_slots_forward(np.array([0, 1, -1]), 1024, 5, seed=3)
    assert slots.tolist() == [[15, 298, 819, 881, 901], [171, 177, 369, 404, 878], [250, 269, 727, 786, 797]]


def test_hash_of_every_slot_ends():
    assert hash_slots_forward(np.array([5, -5]), 50, 50, seed=1).tolist() == [list(range(50))] * 2


def test_hash_is_even_and_depends_on_id_and_seed():
    ids = np.arange(20_000)
    slots = hash_slots_forward(ids, 16, 4, seed=0)
    counts = np.bincount(slots.ravel(), minlength=16)
    # binomial(20000, 1/4) per slot: standard deviation 61; five of them, for 16 slots of one fixed seed
    assert np.abs(counts - 5000).max() < 5 * 61.3
    assert (slots[1:] == slots[:-1]).all(axis=1).mean() < 0.01  # chance: 1 in 1820
    assert (slots == hash_slots_forward(ids, 16, 4, seed=1)).all(axis=1).mean() < 0.01
