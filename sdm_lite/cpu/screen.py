"""The screen of a retrieval by distance: which sub-keys may be among the nearest, from 16-bit integers.

    x_j = q K_j - |K_j|^2 / 2                 |q - K_j|^2 = |q|^2 - 2 x_j: the nearest have the greatest x
    q = s q^ + e,  K_j = s_j K^_j + e_j       q^, K^_j integers, so that <q^, K^_j> is exact
    |x_j - s s_j <q^, K^_j> + |K_j|^2 / 2|  <=  |e| |K_j| + |s q^| |e_j|        (Cauchy and Schwarz)

The integers are as large as 32 bits allow for a sum over h, 11 bits and a sign at h = 256. They give each x_j an upper
and a lower bound, which also cover the roundings of their own arithmetic (float32). A sub-key whose upper bound lies
below the k-th greatest lower bound, by more than the distances' own rounding can hide, is not among the k nearest; all
others are *candidates*, whose distances are then taken exactly. So the screen shows in no bit. What bounds cannot say
(a NaN, an infinity, numbers that overflow a square) is a candidate always.

The k-th greatest lower bound is taken of the greatest in each of at least 4 k groups of sub-keys: never more than the
true one, and most often nearly it. Ownership: a job's block of ROWS tokens. Bytes: 2 H m h of packed keys for each
block from a near cache; scratch is 4 ROWS m a thread.
"""

from __future__ import annotations

import math
from collections import namedtuple

import numpy as np

from . import pool
from .addressing import keys_of
from .compile import inlined, kernel
from .forward import NARROW
from .select import PAD, order_keys, threshold_of
from .vector import (
    add,
    borrowed,
    dot_pairs,
    fma,
    greater,
    lanes_from,
    load,
    lowest_bit,
    mul,
    splat,
    store,
    store_rounded,
    sub,
    to_floats,
    total,
    zeros,
)

ROWS, GROUP = 48, 6  # tokens of a block, and of those in registers at once
_LARGE, _SMALL = 1e30, 1e-20  # squares from here, and numbers up to here, are left out of the integers
_LOST = 1e-30  # more than all that float32 may lose below its range
_ROUNDING = 2.0**-18  # more than all roundings of a bound together, relative to its terms
_LOWEST, _MINUS_INFINITY = keys_of(np.dtype(np.float32))

#: keys by panels of NARROW: `words` [panels * steps, NARROW] int32 of two 16-bit integers each; the rest float32
#: [panels, NARROW]: s_j, -|K_j|^2 / 2 rounded down and up, and upper bounds of |K_j| and |e_j|
Packed = namedtuple("Packed", "words scale low high size residue")
#: one block of queries: `words` int16 [ROWS, 2 steps] and the same as `pairs`, `factors` float32 [ROWS, 4] (s, bounds
#: of |e| and |s q^|, |q|^2); upper bounds of x [ROWS, lanes]; the groups' greatest lower bounds [ROWS, groups], also as
#: bits, and one token's in order; a row as floats and as bits; what earlier tokens suggest
Block = namedtuple("Block", "words pairs factors high lows low_bits keys row bits hint")


