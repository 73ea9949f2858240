"""Sparse delta rule, forward (spec section 4), over lanes and tiles of columns.

Per token and block of columns: predict from the decayed rows, write, read. Rows stream from memory once; a block's
rows are still in the L1 cache when the write comes back to them.

    error = v - sum_j (k_j alpha_j) M[i_j]        (rule "shared")
    M[i]  = alpha_i M[i] + k_i (beta error)       or, rule "per_slot", alpha M[i] + beta k_i (v - alpha M[i])
    y     = sum_r q_r M[i_r]

Shapes: n = B T H tokens; table [rows, D]; readings [n, D]; the others as in Tokens and Saved.
Ownership: a job is (lane, tile); it alone writes its columns of the lane's rows and tokens, in token order.
Order of sums: over w and r ascending, one fma each, whatever the block, tile or thread.
Bytes per token and lane: (2 W + R) D itemsize, and D itemsize for each of values, readings, error.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .compile import inlined, kernel
from .snapshot import encode
from .vector import borrowed, fma, load, mul, prefetch, round_bf16, round_fp16, splat, store, sub, zeros

BLOCK, NARROW = 64, 16  # columns of a full block, and of one in what D leaves over
AHEAD, TOKENS_AHEAD = 8, 2  # rows, and tokens, between a prefetch and its use
CHUNK = 32  # tokens of one lane before the next lane: the lanes' tokens share pages of memory
MOST_GROUPS = 8
ROUND_BF16, ROUND_FP16 = 1, 2


class Tokens(NamedTuple):
    """The op's arrays, tokens flat; slots are places in the table when it is a compact one."""

    values: np.ndarray  # [n, D]
    write_slots: np.ndarray  # [n, W] int32
    write_weights: np.ndarray  # [n, W]
    log_decay: np.ndarray  # [n, 1 | W]
    beta: np.ndarray  # [n]
    read_slots: np.ndarray  # [n, R] int32
    read_weights: np.ndarray  # [n, R]


class Saved(NamedTuple):
    """What the forward keeps for the backward; arrays that are not needed have no rows."""

    error: np.ndarray  # [n, D], rule "shared"
    log: np.ndarray  # [logged, D] in the compute dtype
    log_place: np.ndarray  # [n, W] int32: row of the log, or -1


class Fill(NamedTuple):
    """The rows of a compact table that a token is the first to touch, and where they come from."""

    rows: np.ndarray  # [any, D]
    start: int  # the lane's first row there
    row_slots: np.ndarray  # int32: what to add to it, for each row of the compact table
    first: int  # places in the lane's table: from the first to before the last
    last: int


