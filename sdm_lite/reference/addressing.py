"""Addressing in NumPy: the k best slots of product keys, and slots drawn from a hash.

The selection rule is exact, so that every room names the same slots (docs/numerics.md):

* a NaN score counts as -inf before anything else; -0 and +0 are equal;
* each factor's columns are ranked by (score descending, column ascending);
* two rank lists are combined over the staircase of rank pairs (i + 1) (j + 1) <= k, no other pair
  can be among the k best; sums are rounded once, in the dtype of the scores; a sum of +inf and
  -inf, which is NaN, counts as -inf too;
* candidates are ordered by (sum descending, slot ascending) and k are kept;
* more than two factors are combined left to right, keeping k each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
WORD = 0xFFFFFFFFFFFFFFFF


def product_key_topk_forward(scores: np.ndarray, widths: Sequence[int], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the k slots with the greatest sums of one score per factor, ascending, and their sums.

    slot(c_0, .., c_{F-1}) = (..(c_0 n_1 + c_1) n_2 + ..) n_{F-1} + c_{F-1},  sum = s_0[c_0] + .. + s_{F-1}[c_{F-1}]

    Parameters
    ----------
    scores : array [n, sum(widths)], float32 or float64
        The factors' scores side by side.
    widths : sequence of int
        Columns n_f of each factor; their product is the number of slots.
    k : int
        Slots to select, at most the number of slots. It may exceed the width of one factor.

    Returns
    -------
    values : array [n, k], dtype of `scores`
        The sums; NaN never, -inf instead.
    slots : array [n, k], int32
        Distinct, ascending.

    Examples
    --------
    >>> scores = np.array([[1, 1, 0, 0, 0, -1]], dtype=np.float32)
    >>> product_key_topk_forward(scores, (3, 3), 3)[1]
    array([[0, 1, 3]], dtype=int32)
    """
    scores = nan_to_lowest(scores)
    edges = np.cumsum(widths)[:-1]
    factors = np.split(scores, edges, axis=1)
    values, slots = ranked_columns(factors[0], k)
    for factor in factors[1:]:
        values, slots = combine(values, slots, *ranked_columns(factor, k), factor.shape[1], k)
    ascending = np.argsort(slots, axis=1, kind="stable")
    return np.take_along_axis(values, ascending, 1), np.take_along_axis(slots, ascending, 1).astype(np.int32)


def nan_to_lowest(scores: np.ndarray) -> np.ndarray:
    """Return a copy of the scores in which NaN is -inf."""
    return np.where(np.isnan(scores), scores.dtype.type(-np.inf), scores)


