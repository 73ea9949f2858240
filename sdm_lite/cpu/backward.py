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

Shapes: rows, table and grad [rows, D]; dreadings, dvalues [n, D]; partial sums over D as in Partials.
Where a row is (M of the row, then G): `rows` holds M after the last token and stays as it is; the first write that is
undone puts the row into `table`. G is zero before the row's first access (in reverse) and kept in `grad` from then on.
Neither is stored at the row's last access, unless G is the state's gradient: nobody would ask for it. So a row that is
touched once costs one read. No branch decides: a step loads and stores where its addresses point, which may be a row of
zeros, or one that takes what is not wanted.
Ownership: a job is (lane, tile of whole groups of columns), as in the forward.
Order of sums over D: columns NARROW apart first, then NARROW lanes in a fixed tree, for each block; blocks of a group
ascending; then groups ascending, either here (one tile) or by the caller (a partial per group): the same additions
for any number of tiles.
Bytes per token and lane: at most (4 W + 3 R) D itemsize, and D itemsize for each of dreadings, error, dvalues.
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


class Where(NamedTuple):
    """Where the tables begin, in elements from `origin`."""

    origin: np.ndarray  # [any, D], rows one element apart: a row's number is its address
    table: int  # [U, D]
    grad: int  # [U, D]
    waste: int  # [L, D], for what nobody asks for; a lane's own, since threads would take its cache lines in turn


class Accesses(NamedTuple):
    """Addresses of a token's rows, int64 [1, W or R] each: M and G are loaded from one and stored to another."""

    m_from: np.ndarray
    m_to: np.ndarray
    g_from: np.ndarray
    g_to: np.ndarray


class Partials(NamedTuple):
    """Sums over D by part: one part, or one for each group of columns where a lane has several tiles."""

    dwrite_weights: np.ndarray  # [parts, n, W]
    dlog_decay: np.ndarray  # [parts, n, 1 | W]
    dbeta: np.ndarray  # [parts, n, 1]
    dread_weights: np.ndarray  # [parts, n, R]


@kernel
def sparse_delta_backward(
    lo, hi, tile_columns, group_columns, first, count, stride, row_start, where, now, known, keep, x, saved,
    codes, storage, dreadings, dvalues, partials, per_slot,
):  # fmt: skip
    """Run jobs [lo, hi); job = lane * tiles + tile, a tile being `tile_columns` wide.

    now[tile, row] are the addresses of the row's M and G before its first access, and are kept up to date; `known` as
    in plan.known_rows; `keep` says that G is the state's gradient, to be stored.
    None for `codes` (the log's rows below float32) or `per_slot` leaves that branch out when compiling.
    """
    x, saved, origin = borrow_tokens(x), borrow_saved(saved), borrowed(where.origin)
    now, known = borrowed(now), borrowed(known)
    dreadings, dvalues = borrowed(dreadings), borrowed(dvalues)
    partials = Partials(
        borrowed(partials.dwrite_weights),
        borrowed(partials.dlog_decay),
        borrowed(partials.dbeta),
        borrowed(partials.dread_weights),
    )
    width, writes, reads = dreadings.shape[1], x.write_slots.shape[1], x.read_slots.shape[1]
    tiles = (width + tile_columns - 1) // tile_columns
    scratch = np.empty((6, max(writes, reads, BLOCK, 1)), dreadings.dtype)
    alpha, inverse = borrowed(scratch[0, :writes]), borrowed(scratch[1, :writes])
    dk, dq = borrowed(scratch[2, :writes]), borrowed(scratch[3, :reads])
    ddecay, dbeta = borrowed(scratch[4, : x.log_decay.shape[1]]), borrowed(scratch[5, :1])
    decoded_rows, pair = (
        np.empty((0 if codes is None else writes, width), dreadings.dtype),
        np.empty((2, BLOCK), dreadings.dtype),
    )
    decoded, delta, pull = borrowed(decoded_rows), borrowed(pair[:1]), borrowed(pair[1:])
    write_at, read_at = np.empty((4, writes), np.int64), np.empty((4, reads), np.int64)
    write, read = _views(write_at), _views(read_at)
    wide, narrow = zeros(dreadings.dtype, BLOCK), zeros(dreadings.dtype, NARROW)
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
                waste, mine = where.waste + lane * width, now[job % tiles, row0:]
                table, grad = where.table + row0 * width, where.grad + row0 * width
                _locate(x.read_slots[token], known[token, 1], mine, None, grad, waste, width, keep, read)
                _locate(x.write_slots[token], known[token, 0], mine, table, grad, waste, width, keep, write)
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
                        _read(c, n, narrow, wide, token, origin, read, x, dreadings, dq)
                        if per_slot is None:
                            _ddelta(c, n, narrow, wide, token, origin, write, x, saved.error, dvalues, delta, pull,
                                    dbeta)  # fmt: skip
                            _write_shared(c, n, narrow, wide, token, origin, write, x, saved, decoded, delta, pull,
                                          alpha, inverse, sums)  # fmt: skip
                        else:
                            _write_per_slot(c, n, narrow, wide, token, origin, write, x, saved, decoded, dvalues,
                                            alpha, inverse, sums)  # fmt: skip
                    part = 0 if tiles == 1 else c0 // group_columns
                    _put(partials.dwrite_weights[part, token], dk, tiles == 1 and c0 > 0)
                    _put(partials.dlog_decay[part, token], ddecay, tiles == 1 and c0 > 0)
                    _put(partials.dbeta[part, token], dbeta, tiles == 1 and c0 > 0)
                    _put(partials.dread_weights[part, token], dq, tiles == 1 and c0 > 0)
    return scratch.size + decoded_rows.size + pair.size + write_at.size + read_at.size  # keeps them alive till here


