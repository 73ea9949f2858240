"""Addressing on the CPU: the doors of the product-key selection, its backward, and the hash control.

Rows are independent: threads take ranges of them, and every row is computed alike in any range. The
selection's kernels are in `select.py`. Definitions, shapes and dtypes are those of
`sdm_lite/reference/addressing.py`, and so are the results, bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from . import pool
from .compile import inlined, kernel
from .select import scratch, topk_rows

#: below this many rows a second thread costs more than it saves
_PER_ROW = 1 << 13  # numbers moved that cost what selecting in one row does

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 0xFFFFFFFFFFFFFFFF


def product_key_topk_forward(scores: np.ndarray, widths: Sequence[int], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the k slots with the greatest sums of one score per factor, ascending, and their sums."""
    scores = np.ascontiguousarray(scores)
    values, slots = np.empty((len(scores), k), scores.dtype), np.empty((len(scores), k), np.int32)
    width_array, pairs, starts = stages(tuple(widths), k)
    flat, bits = scores.reshape(-1), scores.view(f"i{scores.itemsize}").reshape(-1)
    bounds = keys_of(scores.dtype)

    def rows(first: int, last: int) -> None:
        work = scratch(scores.dtype, width_array, starts, k)
        topk_rows(flat, bits, width_array, pairs, starts, *bounds, first, last, work, values, slots)

    _over_rows(len(scores), rows)
    return values, slots


def product_key_topk_backward(dvalues: np.ndarray, slots: np.ndarray, widths: Sequence[int]) -> np.ndarray:
    """Return the gradient of the scores: each selected sum's gradient goes to one column of each factor."""
    dvalues, slots = np.ascontiguousarray(dvalues), np.ascontiguousarray(slots)
    dscores = np.zeros((len(slots), sum(widths)), dvalues.dtype)
    width_array = np.array(widths, np.int64)
    _over_rows(len(slots), lambda first, last: _scatter_rows(dvalues, slots, width_array, first, last, dscores))
    return dscores


def hash_slots_forward(ids: np.ndarray, num_slots: int, k: int, seed: int) -> np.ndarray:
    """Return k distinct slots per id, drawn from a hash of (id, seed): the control that ignores content."""
    words = np.ascontiguousarray(ids, np.int64).view(np.uint64)
    slots = np.empty((len(words), k), np.int32)
    salt = np.uint64((int(seed) + _GOLDEN) & _WORD)
    _over_rows(len(words), lambda first, last: _hash_rows(words, num_slots, salt, first, last, slots))
    return slots


def keys_of(dtype: np.dtype) -> tuple[np.integer, np.integer]:
    """Return the lowest integer of a float's size, and the key of -inf (select.py)."""
    integer = np.dtype(f"i{dtype.itemsize}").type
    lowest = np.iinfo(integer).min
    return integer(lowest), integer(lowest - int(np.array(-np.inf, dtype).view(integer)))


def _over_rows(count: int, rows: Callable[[int, int], None]) -> None:
    pool.run(count, rows, _PER_ROW * count)


@functools.lru_cache(maxsize=64)
def stages(widths: tuple[int, ...], k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return widths as an array, the staircases of all combinations, and where each starts.

    Factor f joins the list of all before it by the rank pairs (i, j) with (i + 1) (j + 1) <= k; they are
    columns starts[f - 1] to starts[f] of pairs [2, P].
    """
    starts, stairs = [0], [np.empty((2, 0), np.uint32)]
    for f, width in enumerate(widths[1:], start=1):
        first_length = min(k, math.prod(widths[:f]))
        lengths = np.minimum(k // np.arange(1, first_length + 1), width)  # pairs (i, j) for each i
        begin = np.cumsum(lengths) - lengths
        i = np.repeat(np.arange(first_length), lengths)
        stairs.append(np.stack([i, np.arange(len(i)) - begin[i]]).astype(np.uint32))
        starts.append(starts[-1] + len(i))
    return np.array(widths, np.int64), np.concatenate(stairs, axis=1), np.array(starts, np.int64)


@kernel
def _scatter_rows(dvalues, slots, widths, first, last, dscores):
    for row in range(first, last):
        for i in range(slots.shape[1]):
            rest, stop = np.int64(slots[row, i]), dscores.shape[1]
            for f in range(widths.size - 1, -1, -1):
                width = widths[f]
                dscores[row, stop - width + rest % width] += dvalues[row, i]
                rest //= width
                stop -= width


@inlined
def _mix(word):
    """Finish a 64-bit word as splitmix64 does."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(_MIX_1)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(_MIX_2)
    return word ^ (word >> np.uint64(31))


@kernel
def _hash_rows(words, num_slots, salt, first, last, slots):
    """Draw each row's slots, keeping the row sorted: the draw to come is looked up by halving."""
    k = slots.shape[1]
    key = _mix(salt)
    for row in range(first, last):
        state = _mix(words[row] ^ key)
        for j in range(k):
            state += np.uint64(_GOLDEN)
            top = num_slots - k + j
            slot = np.int64(_mix(state) % np.uint64(top + 1))
            low, high = 0, j
            while low < high:
                middle = (low + high) // 2
                if slots[row, middle] < slot:
                    low = middle + 1
                else:
                    high = middle
            if low < j and slots[row, low] == slot:
                low, slot = j, top  # drawn before: top instead, which is above all earlier draws
            for i in range(j, low, -1):
                slots[row, i] = slots[row, i - 1]
            slots[row, low] = slot
