"""Retrieval by distance on the CPU: the nearest sub-keys of each half, the best pairs of them, their weights.

    u = epsilon + |q - K_j|^2,  s = -log u,  slot (i, j) scores s_i + s_j,  w = softmax over a token's H k slots

Distances that count are sums of squared differences (16 partial sums, a fixed tree): exact to rounding also where
a query lies on a key. Most sub-keys are kept from that by a *screen*: x_j = q K_j - |K_j|^2 / 2, a matrix product
in registers, has |q - K_j|^2 = |q|^2 - 2 x_j. It is rounded otherwise, so it only proposes SPARE more sub-keys than
wanted, and is believed only where the first one left out is farther than the last one chosen by more than both
roundings together; any other row, and every row with a NaN, is done by differences over all sub-keys. Which way a
row went therefore shows in no bit: a token alone, which is not screened, gets what it gets in a batch.

Shapes: queries [n, H, 2h], keys [H, 2, m, h], flat below as tables [2H m, h]. Ownership: a job is a token.
Bytes per token: 2 H m h itemsize of packed keys from a near cache, ROWS tokens at a time; scratch is
O(ROWS m) a thread. Twin: `sdm_lite/reference/nearest.py`.
"""

from __future__ import annotations

import math
from collections import namedtuple

import numpy as np

from ..rooms import Lookup
from . import memory, pool
from .addressing import stages
from .compile import inlined, kernel
from .forward import NARROW
from .select import scratch, topk_rows
from .vector import borrowed, fma, load, splat, store, sub, total, zeros

ROWS, GROUP = 48, 6  # tokens of a block, and of those in registers at once
SPARE = 8  # sub-keys that the screen proposes beyond those wanted
SCREEN_FROM = 64  # tokens of a call from which packing the keys pays

#: one selection's place: scores [rows * columns] and their bits, the stages, scratch, and what is chosen
_Selection = namedtuple("_Selection", "scores bits widths pairs starts work values slots")


def idw_product_key_topk_forward(queries: np.ndarray, keys: np.ndarray, k: int, epsilon: float) -> Lookup:
    """Return the k nearest slots of each head and their weights; see `sdm_lite/reference/nearest.py`."""
    tokens, (heads, _, sub_keys, width) = len(queries), keys.shape
    kept = min(k, sub_keys)
    dtype = queries.dtype
    weights, slots = np.empty((tokens, heads, k), dtype), np.empty((tokens, heads, k), np.int32)
    columns = np.empty((tokens, heads, 2, kept), np.int32)
    distances = np.empty(columns.shape, dtype)
    tables = memory.for_kernels(keys).reshape(2 * heads * sub_keys, width)
    flat = memory.for_kernels(queries).reshape(tokens * 2 * heads, width)
    proposed = kept + SPARE
    screened = tokens >= SCREEN_FROM and proposed < sub_keys
    packed, norms = _pack(tables, 2 * heads) if screened else (np.empty((0, NARROW), dtype), np.empty((0, 1), dtype))
    integer = np.dtype(f"i{dtype.itemsize}").type
    lowest = np.iinfo(integer).min
    bounds = (integer(lowest), integer(lowest - int(np.array(-np.inf, dtype).view(integer))))
    out = (columns.reshape(tokens, 2 * heads, kept), distances.reshape(tokens, 2 * heads, kept))
    flat_slots, flat_weights = slots.reshape(tokens, heads * k), weights.reshape(tokens, heads * k)

    def job(lo: int, hi: int) -> None:
        screen = _selection(dtype, ROWS, (sub_keys,), min(proposed, sub_keys))
        near = _selection(dtype, ROWS, (min(proposed, sub_keys),), kept)
        every = _selection(dtype, 1, (sub_keys,), kept)
        pair = _selection(dtype, ROWS, (kept, kept), k)
        block = np.zeros((ROWS, width), dtype)
        _nearest(
            lo, hi, flat, tables, packed, norms, dtype.type(epsilon), bounds, block, screen, near, every, pair, *out,
            flat_slots, flat_weights,
        )  # fmt: skip

    pool.run(tokens, job, tokens * keys.size)
    return Lookup(weights, slots, columns, distances)


