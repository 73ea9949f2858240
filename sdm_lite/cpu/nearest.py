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


def idw_product_key_topk_forward(queries: np.ndarray, keys: np.ndarray, k: int, epsilon: float) -> Lookup:
    """Return the k nearest slots of each head and their weights; see `sdm_lite/reference/nearest.py`."""
    tokens, (heads, _, sub_keys, width) = len(queries), keys.shape
    kept, dtype, count = min(k, sub_keys), queries.dtype, 2 * heads
    weights, slots = np.empty((tokens, heads, k), dtype), np.empty((tokens, heads, k), np.int32)
    columns = np.empty((tokens, heads, 2, kept), np.int32)
    distances = np.empty(columns.shape, dtype)
    tables = memory.for_kernels(keys).reshape(count * sub_keys, width)
    flat = memory.for_kernels(queries).reshape(tokens * count, width)
    packed = _pack(tables, count) if tokens >= SCREEN_FROM and kept + SPARE < sub_keys else None
    near = (columns.reshape(tokens, count, kept), distances.reshape(tokens, count, kept))
    best = (slots.reshape(tokens, heads * k), weights.reshape(tokens, heads * k))
    epsilon = dtype.type(epsilon)

    def job(lo: int, hi: int) -> None:
        most = min(ROWS, hi - lo)
        every, pair = _Selection(dtype, most, (sub_keys,), kept), _Selection(dtype, most, (kept, kept), k)
        screen = None if packed is None else _Screen(tables, count, *packed, kept)
        for t0 in range(lo, hi, ROWS):
            rows = min(ROWS, hi - t0)
            for table in range(count):
                doubtful = np.arange(rows) if screen is None else screen.nearest(flat, t0, rows, table, epsilon, *near)
                if len(doubtful):
                    _all_distances(flat, t0, doubtful, table, count, tables, epsilon, every.scores)
                    every.select(len(doubtful))
                    _take(t0, doubtful, table, every.scores, every.slots, *near)
                if table % 2:
                    _pair_scores(t0, rows, table, near[1], pair.scores)
                    pair.select(rows)
                    _to_slots(t0, rows, table, sub_keys, near[0], pair.values, pair.slots, *best)
            _softmax(t0, t0 + rows, best[1])

    pool.run(tokens, job, tokens * keys.size)
    return Lookup(weights, slots, columns, distances)


class _Selection:
    """Room for selecting the k greatest of each of some rows of scores, and what was chosen."""

    def __init__(self, dtype: np.dtype, rows: int, widths: tuple[int, ...], k: int):
        integer = np.dtype(f"i{dtype.itemsize}").type
        lowest = np.iinfo(integer).min
        self.bounds = (integer(lowest), integer(lowest - int(np.array(-np.inf, dtype).view(integer))))
        self.scores = np.zeros(rows * sum(widths), dtype)
        self.bits = self.scores.view(integer)
        self.stages = stages(widths, k)
        self.work = scratch(dtype, self.stages[0], self.stages[2], k)
        self.values, self.slots = np.empty((rows, k), dtype), np.empty((rows, k), np.int32)

    def select(self, rows: int) -> None:
        """Set the first `rows` of `values` and `slots`; slots ascend."""
        topk_rows(self.scores, self.bits, *self.stages, *self.bounds, 0, rows, self.work, self.values, self.slots)


class _Screen:
    """Finds the nearest sub-keys of a block of tokens by the screen, and knows the rows it cannot vouch for."""

    def __init__(self, tables: np.ndarray, count: int, packed: np.ndarray, norms: np.ndarray, kept: int):
        self.tables, self.count, self.packed, self.norms = tables, count, packed, norms
        sub_keys = len(tables) // count
        self.block = np.zeros((ROWS, tables.shape[1]), tables.dtype)
        self.screen = _Selection(tables.dtype, ROWS, (sub_keys,), kept + SPARE)
        self.near = _Selection(tables.dtype, ROWS, (kept + SPARE,), kept)

    def nearest(
        self, queries: np.ndarray, t0: int, rows: int, table: int, epsilon: float, columns: np.ndarray, distances
    ) -> np.ndarray:
        """Set columns and distances of one table for the tokens t0 .. t0 + rows; return which rows are doubtful."""
        screen, near = self.screen, self.near
        by_row = screen.scores.reshape(ROWS, -1)
        largest = _screen_block(queries, t0, rows, table, self.count, self.packed, self.norms, self.block, by_row)
        screen.select(rows)
        _proposed_distances(queries, t0, rows, table, self.count, self.tables, epsilon, screen.slots, near.scores)
        near.select(rows)
        doubtful = np.empty(rows, np.int64)
        found = _accept(
            t0, rows, table, self.block, epsilon, largest, screen.values, screen.slots, near.scores, near.values,
            near.slots, columns, distances, doubtful,
        )  # fmt: skip
        return doubtful[:found]


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
def _screen_panel(block, packed, norms, panel, rows, scores, column, n, zero):
    """Set scores[t, column ..] = q_t K - |K|^2 / 2 of one panel for the tokens of the block, GROUP at a time."""
    width = block.shape[1]
    start, first = load(norms, panel, 0, zero, None), panel * width
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