# Below, columns [c, c + n) of one block are walked NARROW at a time, the last step masked: a wider step would not leave
# registers for all that an undone row needs. `narrow` and `wide` are zero vectors of NARROW and BLOCK lanes.


@inlined
def _views(addresses):
    return Accesses(
        borrowed(addresses[:1]), borrowed(addresses[1:2]), borrowed(addresses[2:3]), borrowed(addresses[3:])
    )


@inlined
def _locate(places, known, now, table, grad, waste, width, keep, accesses):
    """Set the addresses of a token's reads or, where there is a `table` to put their rows into, writes.

    Rows from `known` on are those that no earlier token touches, and no later access in this token's reverse.
    """
    for i in range(len(places)):
        place, at = np.uint64(places[i]), np.int64(places[i]) * width
        last = places[i] >= known
        accesses.m_from[0, i], accesses.g_from[0, i] = now[place, 0], now[place, 1]
        now[place, 1] = at + grad
        accesses.g_to[0, i] = waste if last and not keep else at + grad
        if table is not None:
            now[place, 0] = at + table
            accesses.m_to[0, i] = waste if last else at + table


@inlined
def _read(c, n, narrow, wide, token, origin, at, x, dreadings, dq):
    """Take the reading back: G[r] += q_r dy and dq_r += <M[r], dy>."""
    last = x.read_slots.shape[1] - 1
    for r in range(x.read_slots.shape[1]):
        ahead = min(r + AHEAD, last)
        prefetch(origin, at.m_from[0, ahead], c, wide)
        prefetch(origin, at.g_to[0, ahead], c, wide)
        row, weight = (at.m_from[0, r], at.g_from[0, r], at.g_to[0, r]), splat(x.read_weights[token, r], narrow)
        along = narrow
        i = 0
        while i + NARROW <= n:
            along = _read_step(c + i, None, narrow, row, weight, token, origin, dreadings, along)
            i += NARROW
        if i < n:
            along = _read_step(c + i, n - i, narrow, row, weight, token, origin, dreadings, along)
        dq[r] += total(along)


@inlined
def _read_step(c, n, zero, row, weight, token, origin, dreadings, along):
    m_from, g_from, g_to = row
    dy = load(dreadings, token, c, zero, n)
    store(origin, g_to, c, fma(weight, dy, load(origin, g_from, c, zero, n)), n)
    return fma(load(origin, m_from, c, zero, n), dy, along)


@inlined
def _ddelta(c, n, narrow, wide, token, origin, at, x, error, dvalues, delta, pull, dbeta):
    """Set dv, and in scratch delta = beta error and pull = -beta ddelta; add to dbeta."""
    if n == BLOCK:
        dbeta[0] += _ddelta_step(0, c, None, wide, token, origin, at, x, error, dvalues, delta, pull)
        return
    i = 0
    while i + NARROW <= n:
        dbeta[0] += _ddelta_step(i, c + i, None, narrow, token, origin, at, x, error, dvalues, delta, pull)
        i += NARROW
    if i < n:
        dbeta[0] += _ddelta_step(i, c + i, n - i, narrow, token, origin, at, x, error, dvalues, delta, pull)


@inlined
def _ddelta_step(i, c, n, zero, token, origin, at, x, errors, dvalues, delta, pull):
    beta = x.beta[token]
    ddelta = weighted_rows(origin, 0, at.g_from, 0, x.write_weights[token], c, zero, n)
    error = load(errors, token, c, zero, n)
    store(dvalues, token, c, mul(splat(beta, zero), ddelta), n)
    store(delta, np.int64(0), i, mul(splat(beta, zero), error), n)
    store(pull, np.int64(0), i, mul(splat(-beta, zero), ddelta), n)
    return total(mul(ddelta, error))