def group_width(width: int) -> int:
    """Return the columns of a group, the unit of tiles and of partial sums over D; it depends on D alone."""
    blocks = -(-width // BLOCK)
    return BLOCK * max(1, -(-blocks // MOST_GROUPS))


@kernel
def sparse_delta_forward(
    lo, hi, tile_columns, first, count, stride, row_start, table, source, source_start, row_slots, x, saved, codes,
    storage, readings, per_slot, rounding,
):  # fmt: skip
    """Run jobs [lo, hi); job = lane * tiles + tile, a tile being `tile_columns` wide.

    A compact table is filled here, each row at its first touch, from source[source_start[lane] + slot]; `source` has
    no rows where the table is complete already.
    None for `codes` (the log's rows below float32), `per_slot` or `rounding` leaves that branch out when compiling.
    """
    x, saved = borrow_tokens(x), borrow_saved(saved)
    table, source, row_slots, readings = borrowed(table), borrowed(source), borrowed(row_slots), borrowed(readings)
    width, writes = table.shape[1], x.write_slots.shape[1]
    tiles = (width + tile_columns - 1) // tile_columns
    scratch = np.empty((2, writes), table.dtype)
    alpha, scaled = borrowed(scratch[0]), borrowed(scratch[1])
    wide, narrow = zeros(table.dtype, BLOCK), zeros(table.dtype, NARROW)
    present = np.zeros(hi - lo, np.int64)  # rows of each job's compact table that are filled
    for t0 in range(0, longest(count, lo // tiles, hi // tiles), CHUNK):
        for job in range(lo, hi):
            lane = job // tiles
            begin = (job % tiles) * tile_columns
            end = min(begin + tile_columns, width)
            row0 = row_start[lane]
            for t in range(t0, min(t0 + CHUNK, count[lane])):
                token = first[lane] + t * stride
                if t + TOKENS_AHEAD < count[lane]:
                    prefetch_token(x, x.values, token + TOKENS_AHEAD * stride, begin, end, narrow)
                known = present[job - lo]
                if source.shape[0]:
                    for slots in (x.write_slots[token], x.read_slots[token]):
                        for place in slots:
                            known = max(known, np.int64(place) + 1)  # places are numbered by first touch
                fill = Fill(source, source_start[lane], row_slots, present[job - lo], known)
                present[job - lo] = known
                decays(x.log_decay, token, alpha)
                for w in range(writes):
                    scaled[w] = alpha[w] * x.write_weights[token, w]
                if codes is not None:  # a row's code looks at all of its columns
                    for row in range(row0 + fill.first, row0 + known):
                        copy_columns(table, row, source, fill.start + row_slots[row], begin, end, wide, narrow)
                    fill = Fill(source, source_start[lane], row_slots, known, known)
                    for w in range(writes):
                        if saved.log_place[token, w] >= 0:
                            row = table[row0 + x.write_slots[token, w]]
                            encode(row, begin, end, storage, codes[saved.log_place[token, w]])
                token_columns(
                    begin, end, wide, narrow, row0, token, table, fill, x, saved, alpha, scaled, readings, per_slot,
                    rounding,
                )  # fmt: skip
    return scratch.size  # keeps the scratch alive till here


@inlined
def borrow_tokens(x):
    """Return the arrays without their reference counts."""
    return Tokens(
        borrowed(x.values),
        borrowed(x.write_slots),
        borrowed(x.write_weights),
        borrowed(x.log_decay),
        borrowed(x.beta),
        borrowed(x.read_slots),
        borrowed(x.read_weights),
    )


@inlined
def borrow_saved(saved):
    """Return the arrays without their reference counts."""
    return Saved(borrowed(saved.error), borrowed(saved.log), borrowed(saved.log_place))


@inlined
def token_columns(
    begin, end, wide, narrow, row0, token, table, fill, x, saved, alpha, scaled, readings, per_slot, rounding
):  # fmt: skip
    """Write and read columns [begin, end) of one token: full blocks, narrow ones, and what is left."""
    c = begin
    while c + BLOCK <= end:
        _block(c, wide, None, row0, token, table, fill, x, saved, alpha, scaled, readings, per_slot, rounding)
        c += BLOCK
    while c + NARROW <= end:
        _block(c, narrow, None, row0, token, table, fill, x, saved, alpha, scaled, readings, per_slot, rounding)
        c += NARROW
    if c < end:
        _block(c, narrow, end - c, row0, token, table, fill, x, saved, alpha, scaled, readings, per_slot, rounding)


@inlined
def _block(c, zero, n, row0, token, table, fill, x, saved, alpha, scaled, readings, per_slot, rounding):
    """Write and read columns [c, c + lanes of zero) of one token; n as in vector.load."""
    if fill is not None:
        _fill(c, zero, n, row0, table, fill)
    value = load(x.values, token, c, zero, n)
    delta = value
    if per_slot is None:
        error = sub(value, weighted_rows(table, row0, x.write_slots, token, scaled, c, zero, n))
        prefetch_rows(table, row0, x.read_slots, token, c, zero)
        if saved.error.shape[0]:
            store(saved.error, token, c, error, n)
        delta = mul(splat(x.beta[token], zero), error)
    for w in range(x.write_slots.shape[1]):
        row, weight = row0 + x.write_slots[token, w], x.write_weights[token, w]
        old = load(table, row, c, zero, n)
        if saved.log.shape[0] and saved.log_place[token, w] >= 0:
            store(saved.log, np.int64(saved.log_place[token, w]), c, old, n)
        decayed = mul(splat(alpha[w], zero), old)
        if per_slot is None:
            new = fma(splat(weight, zero), delta, decayed)
        else:
            new = fma(splat(x.beta[token] * weight, zero), sub(value, decayed), decayed)
        if rounding is not None:
            new = round_bf16(new) if rounding == ROUND_BF16 else round_fp16(new)
        store(table, row, c, new, n)
    reading = weighted_rows(table, row0, x.read_slots, token, x.read_weights[token], c, zero, n)
    store(readings, token, c, reading, n)
    prefetch_rows(table, row0, x.write_slots, token, c + BLOCK, zero)


@inlined
def prefetch_rows(table, row0, slots, token, c, zero):
    """Prefetch the first rows of a sum that comes later."""
    for w in range(min(AHEAD, slots.shape[1])):
        prefetch(table, row0 + slots[token, w], c, zero)


@inlined
def copy_columns(table, row, source, from_row, begin, end, wide, narrow):
    """Set table[row, begin:end] = source[from_row, begin:end]."""
    c = begin
    while c + BLOCK <= end:
        store(table, row, c, load(source, from_row, c, wide, None), None)
        c += BLOCK
    while c + NARROW <= end:
        store(table, row, c, load(source, from_row, c, narrow, None), None)
        c += NARROW
    if c < end:
        store(table, row, c, load(source, from_row, c, narrow, end - c), end - c)


@inlined
def _fill(c, zero, n, row0, table, fill):
    """Fill a block of columns just before its first use, while what is filled stays in the caches."""
    for place in range(fill.first, fill.last):
        ahead = row0 + min(place + AHEAD, fill.last - 1)
        prefetch(fill.rows, fill.start + fill.row_slots[ahead], c, zero)
        row = row0 + place
        store(table, row, c, load(fill.rows, fill.start + fill.row_slots[row], c, zero, n), n)


@inlined
def weighted_rows(table, row0, slots, token, weights, c, zero, n):
    """Return sum_w weights[w] table[row0 + slots[token, w], c : c + lanes], w ascending."""
    total = zero
    last = slots.shape[1] - 1
    for w in range(slots.shape[1]):
        prefetch(table, row0 + slots[token, min(w + AHEAD, last)], c, zero)
        total = fma(splat(weights[w], zero), load(table, row0 + slots[token, w], c, zero, n), total)
    return total


@inlined
def prefetch_token(x, columns, token, begin, end, zero):
    """Prefetch a later token's arrays: a lane's tokens lie H apart, too far for the hardware to guess."""
    for w in range(0, x.write_slots.shape[1], NARROW):
        prefetch(x.write_slots, token, w, zero)
        prefetch(x.write_weights, token, w, zero)
    for r in range(0, x.read_slots.shape[1], NARROW):
        prefetch(x.read_slots, token, r, zero)
        prefetch(x.read_weights, token, r, zero)
    for c in range(begin, end, NARROW):
        prefetch(columns, token, c, zero)


@inlined
def longest(count, lo, hi):
    """Return the most tokens of the lanes from lo to hi, both included where they exist."""
    most = np.int64(0)
    for lane in range(lo, min(hi + 1, len(count))):
        most = max(most, count[lane])
    return most


@inlined
def decays(log_decay, token, alpha):
    """Set alpha[w] = exp(log_decay), per head or per written slot; taken in float64 and rounded once."""
    if log_decay.shape[1] == 1:
        alpha[:] = math.exp(np.float64(log_decay[token, 0]))
    else:
        for w in range(len(alpha)):
            alpha[w] = math.exp(np.float64(log_decay[token, w]))
