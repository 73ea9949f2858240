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
Order of sums over D: columns NARROW apart first, then NARROW lanes in a fixed tree, for each block; blocks of a group
ascending; then groups ascending, either here (one tile) or by the caller (a partial per group): the same additions
for any number of tiles.
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
    borrow_saved,
    borrow_tokens,
    decays,
    longest,
    prefetch_token,
    weighted_rows,
)
from .snapshot import decode
from .vector import borrowed, fma, load, mul, prefetch, splat, store, sub, total, zeros


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
    x, saved = borrow_tokens(x), borrow_saved(saved)
    rows, table, grad, fresh = borrowed(rows), borrowed(table), borrowed(grad), borrowed(fresh)
    dreadings, dvalues = borrowed(dreadings), borrowed(dvalues)
    partials = Partials(
        borrowed(partials.dwrite_weights),
        borrowed(partials.dlog_decay),
        borrowed(partials.dbeta),
        borrowed(partials.dread_weights),
    )
    width, writes, reads = table.shape[1], x.write_slots.shape[1], x.read_slots.shape[1]
    tiles = (width + tile_columns - 1) // tile_columns
    scratch = np.empty((6, max(writes, reads, BLOCK, 1)), table.dtype)
    alpha, inverse = borrowed(scratch[0, :writes]), borrowed(scratch[1, :writes])
    dk, dq = borrowed(scratch[2, :writes]), borrowed(scratch[3, :reads])
    ddecay, dbeta = borrowed(scratch[4, : x.log_decay.shape[1]]), borrowed(scratch[5, :1])
    decoded_rows, pair = (
        np.empty((0 if codes is None else writes, width), table.dtype),
        np.empty((2, BLOCK), table.dtype),
    )
    new_rows = np.empty(writes + reads, np.int64)
    first_touches = borrowed(new_rows)
    decoded, delta, pull = borrowed(decoded_rows), borrowed(pair[:1]), borrowed(pair[1:])
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
                touched = 0
                for slots in (x.write_slots[token], x.read_slots[token]):
                    for place in slots:
                        row = row0 + place
                        if fresh[job % tiles, row]:
                            fresh[job % tiles, row] = False
                            first_touches[touched] = row
                            touched += 1
                decays(x.log_decay, token, alpha)
                _inverses(x, token, alpha, per_slot, inverse)
                if codes is not None:
                    for w in range(writes):
                        if saved.log_place[token, w] >= 0:
                            decode(codes[saved.log_place[token, w]], begin, tile_end, storage, decoded[w])
                for c0 in range(begin, tile_end, group_columns):
                    sums = _zero(dk, ddecay, dbeta, dq)
                    for c in range(c0, min(c0 + group_columns, tile_end), BLOCK):
                        n = min(BLOCK, tile_end - c)
                        _fill(c, n, narrow, wide, first_touches[:touched], rows, table, grad, grad_given)
                        _read(c, n, narrow, wide, row0, token, table, grad, x, dreadings, dq)
                        if per_slot is None:
                            _ddelta(c, n, narrow, wide, row0, token, grad, x, saved.error, dvalues, delta, pull, dbeta)
                            _write_shared(c, n, narrow, wide, row0, token, table, grad, x, saved, decoded, delta, pull,
                                          alpha, inverse, sums)  # fmt: skip
                        else:
                            _write_per_slot(c, n, narrow, wide, row0, token, table, grad, x, saved, decoded, dvalues,
                                            alpha, inverse, sums)  # fmt: skip
                    part = 0 if tiles == 1 else c0 // group_columns
                    _put(partials.dwrite_weights[part, token], dk, tiles == 1 and c0 > 0)
                    _put(partials.dlog_decay[part, token], ddecay, tiles == 1 and c0 > 0)
                    _put(partials.dbeta[part, token], dbeta, tiles == 1 and c0 > 0)
                    _put(partials.dread_weights[part, token], dq, tiles == 1 and c0 > 0)
    return scratch.size + decoded_rows.size + pair.size + new_rows.size  # keeps the scratch alive till here


# Below, columns [c, c + n) of one block are walked NARROW at a time, the last step masked: a wider step would not leave
# registers for all that an undone row needs. `narrow` and `wide` are zero vectors of NARROW and BLOCK lanes.


