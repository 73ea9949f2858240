"""The plan of the hybrid log (spec section 6) on a GPU: which overwritten rows are logged, from slots and decays alone.

A row is logged when the decay accumulated since its last logged value would fall below -tau, or when one token decays
it too far to divide by. What a slot's uses decide depends on no other slot, so uses are sorted by (lane, slot, time)
and a thread walks one slot's chain. Logged rows are numbered in the order of lanes, tokens and writes.

Per use: 24 bytes of keys and order, 8 of flags and numbers, a gather of its decay. Twin: sdm_lite/cpu/plan.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

_THREADS = 128
#: log decay of one token below which a row cannot be divided back, by bytes of the compute dtype
_STEEPEST = {4: -80.0, 8: -600.0}


def plan_log(
    xp: Any, write_slots: Any, write_weights: Any, log_decay: Any, beta: Any, cu_seqlens: Any, *,
    num_slots: int, per_slot: bool, tau: float, stream: Any = 0, to_numba: Callable[[Any], Any] = lambda x: x,
) -> tuple[Any, int]:  # fmt: skip
    """Return each write's number in the log, or -1 where its row is inverted, and how many are logged.

    Parameters
    ----------
    xp : module
        CuPy, whose arrays the others are; NumPy in Numba's simulator.
    write_slots : array [B, T, H, W], int32
        In [0, num_slots), distinct within a token and head.
    write_weights : array [B, T, H, W], float32 or float64
    log_decay : array [B, T, H, 1] or [B, T, H, W]
    beta : array [B, T, H]
    cu_seqlens : array [S + 1], int64, or None
        Bounds of packed sequences, with B = 1.
    num_slots : int
    per_slot : bool
        The rule: the decay of a write is then that of (1 - beta k) alpha.
    tau : float
        As `restore_tau`; math.inf logs as few rows as possible.
    stream
        A Numba stream; the number of logged rows makes the host wait for it.
    to_numba : callable
        Makes a Numba array of one of `xp`; without it Numba waits for the stream at every launch.

    Returns
    -------
    log_place : array [B, T, H, W], int32
    rows : int
    """
    batch, tokens, heads, writes = write_slots.shape
    count = batch * tokens * heads
    log_place = xp.empty(write_slots.shape, np.int32)
    if count * writes == 0:
        return log_place, 0
    starts = xp.arange(batch + 1, dtype=np.int64) * tokens if cu_seqlens is None else cu_seqlens
    keys, token_of = xp.empty(count * writes, np.int64), xp.empty(count, np.int64)
    logged = xp.empty(count * writes, np.int32)
    grid = -(-count * writes // _THREADS)

    def launch(kernel: Any, *arguments: Any) -> None:
        kernel[grid, _THREADS, stream](*(to_numba(a) if hasattr(a, "dtype") else a for a in arguments))

    launch(_make_keys, write_slots.reshape(-1), starts, heads, writes, num_slots, keys, token_of)
    order = xp.argsort(keys, kind="stable")
    gates = write_weights.reshape(count, writes), log_decay.reshape(count, -1), beta.reshape(count)
    limits = per_slot, float(tau), _STEEPEST[write_weights.dtype.itemsize]
    launch(_walk_chains, keys, order, token_of, *gates, *limits, logged)
    numbers = xp.cumsum(logged, dtype=np.int32)
    launch(_place, logged, numbers, token_of, writes, log_place.reshape(-1))
    return log_place, int(numbers[-1])


@cuda.jit
def _make_keys(write_slots, starts, heads, writes, num_slots, keys, token_of):
    """keys[(base + t) W + w] = lane N + slot, token_of[base + t] = flat token: a lane's tokens side by side."""
    i = cuda.grid(1)
    if i >= write_slots.size:
        return
    token, w = i // writes, i % writes
    position, head = token // heads, token % heads
    low, high = 0, starts.size - 2  # the last sequence that starts at or before the position
    while low < high:
        middle = (low + high + 1) // 2
        if starts[middle] <= position:
            low = middle
        else:
            high = middle - 1
    begin, stop = starts[low], starts[low + 1]
    place = begin * heads + head * (stop - begin) + position - begin
    keys[place * writes + w] = (low * heads + head) * num_slots + write_slots[i]
    if w == 0:
        token_of[place] = token


@cuda.jit
def _walk_chains(keys, order, token_of, weights, log_decay, beta, per_slot, tau, steepest, logged):
    """Set logged[use] to 1 or 0; the thread of a slot's first use walks them all."""
    i = cuda.grid(1)
    if i >= order.size:
        return
    key = keys[order[i]]
    if i > 0 and keys[order[i - 1]] == key:
        return
    since = 0.0  # log decay since the row's last logged value
    while i < order.size and keys[order[i]] == key:
        use = order[i]
        token, w = token_of[use // weights.shape[1]], use % weights.shape[1]
        decay = np.float64(log_decay[token, w if log_decay.shape[1] > 1 else 0])
        if per_slot:
            kept = abs(1.0 - np.float64(beta[token]) * np.float64(weights[token, w]))
            decay += math.log(kept) if kept > 0.0 else -math.inf
        since = min(since + decay, 0.0)
        inverted = since >= -tau and decay >= steepest
        logged[use] = 0 if inverted else 1
        if not inverted:
            since = 0.0
        i += 1


@cuda.jit
def _place(logged, numbers, token_of, writes, log_place):
    """log_place[token, w] = the use's number among the logged ones, or -1."""
    use = cuda.grid(1)
    if use < logged.size:
        token, w = token_of[use // writes], use % writes
        log_place[token * writes + w] = numbers[use] - 1 if logged[use] == 1 else -1
