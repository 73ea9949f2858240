"""Bad input to product_key_topk and hash_slots: the argument, what came, and the fix."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from refusals import KINDS, refuse

import sdm_lite
from sdm_lite import DtypeError, ShapeError, ValueRangeError

torch = pytest.importorskip("torch")

SCORES = np.zeros((2, 8), np.float32)
TOPK = [
    ("k", dict(k=17), ValueRangeError, "1 to 16 slots"),
    ("k", dict(k=0), ValueRangeError, "got 0"),
    ("k", dict(k=-1), ValueRangeError, "got -1"),
    ("k", dict(k=2.0), DtypeError, "float"),
    ("k", dict(k=True), DtypeError, "bool"),
    ("k", dict(k=np.bool_(True)), DtypeError, "bool"),
    ("k", dict(k="2"), DtypeError, "str"),
    ("k", dict(k=None), DtypeError, "None"),
    ("k", dict(k=np.ones(1, np.int64)), DtypeError, "ndarray"),
    ("factors", dict(k=1, factors=(4, 5)), ShapeError, "add up to 8"),
    ("factors", dict(k=1, factors=(9, -1)), ShapeError, "positive"),
    ("factors", dict(k=1, factors=(8, 0)), ShapeError, "positive"),
    ("factors", dict(k=1, factors=()), ShapeError, "positive"),
    ("factors", dict(k=1, factors=(4.5, 3.5)), DtypeError, "4.5"),
    ("factors", dict(k=1, factors=(True, 7)), DtypeError, "bool"),
    ("factors", dict(k=1, factors="44"), DtypeError, "str"),
    ("factors", dict(k=1, factors=2.0), DtypeError, "float"),
    ("factors", dict(k=1, factors=True), DtypeError, "bool"),
    ("scores", dict(k=1, factors=3), ShapeError, "3 equal factors"),
    ("scores", dict(k=1, factors=0), ShapeError, "0 equal factors"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("argument, call, error, word", TOPK, ids=str)
def test_wrong_selections(argument, call, error, word, kind):
    scores = KINDS[kind](SCORES)
    refuse(lambda: sdm_lite.product_key_topk(scores, **call), "product_key_topk", argument, error, word)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_that_no_selection_is_made_of(kind):
    def refuse_scores(scores, error, word, argument="scores", **options):
        ours = KINDS[kind](scores)
        refuse(lambda: sdm_lite.product_key_topk(ours, 1, **options), "product_key_topk", argument, error, word)

    refuse_scores(np.zeros((), np.float32), ShapeError, "[]")
    refuse_scores(np.zeros((2, 0), np.float32), ShapeError, "got 0")
    refuse_scores(np.zeros((2, 7), np.float32), ShapeError, "got 7")
    refuse_scores(np.zeros((0, 2 * 46341), np.float32), ValueRangeError, "2^31", argument="factors")
    refuse_scores(np.zeros((0, 200), np.float32), ValueRangeError, "2^31", argument="factors", factors=8)
    for dtype in ("int32", "bool", "complex64"):
        refuse_scores(SCORES.astype(dtype), DtypeError, dtype)
    for thing, word in (([[1.0, 2.0]], "list"), (None, "None"), (np.ma.masked_array(SCORES), "mask")):
        call = functools.partial(sdm_lite.product_key_topk, thing, 1)
        refuse(call, "product_key_topk", "scores", DtypeError, word)


HASH = [
    ("k", dict(k=9), ValueRangeError, "1 to 8 slots"),
    ("k", dict(k=0), ValueRangeError, "got 0"),
    ("k", dict(k=1.0), DtypeError, "float"),
    ("k", dict(k=True), DtypeError, "bool"),
    ("num_slots", dict(num_slots=0), ValueRangeError, "got 0"),
    ("num_slots", dict(num_slots=2**31), ValueRangeError, "2147483648"),
    ("num_slots", dict(num_slots=8.5), DtypeError, "float"),
    ("num_slots", dict(num_slots="8"), DtypeError, "str"),
    ("num_slots", dict(num_slots=True, k=1), DtypeError, "bool"),
    ("seed", dict(seed=1.5), DtypeError, "float"),
    ("seed", dict(seed=None), DtypeError, "None"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("argument, change, error, word", HASH, ids=str)
def test_wrong_hashes(argument, change, error, word, kind):
    ids, call = KINDS[kind](np.arange(3)), dict(num_slots=8, k=2) | change
    refuse(lambda: sdm_lite.hash_slots(ids, **call), "hash_slots", argument, error, word)


@pytest.mark.parametrize("dtype", ["float32", "bool", "uint64", "object", ">i8"])
def test_ids_that_are_no_whole_numbers(dtype):
    ids = np.arange(3).astype(dtype)
    refuse(lambda: sdm_lite.hash_slots(ids, 8, 2), "hash_slots", "ids", DtypeError, dtype)
