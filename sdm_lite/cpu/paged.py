"""Sparse delta rule, forward, on a copy-on-write memory: rows of an initial memory and of a pool of pages.

Equations, order of sums and rounding are those of forward.py, whose block function does the arithmetic: the same bits.
What differs is where a row lies. Addresses are counted in elements from the start of a small array, `origin`::

    offset of row p >= 0 of the pool          page_at[p // page_rows] + (p % page_rows) D
    offset of slot -1 - p of head h           initial_at + (h N + slot) D, or initial_at where the memory is all zero

so that one table of rows one element apart spans every page and the initial memory. Storage may be 16-bit.

Ownership: a job is (lane, tile of columns); it alone writes its columns of the rows that its lane may write, and copies
into a row given out by this call (overlay.py) right before the row's first write. Rows that are copied from are not
written by anyone before the call has ended.
Bytes per token and lane: (2 W + R) D itemsize, and 2 D itemsize for each copied row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .compile import inlined, kernel
from .forward import BLOCK, NARROW, Tokens, borrow_saved, borrow_tokens, copy_columns, decays, token_columns
from .overlay import NEW, OLD, SLOT
from .vector import borrowed, zeros


class Paged(NamedTuple):
    """Where the rows are."""

    origin: np.ndarray  # [any, D], rows one element apart, in the state's storage dtype
    page_at: np.ndarray  # int64 [pages], elements from the origin
    page_bits: int  # log2 of the rows of a page
    initial_at: int  # elements from the origin
    slot_step: int  # N times this many rows per head: 1, or 0 where one row of zeros stands for all


@kernel
def sparse_delta_paged(
    lo, hi, tile_columns, heads, tokens, num_slots, paged, x, places, saved, readings, per_slot, rounding
):  # fmt: skip
    """Run jobs [lo, hi); job = lane * tiles + tile. `places` is what overlay.resolve found."""
    x, saved = borrow_tokens(x), borrow_saved(saved)
    origin, page_at, readings = borrowed(paged.origin), borrowed(paged.page_at), borrowed(readings)
    padded, change_start = borrowed(places.padded), borrowed(places.change_start)
    write_places, read_places, changes = borrowed(places.write), borrowed(places.read), borrowed(places.changes)
    width, writes = x.values.shape[1], x.write_slots.shape[1]
    tiles = (width + tile_columns - 1) // tile_columns
    scratch = np.empty((2, writes), x.values.dtype)
    alpha, scaled = borrowed(scratch[0]), borrowed(scratch[1])
    offsets = np.empty((1, writes + x.read_slots.shape[1]), np.int64)
    write_rows, read_rows = borrowed(offsets[:, :writes]), borrowed(offsets[:, writes:])
    wide, narrow = zeros(x.values.dtype, BLOCK), zeros(x.values.dtype, NARROW)
    for job in range(lo, hi):
        lane = job // tiles
        head = lane % heads
        begin = (job % tiles) * tile_columns
        end = min(begin + tile_columns, width)
        initial = (paged.initial_at, head * num_slots * paged.slot_step, paged.slot_step, width)
        change = change_start[lane]
        for t in range(tokens):
            token = ((lane // heads) * tokens + t) * heads + head
            if padded[token]:
                readings[token, begin:end] = 0
                continue
            for w in range(writes):
                place = write_places[token, w]
                write_rows[0, w] = _offset(place, page_at, paged.page_bits, initial)
                if change < change_start[lane + 1] and changes[change, NEW] == place:
                    old = changes[change, OLD] if changes[change, OLD] >= 0 else -1 - changes[change, SLOT]
                    from_row = _offset(old, page_at, paged.page_bits, initial)
                    copy_columns(origin, write_rows[0, w], origin, from_row, begin, end, wide, narrow)
                    change += 1
            for r in range(read_places.shape[1]):
                read_rows[0, r] = _offset(read_places[token, r], page_at, paged.page_bits, initial)
            decays(x.log_decay, token, alpha)
            for w in range(writes):
                scaled[w] = alpha[w] * x.write_weights[token, w]
            one = Tokens(
                x.values[token : token + 1],
                write_rows,
                x.write_weights[token : token + 1],
                x.log_decay[token : token + 1],
                x.beta[token : token + 1],
                read_rows,
                x.read_weights[token : token + 1],
            )
            token_columns(
                begin, end, wide, narrow, 0, 0, origin, None, borrow_tokens(one), saved, alpha, scaled,
                borrowed(readings[token : token + 1]), per_slot, rounding,
            )  # fmt: skip
    return scratch.size + offsets.size  # keeps both alive till here


@inlined
def _offset(place, page_at, page_bits, initial):
    """Return where a place's row begins, in elements from the origin."""
    place = np.int64(place)
    initial_at, first, step, width = initial
    if place >= 0:
        return page_at[place >> page_bits] + (place & ((1 << page_bits) - 1)) * width
    return initial_at + (first + (-1 - place) * step) * width