@inlined
def _fill(c, n, narrow, wide, first_touches, rows, table, grad, grad_given):
    """Fill the block's columns of the rows touched for the first time, just before their use."""
    last = len(first_touches) - 1
    for j in range(len(first_touches)):
        row = first_touches[j]
        prefetch(rows, first_touches[min(j + AHEAD, last)], c, wide)
        i = 0
        while i + NARROW <= n:
            _fill_step(c + i, None, narrow, row, rows, table, grad, grad_given)
            i += NARROW
        if i < n:
            _fill_step(c + i, n - i, narrow, row, rows, table, grad, grad_given)


@inlined
def _fill_step(c, n, zero, row, rows, table, grad, grad_given):
    store(table, row, c, load(rows, row, c, zero, n), n)
    if not grad_given:
        store(grad, row, c, zero, n)


@inlined
def _read(c, n, narrow, wide, row0, token, table, grad, x, dreadings, dq):
    """Take the reading back: G[r] += q_r dy and dq_r += <M[r], dy>."""
    last = x.read_slots.shape[1] - 1
    for r in range(x.read_slots.shape[1]):
        ahead = row0 + x.read_slots[token, min(r + AHEAD, last)]
        prefetch(table, ahead, c, wide)
        prefetch(grad, ahead, c, wide)
        row, weight = row0 + x.read_slots[token, r], splat(x.read_weights[token, r], narrow)
        along = narrow
        i = 0
        while i + NARROW <= n:
            along = _read_step(c + i, None, narrow, row, weight, token, table, grad, dreadings, along)
            i += NARROW
        if i < n:
            along = _read_step(c + i, n - i, narrow, row, weight, token, table, grad, dreadings, along)
        dq[r] += total(along)


@inlined
def _read_step(c, n, zero, row, weight, token, table, grad, dreadings, along):
    dy = load(dreadings, token, c, zero, n)
    store(grad, row, c, fma(weight, dy, load(grad, row, c, zero, n)), n)
    return fma(load(table, row, c, zero, n), dy, along)


@inlined
def _ddelta(c, n, narrow, wide, row0, token, grad, x, error, dvalues, delta, pull, dbeta):
    """Set dv, and in scratch delta = beta error and pull = -beta ddelta; add to dbeta."""
    if n == BLOCK:
        dbeta[0] += _ddelta_step(0, c, None, wide, row0, token, grad, x, error, dvalues, delta, pull)
        return
    i = 0
    while i + NARROW <= n:
        dbeta[0] += _ddelta_step(i, c + i, None, narrow, row0, token, grad, x, error, dvalues, delta, pull)
        i += NARROW
    if i < n:
        dbeta[0] += _ddelta_step(i, c + i, n - i, narrow, row0, token, grad, x, error, dvalues, delta, pull)


@inlined
def _ddelta_step(i, c, n, zero, row0, token, grad, x, errors, dvalues, delta, pull):
    beta = x.beta[token]
    ddelta = weighted_rows(grad, row0, x.write_slots, token, x.write_weights[token], c, zero, n)
    error = load(errors, token, c, zero, n)
    store(dvalues, token, c, mul(splat(beta, zero), ddelta), n)
    store(delta, np.int64(0), i, mul(splat(beta, zero), error), n)
    store(pull, np.int64(0), i, mul(splat(-beta, zero), ddelta), n)
    return total(mul(ddelta, error))


@inlined
def _write_shared(
    c, n, narrow, wide, row0, token, table, grad, x, saved, decoded, delta, pull, alpha, inverse, sums
):  # fmt: skip
    """Undo the write: rows back to M_prev, G through the decay and the residual; add to dk and dlog_decay."""
    dk, ddecay, dbeta, dq = sums
    last = x.write_slots.shape[1] - 1
    gate = narrow
    for w in range(x.write_slots.shape[1]):
        prefetch(table, row0 + x.write_slots[token, min(w + AHEAD, last)], c, wide)
        row, weight = row0 + x.write_slots[token, w], x.write_weights[token, w]
        logged = saved.log_place[token, w] >= 0
        log, log_row = _log_row(saved, decoded, token, w)
        along = narrow
        i = 0
        while i + NARROW <= n:
            along, gate = _undo_shared(i, c + i, None, narrow, row, weight, alpha[w], inverse[w], logged, log, log_row,
                                       table, grad, delta, pull, along, gate)  # fmt: skip
            i += NARROW
        if i < n:
            along, gate = _undo_shared(i, c + i, n - i, narrow, row, weight, alpha[w], inverse[w], logged, log, log_row,
                                       table, grad, delta, pull, along, gate)  # fmt: skip
        dk[w] += total(along)
        if len(ddecay) > 1:
            ddecay[w] += total(gate)
            gate = narrow
    if len(ddecay) == 1:
        ddecay[0] += total(gate)


