"""What is decided before any row is touched: lanes, the compact table, the log.

A *lane* is one (sequence, head): its tokens are the flat token numbers first, first + H, first + 2 H, ... of
[B, T, H]. The *compact table* holds the rows that a lane's tokens write or read, in the order of first touch.
The *log plan* (spec section 6) says which overwritten rows are logged, from slots and decays alone.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from . import memory
from .compile import inlined, kernel
from .pool import run
from .vector import borrowed

_PER_SLOT = 8  # numbers moved that cost what a slot costs here


class Lanes(NamedTuple):
    """Where each lane's tokens and its table lie; index arrays are int64 [L]."""

    first: np.ndarray
    tokens: np.ndarray
    stride: int
    table: np.ndarray  # which of the state's [S * H] (or shared [H]) tables

    def of_own_state(self) -> Lanes:
        """Return the lanes over a state [S, H, N, D], also where the initial one is shared."""
        return self._replace(table=np.arange(len(self.first)))


def make_lanes(batch: int, tokens: int, heads: int, cu_seqlens: np.ndarray | None, shared_state: bool) -> Lanes:
    """Return the lanes of a call, sequence by sequence and head by head."""
    if cu_seqlens is None:
        return _equal_lanes(batch, tokens, heads, shared_state)
    return _lanes(cu_seqlens[:-1], np.diff(cu_seqlens), heads, shared_state)


@functools.lru_cache(maxsize=64)  # nobody writes into them
def _equal_lanes(batch: int, tokens: int, heads: int, shared_state: bool) -> Lanes:
    return _lanes(np.arange(batch, dtype=np.int64) * tokens, np.full(batch, tokens, np.int64), heads, shared_state)


def _lanes(start: np.ndarray, count: np.ndarray, heads: int, shared_state: bool) -> Lanes:
    head = np.arange(heads, dtype=np.int64)
    first = (start[:, None] * heads + head).ravel()
    table = np.broadcast_to(head, (len(start), heads)).ravel() if shared_state else np.arange(len(first))
    return Lanes(first, np.repeat(count, heads), heads, np.ascontiguousarray(table))


def _flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class Compact(NamedTuple):
    """Places of the slots in the compact table, and the slot of each of its rows."""

    write_places: np.ndarray  # int32 [B, T, H, W], within the lane
    read_places: np.ndarray
    row_start: np.ndarray  # int64 [L + 1]: lane l owns rows row_start[l] : row_start[l + 1]
    row_slots: np.ndarray  # int32 [rows]

    def rows_of(self, lane: int) -> slice:
        """Return where a lane's rows lie in the table."""
        return slice(self.row_start[lane], self.row_start[lane + 1])


def compact(write_slots: np.ndarray, read_slots: np.ndarray, lanes: Lanes, num_slots: int) -> Compact:
    """Number the slots that each lane touches in the order of first touch."""
    writes, reads = write_slots.shape[-1], read_slots.shape[-1]
    most = np.minimum(lanes.tokens * (writes + reads), num_slots)
    begin = np.concatenate(([0], np.cumsum(most)))
    slots_of = np.empty(begin[-1], np.int32)
    used = np.zeros(len(most), np.int64)
    places = [memory.empty(x.shape, x.dtype) for x in (write_slots, read_slots)]
    flat = [_flat(memory.for_kernels(x)) for x in (write_slots, read_slots, *places)]
    bits = max(int(most.max(initial=1)) * 2 - 1, 1).bit_length()  # a hash table at most half full
    hashed = bits if num_slots > 1 << bits else None

    def job(lo: int, hi: int) -> None:
        _compact_lanes(lo, hi, lanes.first, lanes.tokens, lanes.stride, num_slots, *flat, begin, slots_of, used, hashed)

    run(len(most), job, _PER_SLOT * (write_slots.size + read_slots.size))
    row_start = np.concatenate(([0], np.cumsum(used)))
    row_slots = np.concatenate([slots_of[b : b + n] for b, n in zip(begin, used)]) if len(used) else slots_of
    return Compact(*places, row_start, row_slots)


@kernel
def _compact_lanes(
    lo, hi, first, count, stride, num_slots, write_slots, read_slots, write_places, read_places, begin, slots_of, used,
    bits,
):  # fmt: skip
    write_slots, read_slots = borrowed(write_slots), borrowed(read_slots)
    write_places, read_places = borrowed(write_places), borrowed(read_places)
    known_places = np.empty(num_slots if bits is None else 1 << bits, np.int32)  # of a slot, or of a hashed one
    known, slots_of = borrowed(known_places), borrowed(slots_of)
    for lane in range(lo, hi):
        known[:] = -1
        mine = slots_of[begin[lane] : begin[lane + 1]]
        rows = np.int32(0)
        for t in range(count[lane]):
            token = first[lane] + t * stride
            rows = _number(write_slots, write_places, token, known, mine, rows, bits)
            rows = _number(read_slots, read_places, token, known, mine, rows, bits)
        used[lane] = rows
    return known_places.size  # keeps it alive till here


