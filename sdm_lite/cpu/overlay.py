"""Which row of a pool holds a slot: the index of a copy-on-write memory, and the reference counts of its rows.

A lane (one sequence and head) owns a row for each slot that it has written; every other slot is that of the initial
memory. Per lane the index is a hash table with open addressing, at most half full::

    table int32 [L, C, 2]    (slot, row), C a power of two; slot -1: free place; row -1: the initial memory's row
    filled int64 [L]         places taken

The pool numbers its rows from 0; a number may be given out before the row's memory exists. One writer at a time::

    refs int32 [rows]        who holds the row: entries of tables, and of undo logs
    stamp int64 [rows]       the clock at which the row was given out
    free int32 [rows]        stack of numbers to give out again
    counters int64 [2]       height of that stack; numbers ever given out

A row may be written in place by the lane that alone holds it, unless it is older than the lane's last mark (`epoch`):
else the write goes to a copy. What a call changed is listed as ``changes int32 [n, 4]``: (lane, slot, old row or -1,
new row), in the order of first write, lane by lane; :func:`undo` takes a list back.

Bytes per slot looked up: 8, mostly one cache line. Integers only: the arithmetic is in paged.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .compile import inlined, kernel
from .values import bad_slots
from .vector import CACHE_LINE, borrowed, prefetch, zeros

FREE, TOP = 0, 1  # places in `counters`
LANE, SLOT, OLD, NEW = 0, 1, 2, 3  # columns of `changes`
SUSPECT, FULL = -1, -2  # what resolve returns for values that need a closer look, and where there is no room
RISING, NO_SLOTS, PADDING, OTHER = 1, 0, -1, -2  # kinds of a token's slots
SMALLEST = 16  # places of the smallest table
_LINE = CACHE_LINE // 4  # int32 numbers of a cache line
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio


class Numbers(NamedTuple):
    """A pool's bookkeeping; arrays as in the module's text."""

    refs: np.ndarray
    stamp: np.ndarray
    free: np.ndarray
    counters: np.ndarray


class Places(NamedTuple):
    """What :func:`resolve` finds out; n = B T H tokens, flat."""

    padded: np.ndarray  # bool [n]
    write: np.ndarray  # int32 [n, W]
    read: np.ndarray  # int32 [n, R]
    changes: np.ndarray  # int32 [any, 4]
    change_start: np.ndarray  # int64 [L + 1]: lane l has changes change_start[l] : change_start[l + 1]
    seen: np.ndarray  # int64 [B]: tokens that are not padding


@kernel
def resolve(
    heads, tokens, write_slots, read_slots, log_decay, num_slots, table, filled, numbers, clock, epoch, check, places
):  # fmt: skip
    """Find the rows of the tokens [B, T, H] (flat), give out rows for first writes, and return how many changes.

    A place is a row's number, or -1 - slot for a row of the initial memory. A token whose slots are all -1 is
    `padded` and has no places. With `check`, returns SUSPECT and changes nothing unless every token of [B, T] is
    padded in all heads, or has ascending slots in range and log decays <= 0 in all of them; without, `padded` is given.
    Returns FULL and changes nothing where the table or the pool's bookkeeping might not hold all first writes.
    """
    numbers, table = _borrowed(numbers), borrowed(table)
    write_slots, read_slots, log_decay = borrowed(write_slots), borrowed(read_slots), borrowed(log_decay)
    padded, change_start = borrowed(places.padded), borrowed(places.change_start)
    write_places, read_places, changes = borrowed(places.write), borrowed(places.read), borrowed(places.changes)
    flat, refs = borrowed(table.reshape(table.shape[0], -1)), borrowed(numbers.refs.reshape(1, -1))
    line = zeros(np.float32, _LINE)
    if check and not _screen(heads, write_slots, read_slots, log_decay, num_slots, padded):
        return np.int64(SUSPECT)
    most = min(tokens * write_slots.shape[1], num_slots)  # first writes of a lane
    if numbers.counters[TOP] + table.shape[0] * most > numbers.refs.shape[0]:
        return np.int64(FULL)
    for lane in range(table.shape[0]):
        if 2 * (filled[lane] + most) > table.shape[1]:
            return np.int64(FULL)
    places.seen[:] = 0
    count = np.int64(0)
    for lane in range(table.shape[0]):
        change_start[lane] = count
        for t in range(tokens):
            token = ((lane // heads) * tokens + t) * heads + lane % heads
            if padded[token]:
                continue
            if lane % heads == 0:
                places.seen[lane // heads] += 1
            _prefetch_places(flat, lane, write_slots, token, line)
            _prefetch_places(flat, lane, read_slots, token, line)
            for w in range(write_slots.shape[1]):
                row = table[lane, _find(table, lane, write_slots[token, w]), 1]
                write_places[token, w] = row
                prefetch(refs, 0, max(row, 0), line)
            for w in range(write_slots.shape[1]):
                row = write_places[token, w]
                if row < 0 or refs[0, row] > 1 or (epoch > 0 and numbers.stamp[row] < epoch):
                    slot, taken = write_slots[token, w], _give_out(numbers, clock)
                    changes[count, LANE], changes[count, SLOT] = lane, slot
                    changes[count, OLD], changes[count, NEW] = row, taken
                    count += 1
                    at = _find(table, lane, slot)
                    filled[lane] += table[lane, at, 0] < 0
                    table[lane, at, 0], table[lane, at, 1] = slot, taken
                    write_places[token, w] = taken
            for r in range(read_slots.shape[1]):
                slot = read_slots[token, r]
                row = table[lane, _find(table, lane, slot), 1]
                read_places[token, r] = row if row >= 0 else -1 - slot
    change_start[table.shape[0]] = count
    return count


@inlined
def _screen(heads, write_slots, read_slots, log_decay, num_slots, padded):
    """Set `padded` and return whether all tokens are certainly right."""
    for token in range(write_slots.shape[0]):
        writes, reads = _kind(write_slots[token], num_slots), _kind(read_slots[token], num_slots)
        padded[token] = max(writes, reads) <= NO_SLOTS and min(writes, reads) == PADDING
        if not padded[token]:
            good = min(writes, reads) >= NO_SLOTS
            for w in range(log_decay.shape[1]):
                good = good and log_decay[token, w] <= 0
            if not good:
                return False
        if token % heads and padded[token] != padded[token - 1]:
            return False
    return True


@inlined
def _kind(slots, num_slots):
    """Return RISING (and in range), NO_SLOTS, PADDING or OTHER."""
    count = slots.shape[0]
    if count == 0:
        return NO_SLOTS
    if slots[0] == -1:
        return PADDING if slots.max() == -1 and slots.min() == -1 else OTHER
    return RISING if bad_slots(slots, num_slots) == 0 else OTHER


@inlined
def _find(table, lane, slot):
    """Return the place of a slot in the lane's table, or the free place where it would go."""
    mask = np.uint64(table.shape[1] - 1)
    at = _home(slot, mask)
    while table[lane, at, 0] != slot and table[lane, at, 0] >= 0:
        at = (at + np.uint64(1)) & mask
    return at