@kernel
def _screen_block(queries, t0, rows, table, count, packed, norms, block, scores):
    """Fill the screen's scores [ROWS, m] of one table for the tokens t0 .. t0 + rows; return its largest |K|^2."""
    queries, packed, norms, block, scores = (
        borrowed(queries),
        borrowed(packed),
        borrowed(norms),
        borrowed(block),
        borrowed(scores),
    )
    zero, sub_keys = zeros(block.dtype, NARROW), scores.shape[1]
    panels = norms.shape[0] // count
    for t in range(rows):
        for d in range(block.shape[1]):
            block[t, d] = queries[(t0 + t) * count + table, d]
    largest = block.dtype.type(0)
    for p in range(panels):
        panel, column = table * panels + p, p * NARROW
        for lane in range(NARROW):
            largest = max(largest, -2 * norms[panel, lane])
        if column + NARROW <= sub_keys:
            _screen_panel(block, packed, norms, panel, rows, scores, column, None, zero)
        else:
            _screen_panel(block, packed, norms, panel, rows, scores, column, sub_keys - column, zero)
    return largest


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


@kernel
def _proposed_distances(queries, t0, rows, table, count, tables, epsilon, slots, scores):
    """Set scores = -u of the sub-keys that the screen proposes, slots [rows, proposed]."""
    queries, tables = borrowed(queries), borrowed(tables)
    zero, first = zeros(tables.dtype, NARROW), table * (tables.shape[0] // count)
    for t in range(rows):
        for i in range(slots.shape[1]):
            u = _distance(queries, (t0 + t) * count + table, tables, first + slots[t, i], epsilon, zero)
            scores[t * slots.shape[1] + i] = -u


@kernel
def _all_distances(queries, t0, chosen, table, count, tables, epsilon, scores):
    """Set scores = -u of all sub-keys, for the tokens t0 + chosen."""
    queries, tables = borrowed(queries), borrowed(tables)
    zero, sub_keys = zeros(tables.dtype, NARROW), tables.shape[0] // count
    for row in range(chosen.size):
        q = (t0 + chosen[row]) * count + table
        for j in range(sub_keys):
            scores[row * sub_keys + j] = -_distance(queries, q, tables, table * sub_keys + j, epsilon, zero)


@kernel
def _take(t0, chosen, table, scores, slots, columns, distances):
    """Keep the selected of all sub-keys."""
    sub_keys = scores.size // slots.shape[0]
    for row in range(chosen.size):
        for i in range(slots.shape[1]):
            columns[t0 + chosen[row], table, i] = slots[row, i]
            distances[t0 + chosen[row], table, i] = -scores[row * sub_keys + slots[row, i]]


@kernel
def _accept(
    t0, rows, table, block, epsilon, largest, screened, proposals, scores, values, slots, columns, distances, doubtful
):
    """Keep the nearest of the proposed sub-keys, and note the rows where one left out might be nearer.

    Rounding: a screened score is within (h + 2) unit (|q|^2 + |K|^2) / 2 of its value, a distance by differences
    within (h + 2) unit of itself, at most 2 (|q|^2 + |K|^2): `slack` bounds what both can do to a comparison, twice.
    A NaN makes the comparison false.
    """
    width, proposed, found = block.shape[1], proposals.shape[1], 0
    unit = 4 * (width + 8) * np.finfo(block.dtype).eps
    for t in range(rows):
        square = 0.0
        for d in range(width):
            square += np.float64(block[t, d]) * np.float64(block[t, d])
        lowest_screened, farthest = np.float64(np.inf), np.float64(-np.inf)
        for i in range(proposed):
            lowest_screened = min(lowest_screened, np.float64(screened[t, i]))
        for i in range(slots.shape[1]):
            place = slots[t, i]
            u = -scores[t * proposed + place]
            farthest = max(farthest, np.float64(u))
            columns[t0 + t, table, i] = proposals[t, place]
            distances[t0 + t, table, i] = u
        slack = unit * (square + np.float64(largest))
        if not farthest - np.float64(epsilon) < square - 2 * lowest_screened - slack:
            doubtful[found] = t
            found += 1
    return found


@kernel
def _pair_scores(t0, rows, table, distances, scores):
    """Set scores = -log u of both halves, [rows, 2 c], of the head whose second half is `table`."""
    kept = distances.shape[2]
    for t in range(rows):
        for half in range(2):
            for i in range(kept):
                scores[(2 * t + half) * kept + i] = -math.log(distances[t0 + t, table - 1 + half, i])


@kernel
def _to_slots(t0, rows, table, sub_keys, columns, values, chosen, slots, weights):
    """Translate the chosen pairs of kept columns into slots; their scores go where the weights will stand."""
    k, kept, head = chosen.shape[1], columns.shape[2], table // 2
    for t in range(rows):
        for a in range(k):
            i, j = divmod(np.int64(chosen[t, a]), kept)
            slots[t0 + t, head * k + a] = columns[t0 + t, table - 1, i] * sub_keys + columns[t0 + t, table, j]
            weights[t0 + t, head * k + a] = values[t, a]


@kernel
def _softmax(first, last, weights):
    """Turn the scores of each token into weights that sum to 1."""
    for t in range(first, last):
        highest, sum_ = weights.dtype.type(-np.inf), weights.dtype.type(0)
        for a in range(weights.shape[1]):
            highest = max(highest, weights[t, a])
        for a in range(weights.shape[1]):
            weights[t, a] = math.exp(weights[t, a] - highest)
            sum_ += weights[t, a]
        for a in range(weights.shape[1]):
            weights[t, a] /= sum_