@inlined
def _write_shared(
    c, n, narrow, wide, token, origin, at, x, saved, decoded, delta, pull, alpha, inverse, sums
):  # fmt: skip
    """Undo the write: rows back to M_prev, G through the decay and the residual; add to dk and dlog_decay."""
    dk, ddecay, dbeta, dq = sums
    last = x.write_slots.shape[1] - 1
    gate = narrow
    for w in range(x.write_slots.shape[1]):
        prefetch(origin, at.m_from[0, min(w + AHEAD, last)], c, wide)
        row, weight = _access(at, w), x.write_weights[token, w]
        logged = saved.log_place[token, w] >= 0
        log, log_row = _log_row(saved, decoded, token, w)
        along = narrow
        i = 0
        while i + NARROW <= n:
            along, gate = _undo_shared(i, c + i, None, narrow, row, weight, alpha[w], inverse[w], logged, log, log_row,
                                       origin, delta, pull, along, gate)  # fmt: skip
            i += NARROW
        if i < n:
            along, gate = _undo_shared(i, c + i, n - i, narrow, row, weight, alpha[w], inverse[w], logged, log, log_row,
                                       origin, delta, pull, along, gate)  # fmt: skip
        dk[w] += total(along)
        if len(ddecay) > 1:
            ddecay[w] += total(gate)
            gate = narrow
    if len(ddecay) == 1:
        ddecay[0] += total(gate)


@inlined
def _undo_shared(
    i, c, n, zero, row, weight, alpha, inverse, logged, log, log_row, origin, deltas, pulls, along, gate
):  # fmt: skip
    m_from, m_to, g_from, g_to = row
    delta, pull = load(deltas, np.int64(0), i, zero, n), load(pulls, np.int64(0), i, zero, n)
    if logged:
        before = load(log, log_row, c, zero, n)
    else:
        before = mul(fma(splat(-weight, zero), delta, load(origin, m_from, c, zero, n)), splat(inverse, zero))
    g = load(origin, g_from, c, zero, n)
    decayed = mul(splat(alpha, zero), before)
    dm = fma(splat(weight, zero), pull, g)
    store(origin, g_to, c, mul(splat(alpha, zero), dm), n)
    store(origin, m_to, c, before, n)
    return fma(pull, decayed, fma(g, delta, along)), fma(dm, decayed, gate)


@inlined
def _write_per_slot(c, n, narrow, wide, token, origin, at, x, saved, decoded, dvalues, alpha, inverse, sums):
    """Undo the writes of rule "per_slot", each by itself; set dv, add to dk, dbeta and dlog_decay."""
    dk, ddecay, dbeta, dq = sums
    last = x.write_slots.shape[1] - 1
    beta, gate = x.beta[token], narrow
    for i in range(c, c + n):
        dvalues[token, i] = 0.0
    for w in range(x.write_slots.shape[1]):
        prefetch(origin, at.m_from[0, min(w + AHEAD, last)], c, wide)
        row, step = _access(at, w), beta * x.write_weights[token, w]
        logged = saved.log_place[token, w] >= 0
        log, log_row = _log_row(saved, decoded, token, w)
        along = narrow
        i = 0
        while i + NARROW <= n:
            along, gate = _undo_per_slot(c + i, None, narrow, row, step, alpha[w], inverse[w], logged, log, log_row,
                                         origin, x.values, dvalues, token, along, gate)  # fmt: skip
            i += NARROW
        if i < n:
            along, gate = _undo_per_slot(c + i, n - i, narrow, row, step, alpha[w], inverse[w], logged, log, log_row,
                                         origin, x.values, dvalues, token, along, gate)  # fmt: skip
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
    c, n, zero, row, step, alpha, inverse, logged, log, log_row, origin, values, dvalues, token, along, gate
):  # fmt: skip
    m_from, m_to, g_from, g_to = row
    value = load(values, token, c, zero, n)
    if logged:
        before = load(log, log_row, c, zero, n)
    else:
        before = mul(fma(splat(-step, zero), value, load(origin, m_from, c, zero, n)), splat(inverse, zero))
    g = load(origin, g_from, c, zero, n)
    decayed = mul(splat(alpha, zero), before)
    dm = fma(splat(-step, zero), g, g)
    store(dvalues, token, c, fma(splat(step, zero), g, load(dvalues, token, c, zero, n)), n)
    store(origin, g_to, c, mul(splat(alpha, zero), dm), n)
    store(origin, m_to, c, before, n)
    return fma(g, sub(value, decayed), along), fma(dm, decayed, gate)


@inlined
def _access(at, w):
    return at.m_from[0, w], at.m_to[0, w], at.g_from[0, w], at.g_to[0, w]


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
