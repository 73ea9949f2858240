"""Sums of differences between queries and sub-keys: the step of the keys, and the derivatives of distances.

With q(m) half m of a query, j the columns named for (t, head, half) and x a number for each of them:

    into keys     K_j += sum_t x_tj (q_t - K0_j)           t ascending, then the column's place
    into queries  dq_t = sum_j x_tj (q_t - K_j)            places ascending

The step is x = -rate; dL/du passes x = 2 du into queries and -2 du into keys. Shapes: queries [n, H, 2h], keys
[H, 2, m, h], columns [n, H, 2, c] int32, x [n, H, 2, c]; flat below: tables [2H, m, h], halves [n, 2H].
Ownership: into keys a job is (table, tile of columns of h), into queries a token. Bytes: n H 2 c h itemsize of
keys and as many of queries, both small enough for a near cache. Twin: `sdm_lite/reference/nearest.py`.
"""

from __future__ import annotations

import numpy as np

from . import memory, pool
from .bag import dot
from .compile import inlined, kernel
from .forward import NARROW
from .vector import borrowed, fma, load, splat, store, sub, zeros

_TILE = 64  # columns of h in a job


def distances_backward(
    ddistances: np.ndarray, queries: np.ndarray, keys: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return dq = sum_j 2 du_j (q - K_j) and dK_j = -sum_t 2 du_tj (q_t - K_j)."""
    dqueries, dkeys = np.empty_like(queries), np.zeros_like(keys)
    doubled, q, table, places = _flat(2 * ddistances, queries, keys, columns)
    out = _half_rows(dqueries, keys.shape[3])

    def job(lo: int, hi: int) -> None:
        _into_queries(lo, hi, doubled, q, table, places, out)

    pool.run(len(queries), job, columns.size * keys.shape[3])
    _run_into_keys(-doubled, q, table, places, _rows(dkeys))
    return dqueries, dkeys


def key_step_forward(rates: np.ndarray, queries: np.ndarray, keys: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return K_j - sum_t rate_tj (q_t - K_j), all differences from the keys given."""
    after = keys.copy()
    _run_into_keys(*_flat(-rates, queries, keys, columns), _rows(after))
    return after


def key_step_backward(
    dkeys: np.ndarray, rates: np.ndarray, queries: np.ndarray, keys: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return drate_tj = -<G_j, q_t - K_j>, dq_t = -sum_j rate_tj G_j and dK_j = (1 + sum_t rate_tj) G_j."""
    drates, dqueries, before = np.empty_like(rates), np.empty_like(queries), dkeys.copy()
    x, q, table, places = _flat(rates, queries, keys, columns)
    upstream, out = _rows(memory.for_kernels(dkeys)), _half_rows(dqueries, keys.shape[3])
    flat_drates = drates.reshape(x.shape)

    def job(lo: int, hi: int) -> None:
        _step_backward(lo, hi, x, q, table, places, upstream, flat_drates, out)

    pool.run(len(queries), job, columns.size * keys.shape[3])
    grown = _rows(before)
    sub_keys = keys.shape[2]
    where = (np.arange(x.shape[1])[:, None] * sub_keys + places).reshape(-1)
    total = np.bincount(where, x.reshape(-1), len(grown)).astype(rates.dtype)
    grown *= (1 + total)[:, None]
    return drates, dqueries, before


def _rows(keys: np.ndarray) -> np.ndarray:
    """Return keys [H, 2, m, h] as rows [2 H m, h]."""
    return keys.reshape(keys.shape[0] * 2 * keys.shape[2], keys.shape[3])


def _half_rows(queries: np.ndarray, half: int) -> np.ndarray:
    """Return queries [n, H, 2h] as rows [n 2H, h]."""
    return queries.reshape(len(queries) * queries.shape[1] * 2, half)


def _flat(
    x: np.ndarray, queries: np.ndarray, keys: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    shape = (len(queries), 2 * keys.shape[0], columns.shape[3])
    x, queries, keys, columns = (memory.for_kernels(a) for a in (x, queries, keys, columns))
    return x.reshape(shape), _half_rows(queries, keys.shape[3]), _rows(keys), columns.reshape(shape)


def _run_into_keys(x: np.ndarray, queries: np.ndarray, keys: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
    tiles = max(1, -(-keys.shape[1] // _TILE))

    def job(lo: int, hi: int) -> None:
        _into_keys(lo, hi, tiles, x, queries, keys, places, out)

    pool.run(x.shape[1] * tiles, job, x.size * keys.shape[1])


@inlined
def _add_difference(out, row, x, queries, q, keys, key, c, zero, n):
    """out[row, c : c + lanes] += x (queries[q] - keys[key])."""
    difference = sub(load(queries, q, c, zero, n), load(keys, key, c, zero, n))
    store(out, row, c, fma(splat(x, zero), difference, load(out, row, c, zero, n)), n)


@kernel
def _into_keys(lo, hi, tiles, x, queries, keys, places, out):
    queries, keys, out = borrowed(queries), borrowed(keys), borrowed(out)
    tables, width = x.shape[1], keys.shape[1]
    sub_keys, narrow = keys.shape[0] // tables, zeros(keys.dtype, NARROW)
    for job in range(lo, hi):
        table, begin = job // tiles, (job % tiles) * _TILE
        end = min(begin + _TILE, width)
        for t in range(x.shape[0]):
            q = t * tables + table
            for i in range(x.shape[2]):
                key = table * sub_keys + places[t, table, i]
                c = begin
                while c + NARROW <= end:
                    _add_difference(out, key, x[t, table, i], queries, q, keys, key, c, narrow, None)
                    c += NARROW
                if c < end:
                    _add_difference(out, key, x[t, table, i], queries, q, keys, key, c, narrow, end - c)


@inlined
def _differences(x, t, table, queries, q, keys, first, places, c, zero, n):
    """Return sum_i x[t, table, i] (q - K_i) at columns c.. of h."""
    sum_, query = zero, load(queries, q, c, zero, n)
    for i in range(x.shape[2]):
        difference = sub(query, load(keys, first + places[t, table, i], c, zero, n))
        sum_ = fma(splat(x[t, table, i], zero), difference, sum_)
    return sum_


@kernel
def _into_queries(lo, hi, x, queries, keys, places, out):
    queries, keys, out = borrowed(queries), borrowed(keys), borrowed(out)
    tables, width = x.shape[1], keys.shape[1]
    sub_keys, narrow = keys.shape[0] // tables, zeros(keys.dtype, NARROW)
    for t in range(lo, hi):
        for table in range(tables):
            q, first, c = t * tables + table, table * sub_keys, 0
            while c + NARROW <= width:
                store(out, q, c, _differences(x, t, table, queries, q, keys, first, places, c, narrow, None), None)
                c += NARROW
            if c < width:
                n = width - c
                store(out, q, c, _differences(x, t, table, queries, q, keys, first, places, c, narrow, n), n)


@inlined
def _minus_weighted(x, t, table, upstream, first, places, c, zero, n):
    """Return -sum_i x[t, table, i] G_i at columns c.. of h."""
    sum_ = zero
    for i in range(x.shape[2]):
        sum_ = fma(splat(-x[t, table, i], zero), load(upstream, first + places[t, table, i], c, zero, n), sum_)
    return sum_


@kernel
def _step_backward(lo, hi, x, queries, keys, places, upstream, drates, dqueries):
    queries, keys, upstream, dqueries = borrowed(queries), borrowed(keys), borrowed(upstream), borrowed(dqueries)
    tables, width = x.shape[1], keys.shape[1]
    sub_keys, narrow = keys.shape[0] // tables, zeros(keys.dtype, NARROW)
    difference = np.empty((1, width), keys.dtype)
    for t in range(lo, hi):
        for table in range(tables):
            q, first, c = t * tables + table, table * sub_keys, 0
            while c + NARROW <= width:
                store(dqueries, q, c, _minus_weighted(x, t, table, upstream, first, places, c, narrow, None), None)
                c += NARROW
            if c < width:
                n = width - c
                store(dqueries, q, c, _minus_weighted(x, t, table, upstream, first, places, c, narrow, n), n)
            for i in range(x.shape[2]):
                key = first + places[t, table, i]
                for d in range(width):
                    difference[0, d] = queries[q, d] - keys[key, d]
                drates[t, table, i] = -dot(upstream, key, difference, 0, width, narrow)