def ranked_columns(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the (at most) k best scores of one factor and their columns, by (score descending, column ascending)."""
    # a stable sort keeps equal scores, and -0 beside +0, in the order of their columns
    columns = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, columns, 1), columns


def staircase(first_length: int, second_length: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rank pairs (i, j) with (i + 1) (j + 1) <= k.

    A pair outside has (i + 1) (j + 1) - 1 >= k other pairs that are ranked no lower in both lists.

    >>> [pair.tolist() for pair in staircase(3, 3, 3)]
    [[0, 0, 0, 1, 2], [0, 1, 2, 0, 0]]
    """
    i, j = np.indices((first_length, second_length)).reshape(2, -1)
    inside = (i + 1) * (j + 1) <= k
    return i[inside], j[inside]


def combine(
    first: np.ndarray, first_slots: np.ndarray, second: np.ndarray, second_columns: np.ndarray, width: int, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the (at most) k best sums of two rank lists and their slots, by (sum descending, slot ascending)."""
    i, j = staircase(first.shape[1], second.shape[1], k)
    with np.errstate(invalid="ignore", over="ignore"):  # +inf and -inf meet; two great scores overflow to inf
        sums = nan_to_lowest(first[:, i] + second[:, j])
    slots = first_slots[:, i] * width + second_columns[:, j]
    best = np.lexsort((slots, -sums), axis=1)[:, :k]
    return np.take_along_axis(sums, best, 1), np.take_along_axis(slots, best, 1)


def product_key_topk_backward(dvalues: np.ndarray, slots: np.ndarray, widths: Sequence[int]) -> np.ndarray:
    """Return the gradient of the scores: each selected sum's gradient goes to one column of each factor.

    dscores[c_f(slot_i)] += dvalues_i for every factor f, in ascending order of i.

    Parameters
    ----------
    dvalues : array [n, k], float32 or float64
        Gradient of the selected sums.
    slots : array [n, k], int32
        The selected slots, as `product_key_topk_forward` returned them.
    widths : sequence of int
        Columns of each factor.

    Returns
    -------
    array [n, sum(widths)], dtype of `dvalues`

    Examples
    --------
    >>> product_key_topk_backward(np.array([[1.0, 2.0]]), np.array([[0, 1]], dtype=np.int32), (3, 3))
    array([[3., 0., 0., 1., 2., 0.]])
    """
    dscores = np.zeros((len(slots), sum(widths)), dvalues.dtype)
    row = np.arange(len(slots))
    rest, stop = slots.astype(np.int64), sum(widths)
    for width in reversed(widths):
        column = stop - width + rest % width
        for position in range(slots.shape[1]):
            dscores[row, column[:, position]] += dvalues[:, position]
        rest, stop = rest // width, stop - width
    return dscores


def mix(word: np.ndarray) -> np.ndarray:
    """Return the splitmix64 finaliser of each unsigned 64-bit word: a bijection that spreads every bit.

    z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31

    >>> hex(mix(np.array([1], dtype=np.uint64))[0])
    '0x5692161d100b05e5'
    """
    word = (word ^ (word >> np.uint64(30))) * MIX_1
    word = (word ^ (word >> np.uint64(27))) * MIX_2
    return word ^ (word >> np.uint64(31))


def hash_slots_forward(ids: np.ndarray, num_slots: int, k: int, seed: int) -> np.ndarray:
    """Return k distinct slots per id, drawn from a hash of (id, seed): the control that ignores content.

    All arithmetic is on unsigned 64-bit words, modulo 2**64; ids and seeds below zero are taken
    in two's complement. With G = 0x9E3779B97F4A7C15 and :func:`mix`::

        start = mix(id XOR mix(seed + G))
        for j = 0 .. k - 1:
            top  = num_slots - k + j
            slot = mix(start + (j + 1) * G) mod (top + 1)
            if slot was drawn before, slot = top

    This is Floyd's sampling: exactly k draws whatever k, also for k = num_slots, and every set of k
    slots has the same probability up to the rounding of the modulo (below num_slots / 2**64). `top`
    itself cannot have been drawn before, since all earlier draws lie below it.

    Parameters
    ----------
    ids : array [n], int64
        Token ids or positions; any integers.
    num_slots : int
        Number of slots N.
    k : int
        Slots per id, at most `num_slots`.
    seed : int
        Any integer; taken modulo 2**64.

    Returns
    -------
    array [n, k], int32
        Distinct, ascending.

    Examples
    --------
    >>> hash_slots_forward(np.array([7, -7]), 100, 4, seed=0)
    array([[ 0, 55, 86, 87],
           [10, 42, 72, 97]], dtype=int32)
    """
    start = mix(ids.astype(np.uint64) ^ mix(np.array([seed & WORD], np.uint64) + GOLDEN))
    slots = np.empty((len(ids), k), np.uint64)
    for j in range(k):
        top = num_slots - k + j
        word = mix(start + np.array([(j + 1) * int(GOLDEN) & WORD], np.uint64))
        slot = word % np.uint64(top + 1)
        repeated = (slots[:, :j] == slot[:, None]).any(axis=1)
        slots[:, j] = np.where(repeated, np.uint64(top), slot)
    return np.sort(slots, axis=1).astype(np.int32)