@inlined
def _number(slots, places, token, known, mine, rows, bits):
    """Set places[token] to the places of slots[token], a new one from `rows` at a slot's first touch."""
    for i in range(slots.shape[1]):
        slot = slots[token, i]
        if bits is None:
            at = np.uint64(slot)
        else:  # open addressing; the multiplier is 2^64 / golden ratio
            at = (np.uint64(slot) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - bits)
            while known[at] >= 0 and mine[np.uint64(known[at])] != slot:
                at = (at + np.uint64(1)) & np.uint64((1 << bits) - 1)
        place = known[at]
        if place < 0:
            place = rows
            known[at] = rows
            mine[np.uint64(rows)] = slot
            rows += np.int32(1)
        places[token, i] = place
    return rows


def known_rows(write_places: np.ndarray, read_places: np.ndarray, lanes: Lanes) -> np.ndarray:
    """Return int32 [n, 2]: how many of its lane's rows were touched before each token, and before its reads."""
    known = np.empty((math.prod(write_places.shape[:-1]), 2), np.int32)
    places = [_flat(memory.for_kernels(x)) for x in (write_places, read_places)]

    def job(lo: int, hi: int) -> None:
        _count_known(lo, hi, lanes.first, lanes.tokens, lanes.stride, *places, known)

    run(len(lanes.first), job, (write_places.size + read_places.size) // 4)
    return known


@kernel
def _count_known(lo, hi, first, count, stride, write_places, read_places, known):
    write_places, read_places, known = borrowed(write_places), borrowed(read_places), borrowed(known)
    for lane in range(lo, hi):
        rows = np.int32(0)
        for t in range(count[lane]):
            token = first[lane] + t * stride
            known[token, 0] = rows
            for place in write_places[token]:
                rows = max(rows, np.int32(place + 1))  # places are numbered by first touch
            known[token, 1] = rows
            for place in read_places[token]:
                rows = max(rows, np.int32(place + 1))


LOG_ALL = -1.0


def plan_log(places: np.ndarray, weights, log_decay, beta, lanes: Lanes, row_start, per_slot: bool, tau: float):
    """Return (log_place int32 [B, T, H, W], rows to log): a row's number in the log, or -1 where it is inverted.

    A row is logged when the decay accumulated since its last logged value would fall below -tau, or when one token
    decays it too far to divide by. tau = LOG_ALL logs every row (snapshot), math.inf as few as possible (invert).
    """
    if tau == LOG_ALL:
        return np.arange(places.size, dtype=np.int32).reshape(places.shape), places.size
    log_place = memory.empty(places.shape, np.dtype(np.int32))
    rows = np.zeros(len(lanes.first), np.int64)
    steepest = -80.0 if weights.dtype == np.float32 else -600.0
    flat = [_flat(memory.for_kernels(x)) for x in (places, weights, log_decay, log_place)]
    flat_beta = beta.reshape(-1)

    def job(lo: int, hi: int) -> None:
        lane_arrays = (lanes.first, lanes.tokens, lanes.stride, row_start)
        _plan_lanes(lo, hi, *lane_arrays, *flat[:3], flat_beta, per_slot, tau, steepest, flat[3], rows)

    run(len(rows), job, _PER_SLOT * places.size)
    start = np.cumsum(rows) - rows

    def shift(lo: int, hi: int) -> None:
        _shift_lanes(lo, hi, lanes.first, lanes.tokens, lanes.stride, flat[3], start)

    if start.any():
        run(len(rows), shift, places.size)
    return log_place, int(rows.sum())


@kernel
def _plan_lanes(
    lo, hi, first, count, stride, row_start, places, weights, log_decay, beta, per_slot, tau, steepest, log_place, rows
):
    places, weights, log_decay = borrowed(places), borrowed(weights), borrowed(log_decay)
    beta, log_place = borrowed(beta), borrowed(log_place)
    writes, per_head = places.shape[1], log_decay.shape[1] == 1
    most = np.diff(row_start[lo : hi + 1]).max()
    since_rows = np.empty(most)  # log decay of each row since its last logged value
    since = borrowed(since_rows)
    for lane in range(lo, hi):
        since[: row_start[lane + 1] - row_start[lane]] = 0.0
        logged = np.int32(0)
        for t in range(count[lane]):
            token = first[lane] + t * stride
            for w in range(writes):
                decay = np.float64(log_decay[token, 0 if per_head else w])
                if per_slot:
                    decay += np.log(abs(1.0 - np.float64(beta[token]) * np.float64(weights[token, w])))
                row = np.uint64(places[token, w])
                accumulated = min(since[row] + decay, 0.0)
                log_it = not (accumulated >= -tau and decay >= steepest)
                log_place[token, w] = logged if log_it else np.int32(-1)
                since[row] = 0.0 if log_it else accumulated
                logged += np.int32(log_it)
        rows[lane] = logged
    return since_rows.size  # keeps it alive till here


@kernel
def _shift_lanes(lo, hi, first, count, stride, log_place, start):
    for lane in range(lo, hi):
        for t in range(count[lane]):
            token = first[lane] + t * stride
            for w in range(log_place.shape[1]):
                if log_place[token, w] >= 0:
                    log_place[token, w] += start[lane]