@inlined
def _undo_shared(
    i, c, n, zero, row, weight, alpha, inverse, logged, log, log_row, table, grad, deltas, pulls, along, gate
):  # fmt: skip
    delta, pull = load(deltas, np.int64(0), i, zero, n), load(pulls, np.int64(0), i, zero, n)
    if logged:
        before = load(log, log_row, c, zero, n)
    else:
        before = mul(fma(splat(-weight, zero), delta, load(table, row, c, zero, n)), splat(inverse, zero))
    g = load(grad, row, c, zero, n)
    decayed = mul(splat(alpha, zero), before)
    dm = fma(splat(weight, zero), pull, g)
    store(grad, row, c, mul(splat(alpha, zero), dm), n)
    store(table, row, c, before, n)
    return fma(pull, decayed, fma(g, delta, along)), fma(dm, decayed, gate)


@inlined
def _write_per_slot(c, n, narrow, wide, row0, token, table, grad, x, saved, decoded, dvalues, alpha, inverse, sums):
    """Undo the writes of rule "per_slot", each by itself; set dv, add to dk, dbeta and dlog_decay."""
    dk, ddecay, dbeta, dq = sums
    last = x.write_slots.shape[1] - 1
    beta, gate = x.beta[token], narrow
    for i in range(c, c + n):
        dvalues[token, i] = 0.0
    for w in range(x.write_slots.shape[1]):
        prefetch(table, row0 + x.write_slots[token, min(w + AHEAD, last)], c, wide)
        row, step = row0 + x.write_slots[token, w], beta * x.write_weights[token, w]
        logged = saved.log_place[token, w] >= 0
        log, log_row = _log_row(saved, decoded, token, w)
        along = narrow
        i = 0
        while i + NARROW <= n:
            along, gate = _undo_per_slot(c + i, None, narrow, row, step, alpha[w], inverse[w], logged, log, log_row,
                                         table, grad, x.values, dvalues, token, along, gate)  # fmt: skip
            i += NARROW
        if i < n:
            along, gate = _undo_per_slot(c + i, n - i, narrow, row, step, alpha[w], inverse[w], logged, log, log_row,
                                         table, grad, x.values, dvalues, token, along, gate)  # fmt: skip
        dstep = total(along)
        dk[w] += beta * dstep
        dbeta[0] += x.write_weights[token, w] * dstep
        if len(ddecay) > 1:
            ddecay[w] += total(gate)
            gate = narrow
    if len(ddecay) == 1:
        ddecay[0] += total(gate)


@inlined
def _undo_per_slot(
    c, n, zero, row, step, alpha, inverse, logged, log, log_row, table, grad, values, dvalues, token, along, gate
):  # fmt: skip
    value = load(values, token, c, zero, n)
    if logged:
        before = load(log, log_row, c, zero, n)
    else:
        before = mul(fma(splat(-step, zero), value, load(table, row, c, zero, n)), splat(inverse, zero))
    g = load(grad, row, c, zero, n)
    decayed = mul(splat(alpha, zero), before)
    dm = fma(splat(-step, zero), g, g)
    store(dvalues, token, c, fma(splat(step, zero), g, load(dvalues, token, c, zero, n)), n)
    store(grad, row, c, mul(splat(alpha, zero), dm), n)
    store(table, row, c, before, n)
    return fma(g, sub(value, decayed), along), fma(dm, decayed, gate)


@inlined
def _log_row(saved, decoded, token, w):
    """Return where the row that the token overwrote was logged, as (array, row); only meant where it was."""
    if decoded.shape[0]:
        return decoded, np.int64(w)
    return saved.log, np.int64(saved.log_place[token, w])


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
