"""Moving rows between a state [S, H, N, D] (or a shared [H, N, D]) and the compact table of what is touched."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..arrays import narrow_state, widen_state
from . import memory, plan, pool
from .compile import kernel

_PIECES = 16


class Source(NamedTuple):
    """Where a compact table's rows come from: row `place` of lane l is rows[start[l] + row_slots[...]]."""

    rows: np.ndarray  # [any, D]; none where the table is filled already
    start: np.ndarray  # int64 [L]
    row_slots: np.ndarray  # int32, as in Compact


def open_table(
    state: np.ndarray, compact: plan.Compact, lanes: plan.Lanes, state_dtype: str
) -> tuple[np.ndarray, Source]:
    """Return the compact table, and the source from which the forward fills it row by row as it goes.

    Where rows cannot be addressed in place (16-bit dtypes, odd strides) the table comes filled, and the source empty.
    """
    *outer, slots, width = state.shape
    item = state.itemsize
    steps = [stride // (width * item) if width else 0 for stride in state.strides[:-2]]
    direct = state.dtype.kind == "f" and state.flags.aligned and state.size > 0
    direct = direct and state.strides[-2:] == (width * item, item) and min(state.strides) >= 0
    if not direct or any(step * width * item != stride for step, stride in zip(steps, state.strides)):
        return gather(state, compact, lanes, state_dtype), no_source(state.shape[-1], compute_dtype(state))
    count = sum(step * (size - 1) for step, size in zip(steps, outer)) + slots
    rows = np.lib.stride_tricks.as_strided(state, (count, width), (width * item, item), writeable=False)
    start = sum(index * step for index, step in zip(np.unravel_index(lanes.table, outer), steps))
    table = memory.empty((len(compact.row_slots), width), state.dtype)
    return table, Source(memory.for_kernels(rows), np.asarray(start, np.int64), compact.row_slots)


def no_source(width: int, dtype: np.dtype) -> Source:
    """Return the source of a table that is complete."""
    return Source(np.empty((0, width), dtype), np.empty(0, np.int64), np.empty(0, np.int32))


def compute_dtype(state: np.ndarray) -> np.dtype:
    """Return the dtype of a state's arithmetic: its own, or float32 for the bits of a 16-bit one."""
    return state.dtype if state.dtype.kind == "f" else np.dtype(np.float32)


def gather(state: np.ndarray, compact: plan.Compact, lanes: plan.Lanes, state_dtype: str) -> np.ndarray:
    """Return the compact table: the touched rows of each lane's table, 16-bit ones widened to float32."""
    compute = compute_dtype(state)
    table = memory.empty((len(compact.row_slots), state.shape[-1]), compute)

    def job(lo: int, hi: int) -> None:
        for lane in range(lo, hi):
            rows = compact.rows_of(lane)
            source, slots = _table_of(state, lanes.table[lane]), compact.row_slots[rows]
            if source.dtype == compute:
                np.take(source, slots, axis=0, out=table[rows], mode="clip")
            else:
                table[rows] = widen_state(np.take(source, slots, axis=0, mode="clip"), state_dtype)

    pool.run(len(lanes.first), job, table.size)
    return table


def scatter(state: np.ndarray, table: np.ndarray, compact: plan.Compact, lanes: plan.Lanes, state_dtype: str) -> None:
    """Write the compact table's rows back to their slots."""

    def job(lo: int, hi: int) -> None:
        for lane in range(lo, hi):
            rows = compact.rows_of(lane)
            _table_of(state, lanes.table[lane])[compact.row_slots[rows]] = narrow_state(table[rows], state_dtype)

    pool.run(len(lanes.first), job, table.size)


def state_gradient(
    grad: np.ndarray, dfinal: np.ndarray | None, compact: plan.Compact, lanes: plan.Lanes, state_shape: tuple[int, ...]
) -> np.ndarray:
    """Return dL/dM0: the touched rows' gradients, dfinal or zero elsewhere; a shared state adds up its sequences."""
    shared = len(state_shape) == 3
    if dfinal is not None:
        dstate = np.array(dfinal, order="C")
        scatter(dstate, grad, compact, lanes.of_own_state(), "float32")
        if not shared:
            return dstate
        return sum_parts(dstate) if len(dstate) else np.zeros(state_shape, grad.dtype)
    dstate = memory.empty(state_shape, grad.dtype)
    if not shared:
        flat, slots = dstate.reshape(math.prod(state_shape[:-1]), state_shape[-1]), state_shape[-2]

        def job(lo: int, hi: int) -> None:
            _spread(lo, hi, slots, grad, compact.row_start, compact.row_slots, flat)

        pool.run(len(lanes.first), job, dstate.size)
        return dstate
    _clear(dstate)
    for lane, table in enumerate(lanes.table):
        rows = compact.rows_of(lane)
        dstate[table][compact.row_slots[rows]] += grad[rows]
    return dstate


def sum_parts(parts: np.ndarray) -> np.ndarray:
    """Return the sum over the first axis, one after the other (in the first's memory)."""
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


def _table_of(state: np.ndarray, index: int) -> np.ndarray:
    """Return the [N, D] table number `index`."""
    return state[index] if state.ndim == 3 else state[divmod(index, state.shape[1])]


@kernel
def _spread(lo, hi, slots, grad, row_start, row_slots, dstate):
    """Set each lane's table of dstate: its compact rows at their slots, zero elsewhere; every cell once."""
    place = np.empty(slots, np.int64)
    for lane in range(lo, hi):
        place[:] = -1
        for row in range(row_start[lane], row_start[lane + 1]):
            place[row_slots[row]] = row
        for slot in range(slots):
            out = dstate[lane * slots + slot]
            if place[slot] < 0:
                out[:] = 0.0
            else:
                out[:] = grad[place[slot]]


def _clear(array: np.ndarray) -> None:
    flat = array.reshape(-1)
    step = -(-flat.size // _PIECES)

    def job(lo: int, hi: int) -> None:
        flat[lo * step : hi * step] = 0

    pool.run(_PIECES, job, flat.size)