def pack(tables: np.ndarray, count: int) -> Packed:
    """Return the keys [count * m, h] of `count` tables, packed; with no rows, no panels."""
    sub_keys, width = len(tables) // count, tables.shape[1]
    panels, columns = count * -(-sub_keys // NARROW), -(-width // NARROW) * NARROW
    words = np.empty((panels * columns // 2, NARROW), np.int32)
    packed = Packed(words, *(np.empty((panels, NARROW), np.float32) for _ in Packed._fields[1:]))
    limit = limit_of(width)

    def job(lo: int, hi: int) -> None:
        _pack_panels(lo, hi, tables, count, limit, block_for(width, 1, 1, NARROW), packed)

    pool.run(panels, job, tables.size)
    return packed


def block_for(width: int, sub_keys: int, kept: int, rows: int) -> Block:
    """Return what one thread needs to screen blocks of `rows` queries."""
    columns, panels = -(-width // NARROW) * NARROW, -(-sub_keys // NARROW)
    groups = NARROW * min(panels, max(4, -(-4 * kept // NARROW)))
    words, row = np.zeros((rows, columns), np.int16), np.zeros((2, columns), np.float32)
    lows = np.empty((rows, groups), np.float32)
    return Block(
        words,
        words.view(np.int32),
        np.zeros((rows, 4), np.float32),
        np.empty((rows, panels * NARROW), np.float32),
        lows,
        lows.view(np.int32).reshape(-1),
        np.empty(-(-groups // PAD) * PAD, np.int32),
        row,
        row.view(np.int32),
        np.zeros(2),
    )


def limit_of(width: int) -> int:
    """Return the largest integer whose square, summed over h = `width` columns, fits 32 bits."""
    return min(32767, math.isqrt((2**31 - 1) // width))


@inlined
def _to_words(source, index, limit, block, t):
    """Round source[index] to words[t] times a scale; return the scale, |x|^2, and upper bounds of |x| and |x - s x^|.

    |x|^2 is a sum of 16 partial ones; where it is not below _LARGE (nor if it is NaN) the others mean nothing.
    """
    row, bits, width = block.row, block.bits, source.shape[1]
    for d in range(width):
        row[0, d] = source[index, d]
    top = np.int32(0)
    for d in range(width):
        size = bits[0, d] & np.int32(0x7FFFFFFF)  # of floats >= 0 the bits order like the numbers
        top = size if size > top else top
    bits[1, 0] = top
    largest, zero = row[1, 0], zeros(row.dtype, NARROW)
    squares = zero
    for c in range(0, row.shape[1], NARROW):
        x = load(row, 0, c, zero, None)
        squares = fma(x, x, squares)
    square = total(squares)
    fine = square < _LARGE and largest > _SMALL
    scale = row.dtype.type(largest / limit) if fine else row.dtype.type(0)
    inverse = splat(row.dtype.type(limit / largest) if fine else row.dtype.type(0), zero)
    for c in range(0, row.shape[1], NARROW):
        x = load(row, 0, c, zero, None) if fine else zero
        store_rounded(block.words, t, c, mul(x, inverse))
    norm = math.sqrt(square) * (1 + (width + 64) * 2.0**-23) + math.sqrt(width) * 2e-19
    residue = (0.5 * scale * math.sqrt(width) if fine else norm) + _ROUNDING * norm
    return scale, square, norm, residue


@kernel
def _pack_panels(lo, hi, tables, count, limit, block, packed):
    sub_keys, panels = tables.shape[0] // count, packed.scale.shape[0] // count
    steps = packed.words.shape[0] // packed.scale.shape[0]
    pairs, words = borrowed(block.pairs), borrowed(packed.words)
    relative = (tables.shape[1] + 64) * 2.0**-23
    for panel in range(lo, hi):
        first = (panel % panels) * NARROW
        for lane in range(NARROW):
            exists = first + lane < sub_keys
            key = (panel // panels) * sub_keys + min(first + lane, sub_keys - 1)
            scale, square, size, residue = _to_words(tables, key, limit, block, lane)
            if exists and square < _LARGE:
                packed.low[panel, lane] = -0.5 * square * (1 + relative) - _LOST
                packed.high[panel, lane] = -0.5 * square * (1 - relative) + _LOST
                packed.residue[panel, lane] = (residue + _ROUNDING * (size + residue)) * (1 + _ROUNDING)
            else:  # no bound says anything about a key that is not finite; one that does not exist is never wanted
                scale = size = packed.residue[panel, lane] = 0
                packed.low[panel, lane], packed.high[panel, lane] = -np.inf, np.inf if exists else -np.inf
            packed.scale[panel, lane], packed.size[panel, lane] = scale, size
        for d in range(steps):
            for lane in range(NARROW):
                words[panel * steps + d, lane] = pairs[lane, d]


@inlined
def _bounds(packed, block, panel, t, column, group, first_of_group, dots, zero):
    """Store the upper bounds of one token's x in one panel, and raise its groups' greatest lower bounds."""
    factors = block.factors
    scaled = mul(to_floats(dots, zero), load(packed.scale, panel, 0, zero, None))
    error = mul(splat(factors[t, 1], zero), load(packed.size, panel, 0, zero, None))
    error = fma(splat(factors[t, 2], zero), load(packed.residue, panel, 0, zero, None), error)
    scale = splat(factors[t, 0], zero)
    high = fma(scaled, scale, load(packed.high, panel, 0, zero, None))
    low = sub(fma(scaled, scale, load(packed.low, panel, 0, zero, None)), error)
    store(block.high, t, column, add(high, error), None)
    if not first_of_group:
        low = greater(low, load(block.lows, t, group, zero, None))
    store(block.lows, t, group, low, None)


@inlined
def _screen_panel(packed, block, rows, panel, column):
    """Bound x of one panel for the tokens of the block, GROUP at a time."""
    pairs, words = block.pairs, packed.words
    integer, zero = zeros(words.dtype, NARROW), zeros(packed.scale.dtype, NARROW)
    steps, groups = pairs.shape[1], block.lows.shape[1]
    start, group, fresh = panel * steps, column % groups, column < groups
    for t in range(0, rows, GROUP):
        a0, a1, a2, a3, a4, a5 = integer, integer, integer, integer, integer, integer
        for d in range(steps):
            key = load(words, start + d, 0, integer, None)
            a0 = dot_pairs(splat(pairs[t, d], integer), key, a0)
            a1 = dot_pairs(splat(pairs[t + 1, d], integer), key, a1)
            a2 = dot_pairs(splat(pairs[t + 2, d], integer), key, a2)
            a3 = dot_pairs(splat(pairs[t + 3, d], integer), key, a3)
            a4 = dot_pairs(splat(pairs[t + 4, d], integer), key, a4)
            a5 = dot_pairs(splat(pairs[t + 5, d], integer), key, a5)
        _bounds(packed, block, panel, t, column, group, fresh, a0, zero)
        _bounds(packed, block, panel, t + 1, column, group, fresh, a1, zero)
        _bounds(packed, block, panel, t + 2, column, group, fresh, a2, zero)
        _bounds(packed, block, panel, t + 3, column, group, fresh, a3, zero)
        _bounds(packed, block, panel, t + 4, column, group, fresh, a4, zero)
        _bounds(packed, block, panel, t + 5, column, group, fresh, a5, zero)


@inlined
def borrow_screen(packed, block):
    """Return the arrays without their reference counts."""
    return (
        Packed(
            borrowed(packed.words),
            borrowed(packed.scale),
            borrowed(packed.low),
            borrowed(packed.high),
            borrowed(packed.size),
            borrowed(packed.residue),
        ),
        Block(
            borrowed(block.words),
            borrowed(block.pairs),
            borrowed(block.factors),
            borrowed(block.high),
            borrowed(block.lows),
            borrowed(block.low_bits),
            borrowed(block.keys),
            borrowed(block.row),
            borrowed(block.bits),
            borrowed(block.hint),
        ),
    )


@inlined
def screen_block(queries, t0, rows, table, count, limit, packed, block):
    """Bound x of one table's sub-keys for the tokens t0 .. t0 + rows."""
    panels, factors = packed.scale.shape[0] // count, block.factors
    for t in range(rows):
        scale, square, size, residue = _to_words(queries, (t0 + t) * count + table, limit, block, t)
        factors[t, 0], factors[t, 1], factors[t, 2], factors[t, 3] = scale, residue, size + residue, square
    for p in range(panels):
        _screen_panel(packed, block, rows, table * panels + p, p * NARROW)


@inlined
def candidates(block, t, width, sub_keys, kept, epsilon, found):
    """Write the sub-keys that may be among the `kept` nearest of token t, ascending; return their number.

    With d = |q|^2 - 2 x, k sub-keys have d <= D = |q|^2 - 2 low. A distance by differences is within
    (h + 8) unit (d + epsilon) of its value, so one whose d exceeds D by 2 slack comes out greater than each of theirs.
    """
    square, groups, zero = np.float64(block.factors[t, 3]), block.lows.shape[1], zeros(block.high.dtype, NARROW)
    keys, low = block.keys, -np.inf
    if square < _LARGE:
        order_keys(block.low_bits, t * groups, groups, _LOWEST, _MINUS_INFINITY, keys)
        key, _ = threshold_of(keys, groups, kept, _LOWEST, block.hint)
        block.bits[1, 0] = key if key >= 0 else _LOWEST - key
        low = np.float64(block.row[1, 0])
    slack = (width + 16) * 2.0**-22 * (square + 2 * abs(low) + epsilon)
    cut, n = block.high.dtype.type(low - slack), 0
    if not cut > -np.inf:  # nothing is known
        for j in range(sub_keys):
            found[j] = j
        return sub_keys
    for c in range(0, block.high.shape[1], NARROW):
        mask = lanes_from(load(block.high, t, c, zero, None), cut)
        while mask:
            found[n] = c + lowest_bit(mask)
            n += 1
            mask &= mask - np.uint64(1)
    return n
