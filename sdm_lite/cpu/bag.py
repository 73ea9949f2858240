"""Weighted sums of table rows (embedding bag), their derivatives, and the numbering of slots.

    y_t     = sum_a w_ta V[slot_ta]                    a ascending, one fma each
    dV[i]   = sum over the reads (t, a) of slot i of w_ta dy_t      t ascending, then a
    dw_ta   = <V[slot_ta], dy_t>                       16 partial sums, then a fixed tree

Shapes: values [S, D]; slots [n, K] int32; weights [n, K]; y, dy [n, D]. Ownership: a job is a token, or in the
backward of the values a slot that is read, so nothing depends on threads. Bytes: forward and both backwards
move n K D itemsize of rows; the gradient of the values starts as untouched zero pages and only the rows that
are read are written. Twin: `sdm_lite/reference/bag.py`.
"""

from __future__ import annotations

import numpy as np

from . import memory, pool
from .compile import inlined, kernel, same_types
from .forward import BLOCK, NARROW, weighted_rows
from .vector import borrowed, fma, load, prefetch, splat, store, total, zeros


def embedding_bag_forward(values: np.ndarray, slots: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return y [n, D]."""
    readings = memory.empty((len(slots), values.shape[1]), values.dtype)
    values, slots, weights = (memory.for_kernels(x) for x in (values, slots, weights))
    kernel = same_types(_sum_rows, values.dtype)

    def job(lo: int, hi: int) -> None:
        kernel(lo, hi, values, slots, weights, readings)

    pool.run(len(slots), job, slots.size * values.shape[1])
    return readings


def embedding_bag_backward(dreadings: np.ndarray, slots: np.ndarray, weights: np.ndarray, num_slots: int) -> np.ndarray:
    """Return dV [num_slots, D]."""
    width = dreadings.shape[1]
    dvalues = np.zeros((num_slots, width), dreadings.dtype)
    dreadings, slots, weights = (memory.for_kernels(x) for x in (dreadings, slots, weights))
    start, order, used = _by_slot(slots, num_slots)

    def job(lo: int, hi: int) -> None:
        _sum_reads(lo, hi, used, start, order, dreadings, weights, dvalues)

    pool.run(len(used), job, slots.size * width)
    return dvalues


def embedding_bag_weights_backward(dreadings: np.ndarray, values: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Return dw [n, K]."""
    dweights = np.empty(slots.shape, dreadings.dtype)
    dreadings, values, slots = (memory.for_kernels(x) for x in (dreadings, values, slots))

    def job(lo: int, hi: int) -> None:
        _dot_rows(lo, hi, dreadings, values, slots, dweights)

    pool.run(len(slots), job, slots.size * dreadings.shape[1])
    return dweights


def number_slots(slots: np.ndarray, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct slots [U], ascending, and the place of each slot among them [n, K]; both int32."""
    if slots.size * 8 < num_slots:  # few slots of many: sorting them is less than a pass over the table's slots
        rows, places = np.unique(slots, return_inverse=True)
        return rows.astype(np.int32), places.reshape(slots.shape).astype(np.int32)
    slots = memory.for_kernels(slots)
    rows, places = np.empty(min(slots.size, num_slots), np.int32), np.empty(slots.shape, np.int32)
    return rows[: _number(slots.reshape(-1), num_slots, rows, places.reshape(-1))], places


def _by_slot(slots: np.ndarray, num_slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (start, order, used): the slots that are read, and the u-th one's reads order[start[u] : start[u + 1]]."""
    used, places = number_slots(slots, num_slots)
    start, order = np.zeros(len(used) + 1, np.int64), np.empty(slots.size, np.int32)
    _counting_sort(places.reshape(-1), start, order)
    return start, order, used


@kernel
def _sum_rows(lo, hi, values, slots, weights, readings):
    values, slots, weights, readings = borrowed(values), borrowed(slots), borrowed(weights), borrowed(readings)
    width = values.shape[1]
    wide, narrow = zeros(values.dtype, BLOCK), zeros(values.dtype, NARROW)
    for t in range(lo, hi):
        row = borrowed(weights[t])
        c = 0
        while c + BLOCK <= width:
            for a in range(slots.shape[1]):  # rows lie anywhere: ask for the next token's while this one's are summed
                prefetch(values, np.int64(slots[min(t + 1, hi - 1), a]), c, wide)
            store(readings, t, c, weighted_rows(values, 0, slots, t, row, c, wide, None), None)
            c += BLOCK
        while c + NARROW <= width:
            store(readings, t, c, weighted_rows(values, 0, slots, t, row, c, narrow, None), None)
            c += NARROW
        if c < width:
            store(readings, t, c, weighted_rows(values, 0, slots, t, row, c, narrow, width - c), width - c)


@inlined
def _reads_of(dreadings, weights, order, first, last, c, zero, n):
    """Return the sum over the reads of one slot of w dy[c : c + lanes], in their order."""
    total, count = zero, weights.shape[1]
    for read in range(first, last):
        t, a = divmod(np.int64(order[read]), count)
        total = fma(splat(weights[t, a], zero), load(dreadings, t, c, zero, n), total)
    return total


@kernel
def _sum_reads(lo, hi, used, start, order, dreadings, weights, dvalues):
    dreadings, weights, dvalues, order = borrowed(dreadings), borrowed(weights), borrowed(dvalues), borrowed(order)
    width = dreadings.shape[1]
    wide, narrow = zeros(dreadings.dtype, BLOCK), zeros(dreadings.dtype, NARROW)
    for u in range(lo, hi):
        slot, first, last = np.int64(used[u]), start[u], start[u + 1]
        c = 0
        while c + BLOCK <= width:
            store(dvalues, slot, c, _reads_of(dreadings, weights, order, first, last, c, wide, None), None)
            c += BLOCK
        while c + NARROW <= width:
            store(dvalues, slot, c, _reads_of(dreadings, weights, order, first, last, c, narrow, None), None)
            c += NARROW
        if c < width:
            reads = _reads_of(dreadings, weights, order, first, last, c, narrow, width - c)
            store(dvalues, slot, c, reads, width - c)


@inlined
def dot(a, row_a, b, row_b, width, zero):
    """Return <a[row_a], b[row_b]> over `width` columns: 16 partial sums, then halves in a fixed tree."""
    partial = zero
    c = 0
    while c + NARROW <= width:
        partial = fma(load(a, row_a, c, zero, None), load(b, row_b, c, zero, None), partial)
        c += NARROW
    if c < width:
        partial = fma(load(a, row_a, c, zero, width - c), load(b, row_b, c, zero, width - c), partial)
    return total(partial)


@kernel
def _dot_rows(lo, hi, dreadings, values, slots, dweights):
    dreadings, values, slots = borrowed(dreadings), borrowed(values), borrowed(slots)
    width, last = dreadings.shape[1], slots.shape[1] - 1
    narrow = zeros(dreadings.dtype, NARROW)
    for t in range(lo, hi):
        for a in range(slots.shape[1]):
            if a < last:
                for c in range(0, width, NARROW):
                    prefetch(values, np.int64(slots[t, a + 1]), c, narrow)
            dweights[t, a] = dot(dreadings, t, values, np.int64(slots[t, a]), width, narrow)


@kernel
def _number(slots, num_slots, rows, places):
    place = np.zeros(num_slots, np.int32)
    for slot in slots:
        place[slot] = 1
    count = 0
    for slot in range(num_slots):
        if place[slot]:
            rows[count] = slot
            place[slot] = count
            count += 1
    for i in range(slots.size):
        places[i] = place[slots[i]]
    return count


@kernel
def _counting_sort(places, start, order):
    for place in places:
        start[place + 1] += 1
    for u in range(start.size - 1):
        start[u + 1] += start[u]
    at = start.copy()
    for i in range(places.size):
        order[at[places[i]]] = i
        at[places[i]] += 1
