"""Retrieval by distance on the CPU: the nearest sub-keys of each half, the best pairs of them, their weights.

    u = epsilon + |q - K_j|^2,  s = -log u,  slot (i, j) scores s_i + s_j,  w = softmax over a token's H k slots

Distances are sums of squared differences (16 partial sums, a fixed tree): exact to rounding also where a query lies on
a key. From a batch on, a screen (`screen.py`) says which few sub-keys may be among the nearest, and distances are taken
of these alone; a token alone has them taken of all. Which way it went shows in no bit.

Shapes: queries [n, H, 2h], keys [H, 2, m, h], flat below as tables [2H m, h]. Ownership: a job is ROWS tokens.
Bytes per token: 4 H m h of packed keys from a near cache, ROWS tokens at a time, and k h itemsize of keys and a few
more; scratch is O(ROWS m) a thread. Twin: `sdm_lite/reference/nearest.py`.
"""

from __future__ import annotations

import math

import numpy as np

from ..rooms import Lookup
from . import memory, pool
from .addressing import keys_of, stages
from .compile import inlined, kernel
from .forward import NARROW
from .screen import ROWS, block_for, borrow_screen, candidates, limit_of, pack, screen_block
from .select import add_pairs, borrow_scratch, choose, order_keys, scratch, to_rank_list
from .vector import borrowed, fma, load, sub, total, zeros

SCREEN_FROM = 64  # tokens of a call from which packing the keys pays


