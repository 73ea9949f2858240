"""Sparse delta rule, backward (spec sections 5 and 6): the forward's tokens in reverse, its writes undone.

G is dL/dM. Per token and block of columns:

    read :  G[r] += q_r dy;                 dq_r = <M[r], dy>
    write:  ddelta = sum_i k_i G[i];        dv = beta ddelta;      dbeta = <ddelta, error>
            M_prev[i] = logged row, or (M[i] - k_i delta) / alpha_i
            dm_i = G[i] - beta k_i ddelta;  dk_i = <G[i], delta> - beta <ddelta, alpha_i M_prev[i]>
            dlog_decay += <dm_i, alpha_i M_prev[i]>
            G[i] = alpha_i dm_i;            M[i] = M_prev[i]

    rule "per_slot": d_i = v - alpha_i M_prev[i];  dv = beta sum_i k_i G[i];  dbeta = sum_i k_i <G[i], d_i>
            M_prev[i] = logged row, or (M[i] - beta k_i v) / ((1 - beta k_i) alpha_i)
            dm_i = (1 - beta k_i) G[i];     dk_i = beta <G[i], d_i>;      the rest as above

Shapes: table and grad [rows, D]; dreadings, dvalues [n, D]; partial sums over D as in Partials.
Ownership: a job is (lane, tile of whole groups of columns), as in the forward.
Order of sums over D: lanes of a block in a fixed tree, blocks of a group ascending, then groups ascending, either here
(one tile) or by the caller (a partial per group): the same additions for any number of tiles.
Bytes per token and lane: (4 W + 3 R) D itemsize, and D itemsize for each of dreadings, error, dvalues.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .compile import inlined, kernel
from .forward import (
    AHEAD,
    BLOCK,
    CHUNK,
    NARROW,
    TOKENS_AHEAD,
    copy_columns,
    decays,
    longest,
    prefetch_token,
    weighted_rows,
)
from .snapshot import decode
from .vector import fma, load, mul, prefetch, splat, store, sub, total, zeros


class Partials(NamedTuple):
    """Sums over D by part: one part, or one for each group of columns where a lane has several tiles."""

    dwrite_weights: np.ndarray  # [parts, n, W]
    dlog_decay: np.ndarray  # [parts, n, 1 | W]
    dbeta: np.ndarray  # [parts, n, 1]
    dread_weights: np.ndarray  # [parts, n, R]


@kernel
def sparse_delta_backward(
    lo, hi, tile_columns, group_columns, first, count, stride, row_start, rows, table, grad, fresh, grad_given, x,
    saved, codes, storage, dreadings, dvalues, partials, per_slot,
):  # fmt: skip
    """Run jobs [lo, hi); job = lane * tiles + tile, a tile being `tile_columns` wide.

    `rows` holds the table after the last token and stays as it is: a row is copied to `table` (and zeroed in `grad`
    unless that is given) at its first touch, while fresh[tile, row] is set.
    None for `codes` (the log's rows below float32) or `per_slot` leaves that branch out when compiling.
    """
    width, writes, reads = table.shape[1], x.write_slots.shape[1], x.read_slots.shape[1]
    tiles = (width + tile_columns - 1) // tile_columns
    alpha, inverse = np.empty(writes, table.dtype), np.empty(writes, table.dtype)
    dk, dq = np.empty(writes, table.dtype), np.empty(reads, table.dtype)
    ddecay, dbeta = np.empty(x.log_decay.shape[1], table.dtype), np.empty(1, table.dtype)
    decoded = np.empty((0 if codes is None else writes, width), table.dtype)
    wide, narrow = zeros(table.dtype, BLOCK), zeros(table.dtype, NARROW)
    chunks = (longest(count, lo // tiles, hi // tiles) + CHUNK - 1) // CHUNK
    for t0 in range((chunks - 1) * CHUNK, -1, -CHUNK):
        for job in range(lo, hi):
            lane = job // tiles
            begin = (job % tiles) * tile_columns
            tile_end = min(begin + tile_columns, width)
            row0 = row_start[lane]
            for t in range(min(t0 + CHUNK, count[lane]) - 1, t0 - 1, -1):
                token = first[lane] + t * stride
                if t >= TOKENS_AHEAD:
                    prefetch_token(x, dreadings, token - TOKENS_AHEAD * stride, begin, tile_end, narrow)
                for slots in (x.write_slots[token], x.read_slots[token]):
                    for place in slots:
                        row = row0 + place
                        if fresh[job % tiles, row]:
                            fresh[job % tiles, row] = False
                            copy_columns(table, row, rows, row, begin, tile_end)
                            if not grad_given:
                                grad[row, begin:tile_end] = 0.0
                decays(x.log_decay, token, alpha)
                _inverses(x, token, alpha, per_slot, inverse)
                if codes is not None:
                    for w in range(writes):
                        if saved.log_place[token, w] >= 0:
                            decode(codes[saved.log_place[token, w]], begin, tile_end, storage, decoded[w])
                for c0 in range(begin, tile_end, group_columns):
                    end = min(c0 + group_columns, tile_end)
                    sums = _zero(dk, ddecay, dbeta, dq)
                    c = c0
                    while c + BLOCK <= end:
                        _block(c, wide, None, row0, token, table, grad, x, saved, decoded, dreadings, dvalues,
                               alpha, inverse, sums, per_slot)  # fmt: skip
                        c += BLOCK
                    while c + NARROW <= end:
                        _block(c, narrow, None, row0, token, table, grad, x, saved, decoded, dreadings, dvalues,
                               alpha, inverse, sums, per_slot)  # fmt: skip
                        c += NARROW
                    if c < end:
                        _block(c, narrow, end - c, row0, token, table, grad, x, saved, decoded, dreadings, dvalues,
                               alpha, inverse, sums, per_slot)  # fmt: skip
                    part = 0 if tiles == 1 else c0 // group_columns
                    _put(partials.dwrite_weights[part, token], dk, tiles == 1 and c0 > 0)
                    _put(partials.dlog_decay[part, token], ddecay, tiles == 1 and c0 > 0)
                    _put(partials.dbeta[part, token], dbeta, tiles == 1 and c0 > 0)
                    _put(partials.dread_weights[part, token], dq, tiles == 1 and c0 > 0)


@inlined
def _block(c, zero, n, row0, token, table, grad, x, saved, decoded, dreadings, dvalues, alpha, inverse, sums, per_slot):
    _read(c, zero, n, row0, token, table, grad, x, load(dreadings, token, c, zero, n), sums[3])
    if per_slot is None:
        _write_shared(c, zero, n, row0, token, table, grad, x, saved, decoded, dvalues, alpha, inverse, sums)
    else:
        _write_per_slot(c, zero, n, row0, token, table, grad, x, saved, decoded, dvalues, alpha, inverse, sums)


@inlined
def _write_shared(c, zero, n, row0, token, table, grad, x, saved, decoded, dvalues, alpha, inverse, sums):
    dk, ddecay, dbeta, dq = sums
    beta = x.beta[token]
    ddelta = weighted_rows(grad, row0, x.write_slots, token, x.write_weights[token], c, zero, n)
    error = load(saved.error, token, c, zero, n)
    store(dvalues, token, c, mul(splat(beta, zero), ddelta), n)
    dbeta[0] += total(mul(ddelta, error))
    delta, pull = mul(splat(beta, zero), error), mul(splat(-beta, zero), ddelta)
    dgate = zero
    last = x.write_slots.shape[1] - 1
    for w in range(x.write_slots.shape[1]):
        row, weight = row0 + x.write_slots[token, w], x.write_weights[token, w]
        prefetch(table, row0 + x.write_slots[token, min(w + AHEAD, last)], c, zero)
        g = load(grad, row, c, zero, n)
        if saved.log_place[token, w] >= 0:
            before = _logged(saved, decoded, token, w, c, zero, n)
        else:
            before = mul(fma(splat(-weight, zero), delta, load(table, row, c, zero, n)), splat(inverse[w], zero))
        decayed = mul(splat(alpha[w], zero), before)
        dm = fma(splat(weight, zero), pull, g)
        dk[w] += total(fma(pull, decayed, mul(g, delta)))
        if len(ddecay) == 1:
            dgate = fma(dm, decayed, dgate)
        else:
            ddecay[w] += total(mul(dm, decayed))
        store(grad, row, c, mul(splat(alpha[w], zero), dm), n)
        store(table, row, c, before, n)
    if len(ddecay) == 1:
        ddecay[0] += total(dgate)


@inlined
def _write_per_slot(c, zero, n, row0, token, table, grad, x, saved, decoded, dvalues, alpha, inverse, sums):
    dk, ddecay, dbeta, dq = sums
    beta, value = x.beta[token], load(x.values, token, c, zero, n)
    dvalue, dgate, dstrength = zero, zero, zero
    for w in range(x.write_slots.shape[1]):
        row, weight = row0 + x.write_slots[token, w], x.write_weights[token, w]
        step = beta * weight
        g = load(grad, row, c, zero, n)
        if saved.log_place[token, w] >= 0:
            before = _logged(saved, decoded, token, w, c, zero, n)
        else:
            before = mul(fma(splat(-step, zero), value, load(table, row, c, zero, n)), splat(inverse[w], zero))
        decayed = mul(splat(alpha[w], zero), before)
        along = mul(g, sub(value, decayed))
        dvalue = fma(splat(step, zero), g, dvalue)
        dstrength = fma(splat(weight, zero), along, dstrength)
        dk[w] += beta * total(along)
        dm = fma(splat(-step, zero), g, g)
        if len(ddecay) == 1:
            dgate = fma(dm, decayed, dgate)
        else:
            ddecay[w] += total(mul(dm, decayed))
        store(grad, row, c, mul(splat(alpha[w], zero), dm), n)
        store(table, row, c, before, n)
    store(dvalues, token, c, dvalue, n)
    dbeta[0] += total(dstrength)
    if len(ddecay) == 1:
        ddecay[0] += total(dgate)


@inlined
def _read(c, zero, n, row0, token, table, grad, x, dy, dq):
    last = x.read_slots.shape[1] - 1
    for r in range(x.read_slots.shape[1]):
        ahead = row0 + x.read_slots[token, min(r + AHEAD, last)]
        prefetch(table, ahead, c, zero)
        prefetch(grad, ahead, c, zero)
        row = row0 + x.read_slots[token, r]
        dq[r] += total(mul(load(table, row, c, zero, n), dy))
        store(grad, row, c, fma(splat(x.read_weights[token, r], zero), dy, load(grad, row, c, zero, n)), n)


@inlined
def _logged(saved, decoded, token, w, c, zero, n):
    if decoded.shape[0]:
        return load(decoded, np.int64(w), c, zero, n)
    return load(saved.log, np.int64(saved.log_place[token, w]), c, zero, n)


@inlined
def _inverses(x, token, alpha, per_slot, inverse):
    """Set inverse[w] to what undoes the factor on the old row; infinite only where the plan logs the row."""
    for w in range(len(alpha)):
        factor = alpha[w]
        if per_slot is not None:
            factor *= alpha.dtype.type(1.0) - x.beta[token] * x.write_weights[token, w]
        inverse[w] = alpha.dtype.type(1.0) / factor


@inlined
def _zero(dk, ddecay, dbeta, dq):
    dk[:] = 0.0
    ddecay[:] = 0.0
    dbeta[:] = 0.0
    dq[:] = 0.0
    return dk, ddecay, dbeta, dq


@inlined
def _put(out, sums, more):
    if more:
        for i in range(len(sums)):
            out[i] += sums[i]
    else:
        for i in range(len(sums)):
            out[i] = sums[i]