def _selection(dtype: np.dtype, rows: int, widths: tuple[int, ...], k: int) -> _Selection:
    scores = np.zeros(rows * sum(widths), dtype)
    width_array, pairs, starts = stages(widths, k)
    work = scratch(dtype, width_array, starts, k)
    values, slots = np.empty((rows, k), dtype), np.empty((rows, k), np.int32)
    return _Selection(scores, scores.view(f"i{dtype.itemsize}"), width_array, pairs, starts, work, values, slots)


def _pack(tables: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys by panels of NARROW sub-keys, transposed, and minus half their squared norms [panels, NARROW]."""
    sub_keys, width = len(tables) // count, tables.shape[1]
    panels = -(-sub_keys // NARROW)
    packed = np.zeros((count * panels * width, NARROW), tables.dtype)
    norms = np.zeros((count * panels, NARROW), tables.dtype)
    pool.run(count * panels, lambda lo, hi: _pack_panels(lo, hi, tables, count, packed, norms), tables.size)
    return packed, norms


@kernel
def _pack_panels(lo, hi, tables, count, packed, norms):
    sub_keys, width = tables.shape[0] // count, tables.shape[1]
    panels = norms.shape[0] // count
    for panel in range(lo, hi):
        first = (panel % panels) * NARROW
        for lane in range(min(NARROW, sub_keys - first)):
            row = (panel // panels) * sub_keys + first + lane
            square = tables.dtype.type(0)
            for d in range(width):
                packed[panel * width + d, lane] = tables[row, d]
                square += tables[row, d] * tables[row, d]
            norms[panel, lane] = -square / 2


@inlined
def _select(selection, rows, bounds):
    topk_rows(
        selection.scores, selection.bits, selection.widths, selection.pairs, selection.starts, bounds[0], bounds[1],
        0, rows, selection.work, selection.values, selection.slots,
    )  # fmt: skip


@inlined
def _distance(queries, q, tables, key, width, epsilon, zero):
    """Return epsilon + |queries[q] - tables[key]|^2 by differences."""
    partial = zero
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
def _screen_panel(block, packed, norms, panel, first, rows, scores, column, n, zero):
    """Set scores[t, column ..] = q_t K - |K|^2 / 2 of one panel for the tokens of the block, GROUP at a time."""
    width = block.shape[1]
    start = load(norms, panel, 0, zero, None)
    for t in range(0, rows, GROUP):
        a0, a1, a2, a3, a4, a5 = start, start, start, start, start, start
        for d in range(width):
            key = load(packed, first + d, 0, zero, None)
            a0 = fma(splat(block[t, d], zero), key, a0)
            a1 = fma(splat(block[t + 1, d], zero), key, a1)
            a2 = fma(splat(block[t + 2, d], zero), key, a2)
            a3 = fma(splat(block[t + 3, d], zero), key, a3)
            a4 = fma(splat(block[t + 4, d], zero), key, a4)
            a5 = fma(splat(block[t + 5, d], zero), key, a5)
        store(scores, t, column, a0, n)
        store(scores, t + 1, column, a1, n)
        store(scores, t + 2, column, a2, n)
        store(scores, t + 3, column, a3, n)
        store(scores, t + 4, column, a4, n)
        store(scores, t + 5, column, a5, n)


@inlined
def _screen(queries, t0, rows, table, count, sub_keys, packed, norms, block, scores, zero):
    """Fill the screen's scores of one table for the tokens t0 .. t0 + rows; return its largest |K|^2."""
    width, panels = block.shape[1], norms.shape[0] // count
    for t in range(rows):
        for d in range(width):
            block[t, d] = queries[(t0 + t) * count + table, d]
    largest = scores.dtype.type(0)
    for p in range(panels):
        panel, column = table * panels + p, p * NARROW
        for lane in range(NARROW):
            largest = max(largest, -2 * norms[panel, lane])
        if column + NARROW <= sub_keys:
            _screen_panel(block, packed, norms, panel, panel * width, rows, scores, column, None, zero)
        else:
            _screen_panel(block, packed, norms, panel, panel * width, rows, scores, column, sub_keys - column, zero)
    return largest


@inlined
def _square(queries, q):
    square = queries.dtype.type(0)
    for d in range(queries.shape[1]):
        square += queries[q, d] * queries[q, d]
    return square


@inlined
def _differences_of(columns, count, queries, q, tables, first, epsilon, zero, scores, start):
    """Set scores[start + i] = -u of the sub-keys columns[i], or of all where it is empty."""
    for i in range(count):
        key = first + (np.int64(columns[i]) if columns.size else i)
        scores[start + i] = -_distance(queries, q, tables, key, tables.shape[1], epsilon, zero)


@kernel
def _nearest(
    lo, hi, queries, tables, packed, norms, epsilon, bounds, block, screen, near, every, pair, columns, distances,
    slots, weights,
):  # fmt: skip
    """Retrieve for the tokens lo .. hi."""
    queries, tables, packed, norms, block = (
        borrowed(queries),
        borrowed(tables),
        borrowed(packed),
        borrowed(norms),
        borrowed(block),
    )
    count, kept, zero = columns.shape[1], columns.shape[2], zeros(tables.dtype, NARROW)
    sub_keys, width = tables.shape[0] // count, tables.shape[1]
    proposed, k = near.scores.size // ROWS, pair.slots.shape[1]
    by_row = screen.scores.reshape(ROWS, sub_keys)
    unit = 4 * (width + 8) * np.finfo(tables.dtype).eps  # bounds the roundings of screen and differences together
    nothing = np.empty(0, np.int32)
    for t0 in range(lo, hi, ROWS):
        rows = min(ROWS, hi - t0)
        for table in range(count):
            first, largest = table * sub_keys, tables.dtype.type(0)
            if packed.shape[0]:
                largest = _screen(queries, t0, rows, table, count, sub_keys, packed, norms, block, by_row, zero)
                _select(screen, rows, bounds)
                for t in range(rows):
                    q, near_start = (t0 + t) * count + table, t * proposed
                    _differences_of(
                        screen.slots[t], proposed, queries, q, tables, first, epsilon, zero, near.scores, near_start
                    )
                _select(near, rows, bounds)
            for t in range(rows):
                q, certain = (t0 + t) * count + table, False
                if packed.shape[0]:
                    square = np.float64(_square(queries, q))
                    farthest = -np.float64(near.values[t].min()) - np.float64(epsilon)
                    left_out = square - 2 * np.float64(screen.values[t].min())
                    certain = farthest < left_out - unit * (square + np.float64(largest))
                if not certain:
                    _differences_of(nothing, sub_keys, queries, q, tables, first, epsilon, zero, every.scores, 0)
                    _select(every, 1, bounds)
                for i in range(kept):
                    if certain:
                        place = near.slots[t, i]
                        column, u = screen.slots[t, place], -near.scores[t * proposed + place]
                    else:
                        column = every.slots[0, i]
                        u = -every.scores[column]
                    columns[t0 + t, table, i] = column
                    distances[t0 + t, table, i] = u
                    pair.scores[t * 2 * kept + (table % 2) * kept + i] = -math.log(u)
            if table % 2:
                _select(pair, rows, bounds)
                for t in range(rows):
                    for a in range(k):
                        i, j = divmod(pair.slots[t, a], kept)
                        row = columns[t0 + t, table - 1, i] * sub_keys + columns[t0 + t, table, j]
                        slots[t0 + t, (table // 2) * k + a] = row
                        weights[t0 + t, (table // 2) * k + a] = pair.values[t, a]
        for t in range(t0, t0 + rows):
            _softmax(weights[t])


@inlined
def _softmax(scores):
    """Turn the scores of a token into weights that sum to 1."""
    highest = scores.dtype.type(-np.inf)
    for score in scores:
        highest = max(highest, score)
    sum_ = scores.dtype.type(0)
    for a in range(scores.size):
        scores[a] = math.exp(scores[a] - highest)
        sum_ += scores[a]
    for a in range(scores.size):
        scores[a] /= sum_