def idw_product_key_topk_forward(queries: np.ndarray, keys: np.ndarray, k: int, epsilon: float) -> Lookup:
    """Return the k nearest slots of each head and their weights; see `sdm_lite/reference/nearest.py`."""
    tokens, (heads, _, sub_keys, width) = len(queries), keys.shape
    kept, dtype, count = min(k, sub_keys), queries.dtype, 2 * heads
    weights, slots = np.empty((tokens, heads, k), dtype), np.empty((tokens, heads, k), np.int32)
    columns = np.empty((tokens, heads, 2, kept), np.int32)
    distances = np.empty(columns.shape, dtype)
    tables = memory.for_kernels(keys).reshape(count * sub_keys, width)
    flat = memory.for_kernels(queries).reshape(tokens * count, width)
    packed = pack(tables if tokens >= SCREEN_FROM and kept < sub_keys else tables[:0], count)
    near = (columns.reshape(tokens, count, kept), distances.reshape(tokens, count, kept))
    best = (slots.reshape(tokens, heads * k), weights.reshape(tokens, heads * k))
    _, pairs, starts = stages((kept, kept), k)
    widths, limit, epsilon = np.array((sub_keys, sub_keys)), limit_of(width), dtype.type(epsilon)

    waiting: list[tuple] = []  # scratch that no thread is using: a fresh page costs as much as some tokens

    def job(lo: int, hi: int) -> None:
        try:
            block, work = waiting.pop()
        except IndexError:
            block = block_for(width, sub_keys, kept, ROWS if len(packed.scale) else 0)
            work = scratch(dtype, widths, starts, k)
        tokens_of = (lo * ROWS, min(hi * ROWS, tokens))
        numbers = (limit, epsilon, pairs, *keys_of(dtype))
        _nearest(*tokens_of, flat, tables, count, packed, block, *numbers, work, *near, *best)
        waiting.append((block, work))

    pool.run(-(-tokens // ROWS), job, tokens * keys.size)
    return Lookup(weights, slots, columns, distances)


@kernel
def _nearest(
    lo, hi, queries, tables, count, packed, block, limit, epsilon, pairs, lowest, minus_infinity, work_arrays, columns,
    distances, slots, weights,
):  # fmt: skip
    """Find columns, distances [n, 2H, c], slots and weights [n, H k] of the tokens lo .. hi; pairs are the staircase.

    The screen is used where there are packed keys.
    """
    packed, block = borrow_screen(packed, block)
    queries, tables, pairs = borrowed(queries), borrowed(tables), borrowed(pairs)
    columns, distances, slots, weights = borrowed(columns), borrowed(distances), borrowed(slots), borrowed(weights)
    floats, integers, longs, hints, work = borrow_scratch(work_arrays)
    near, scores, bits = borrowed(longs[1]), borrowed(floats[3]), borrowed(integers[3])
    zero, sub_keys, kept = zeros(tables.dtype, NARROW), tables.shape[0] // count, columns.shape[2]
    width, screened = tables.shape[1], packed.scale.shape[0] > 0
    for t0 in range(lo, hi, ROWS):
        rows = min(ROWS, hi - t0)
        for table in range(count):
            if screened:
                screen_block(queries, t0, rows, table, count, limit, packed, block)
            for t in range(rows):
                if screened:
                    n = candidates(block, t, width, sub_keys, kept, np.float64(epsilon), near)
                else:
                    n = sub_keys
                    for j in range(n):
                        near[j] = j
                for i in range(n):
                    key = table * sub_keys + near[i]
                    scores[i] = -_distance(queries, (t0 + t) * count + table, tables, key, epsilon, zero)
                order_keys(bits, 0, n, lowest, minus_infinity, work.keys)
                choose(n, kept, False, pairs, 0, 0, longs, lowest, borrowed(hints[0]), work)
                for i in range(kept):
                    columns[t0 + t, table, i] = near[work.found[i]]
                    distances[t0 + t, table, i] = -scores[work.found[i]]
        for t in range(t0, t0 + rows):
            for head in range(count // 2):
                _best_pairs(t, head, sub_keys, pairs, lowest, minus_infinity, floats, integers, longs, hints, work,
                            columns, distances, slots, weights)  # fmt: skip
            _softmax(t, weights)


@inlined
def _distance(queries, q, tables, key, epsilon, zero):
    """Return epsilon + |queries[q] - tables[key]|^2 by differences."""
    partial, width = zero, tables.shape[1]
    c = 0
    while c + NARROW <= width:
        difference = sub(load(queries, q, c, zero, None), load(tables, key, c, zero, None))
        partial = fma(difference, difference, partial)
        c += NARROW
    if c < width:
        difference = sub(load(queries, q, c, zero, width - c), load(tables, key, c, zero, width - c))
        partial = fma(difference, difference, partial)
    return epsilon + total(partial)


@inlined
def _best_pairs(
    t, head, sub_keys, pairs, lowest, minus_infinity, floats, integers, longs, hints, work, columns, distances, slots,
    weights,
):  # fmt: skip
    """Set one head's slots to its k best pairs of kept columns, ascending; their scores go where weights will stand."""
    kept, k, count = columns.shape[2], slots.shape[1] // (columns.shape[1] // 2), pairs.shape[1]
    list_values, list_slots = borrowed(floats[5:]), borrowed(longs[2:])
    values, sums, places = borrowed(floats[4]), borrowed(floats[3]), borrowed(longs[1])
    for half in range(2):
        table = 2 * head + half
        for i in range(kept):
            values[i] = -math.log(distances[t, table, i])
            places[i] = work.found[i] = i
        order_keys(borrowed(integers[4]), 0, kept, lowest, minus_infinity, work.keys)
        to_rank_list(values, places, kept, lowest, work, borrowed(list_values[half]), borrowed(list_slots[half]))
    add_pairs(list_values, pairs, 0, count, sums)
    order_keys(borrowed(integers[3]), 0, count, lowest, minus_infinity, work.keys)
    choose(count, k, True, pairs, 0, kept, list_slots, lowest, borrowed(hints[1]), work)
    for a in range(k):
        place = work.found[a]
        i, j, sum_ = list_slots[0, pairs[0, place]], list_slots[1, pairs[1, place]], sums[place]
        slots[t, head * k + a] = columns[t, 2 * head, i] * sub_keys + columns[t, 2 * head + 1, j]
        weights[t, head * k + a] = sum_ if sum_ == sum_ else weights.dtype.type(-np.inf)


@inlined
def _softmax(t, weights):
    """Turn the scores of a token into weights that sum to 1."""
    highest, sum_ = weights.dtype.type(-np.inf), weights.dtype.type(0)
    for a in range(weights.shape[1]):
        highest = max(highest, weights[t, a])
    for a in range(weights.shape[1]):
        weights[t, a] = math.exp(weights[t, a] - highest)
        sum_ += weights[t, a]
    for a in range(weights.shape[1]):
        weights[t, a] /= sum_