@inlined
def _prefetch_places(flat, lane, slots, token, line):
    """Ask the cache for where the slots of a token should be: else every look-up would wait for memory by itself."""
    mask = np.uint64(flat.shape[1] // 2 - 1)
    for slot in slots[token]:
        prefetch(flat, lane, 2 * np.int64(_home(slot, mask)), line)


@inlined
def _home(slot, mask):
    """Return the place where the search for a slot begins."""
    return ((np.uint64(slot) * np.uint64(_GOLDEN)) >> np.uint64(32)) & mask


@inlined
def _borrowed(numbers):
    """Return the arrays without their reference counts."""
    refs, stamp, free, counters = numbers
    return Numbers(borrowed(refs), borrowed(stamp), borrowed(free), borrowed(counters))


@inlined
def _give_out(numbers, clock):
    """Return a row's number, held once."""
    if numbers.counters[FREE] > 0:
        numbers.counters[FREE] -= 1
        row = np.int64(numbers.free[numbers.counters[FREE]])
    else:
        row = numbers.counters[TOP]
        numbers.counters[TOP] += 1
    numbers.refs[row] = 1
    numbers.stamp[row] = clock
    return row


@inlined
def _let_go(numbers, row):
    numbers.refs[row] -= 1
    if numbers.refs[row] == 0:
        numbers.free[numbers.counters[FREE]] = row
        numbers.counters[FREE] += 1


@kernel
def undo(table, changes, numbers):
    """Take changes back, the last one first: the old row (or none) holds the slot again, the present one is let go."""
    for i in range(changes.shape[0] - 1, -1, -1):
        lane = np.int64(changes[i, LANE])
        at = _find(table, lane, changes[i, SLOT])
        row = table[lane, at, 1]
        table[lane, at, 1] = changes[i, OLD]
        _let_go(numbers, row)


@kernel
def hold(pairs, column, numbers):
    """Count one more reference to each row of a column (-1: none)."""
    for i in range(pairs.shape[0]):
        if pairs[i, column] >= 0:
            numbers.refs[pairs[i, column]] += 1


@kernel
def let_go(pairs, column, numbers):
    """Count one reference less to each row of a column (-1: none); a row that nobody holds is free."""
    for i in range(pairs.shape[0]):
        if pairs[i, column] >= 0:
            _let_go(numbers, pairs[i, column])


@kernel
def rehash(table, larger, filled):
    """Fill a larger (empty) table with the slots that have a row."""
    for lane in range(table.shape[0]):
        filled[lane] = 0
        for place in range(table.shape[1]):
            if table[lane, place, 1] >= 0:
                at = _find(larger, lane, table[lane, place, 0])
                larger[lane, at, 0] = table[lane, place, 0]
                larger[lane, at, 1] = table[lane, place, 1]
                filled[lane] += 1


@kernel
def insert(table, filled, lane, slot, row):
    """Give slots that an (emptied, large enough) index does not have yet their rows."""
    for i in range(lane.shape[0]):
        at = _find(table, lane[i], slot[i])
        table[lane[i], at, 0] = slot[i]
        table[lane[i], at, 1] = row[i]
        filled[lane[i]] += 1
