"""The compact form of a functional call: a table of the rows that its slots name, not of all.

Rows keep their order within a lane, so the plan, and with it every bit of the results, is that of the whole form.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import launch
from .call import Call
from .devices import cupy

#: bytes that numbering the rows takes for each use of one, at its peak: keys, their order, their sorted copy, flags
NUMBERING_BYTES = 48


class Compact(NamedTuple):
    """Which rows a call touches, and its slots counted among them."""

    row_start: Any  # int64 [L]: where a lane's rows begin among all
    rows: Any  # int64 [U], ascending: rows of the whole table [S H N, D]
    write_slots: Any  # int32 [B, T, H, W], from the lane's first row on
    read_slots: Any  # int32 [B, T, H, R]

    def to_saved(self) -> tuple[Any, Any, Any]:
        """Return it as flat arrays for the backward."""
        places = (self.write_slots.reshape(-1), self.read_slots.reshape(-1))
        return cupy().concatenate([self.row_start, self.rows]), *places

    @classmethod
    def from_saved(cls, call: Call, starts_and_rows: Any, write_slots: Any, read_slots: Any) -> Compact | None:
        """Return what a forward saved, None where it worked on the whole table."""
        if not starts_and_rows.size:
            return None
        both = starts_and_rows.view(np.int64)
        shapes = call.inputs.write_slots.shape, call.inputs.read_slots.shape
        slots = (x.view(np.int32).reshape(shape) for x, shape in zip((write_slots, read_slots), shapes, strict=True))
        return cls(both[: call.lanes], both[call.lanes :], *slots)

    def applied(self, call: Call) -> Call:
        """Return the call over the compact table."""
        inputs = call.inputs._replace(write_slots=self.write_slots, read_slots=self.read_slots)
        return call._replace(inputs=inputs, row_start=self.row_start)


def table_bytes(rows: int, width: int, state_bytes: int, *, uses: int = 0) -> int:
    """Return the bytes of a copy of `rows` rows, and of numbering them where `uses` name them."""
    return rows * width * state_bytes + uses * NUMBERING_BYTES


def is_smaller(lanes: int, slots: int, uses: int, width: int, state_bytes: int) -> bool:
    """Return whether the compact form takes less memory than the whole table, however its `uses` fall.

    >>> is_smaller(lanes=2, slots=262_144, uses=2 * 512 * 128, width=2048, state_bytes=2)
    True
    >>> is_smaller(lanes=2, slots=36_864, uses=2 * 8192 * 128, width=768, state_bytes=2)
    False
    """
    compact = table_bytes(uses, width, state_bytes, uses=uses)
    return 0 < compact < table_bytes(lanes * slots, width, state_bytes)


def peak_bytes(
    rows: int, tokens: int, *, width: int, writes: int, reads: int, state_bytes: int, log_bytes: int, grad_rows: int
) -> int:
    """Return the bytes that a float32 or 16-bit call holds at its peak, in the backward, beside inputs and results.

    Per row of its table, D numbers each: the saved table, its copy to undo, their gradient in float32; and 8 bytes of
    numbering. Per token (B T H of them): the errors, D float32; partial sums, (2 W + R + 1) ceil(D / 32) float32; the
    plan and the numbering, 14 (W + R) + 20. The log, and `grad_rows` rows of the state's gradient.
    """
    partial = (2 * writes + reads + 1) * -(-width // 32)
    per_token = 4 * (width + partial) + 14 * (writes + reads) + 20
    return rows * (width * (2 * state_bytes + 4) + 8) + tokens * per_token + log_bytes + 4 * grad_rows * width


def number_rows(call: Call) -> Compact:
    """Return the compact form of a call; waits for the device once, for the number of rows."""
    cp, x = cupy(), call.inputs
    first = _lane_of_tokens(call) * np.int64(call.slots)  # the whole table's row of each token's slot 0
    shapes = x.write_slots.shape, x.read_slots.shape
    keys = [(first + slots).reshape(-1) for slots in (x.write_slots, x.read_slots)]
    rows, places = cp.unique(cp.concatenate(keys), return_inverse=True)
    row_start = cp.searchsorted(rows, cp.arange(call.lanes, dtype=np.int64) * np.int64(call.slots)).astype(np.int64)
    begin = row_start[_lane_of_tokens(call)]
    split = keys[0].size
    parts = (places.reshape(-1)[:split], places.reshape(-1)[split:])
    slots = ((part.reshape(shape) - begin).astype(np.int32) for part, shape in zip(parts, shapes, strict=True))
    return Compact(row_start, rows, *slots)


def _lane_of_tokens(call: Call) -> Any:
    """Return each token's lane, int64 [B, T, H, 1]."""
    cp, heads = cupy(), call.heads
    batch = call.inputs.values.shape[0]
    if call.cu_seqlens is None:
        sequence = cp.arange(batch, dtype=np.int64)[:, None, None]
    else:
        ends = call.cu_seqlens[1:]
        found = cp.searchsorted(ends, cp.arange(call.tokens, dtype=np.int64), side="right")
        sequence = cp.minimum(found, ends.size - 1)[None, :, None]  # offsets that nobody has checked
    head = cp.arange(heads, dtype=np.int64)
    shape = (batch, call.tokens, heads)
    return cp.ascontiguousarray(cp.broadcast_to(sequence * heads + head, shape))[..., None]


def gather(compact: Compact, state: Any, what: str, fix: str) -> Any:
    """Return the rows of a state [S, H, N, D], or [H, N, D] shared by all sequences, [U, D]."""
    flat = state.reshape(-1, state.shape[-1])
    table = launch.empty((compact.rows.size, flat.shape[1]), state.dtype, what, fix)
    cupy().take(flat, compact.rows % len(flat), axis=0, out=table)
    return table


def scatter(compact: Compact, call: Call, grad: Any, state_shape: tuple[int, ...]) -> Any:
    """Return the gradient of a state from that of its touched rows: summed over the sequences that share it, in order.

    Waits for the device where a state is shared, for where each sequence's rows begin.
    """
    whole = launch.zeros(state_shape, grad.dtype, "the gradient of the state", "lower slots or batch")
    flat = whole.reshape(-1, call.width)
    if len(state_shape) == 4:
        flat[compact.rows] = grad
        return whole
    edges = [*compact.row_start[:: call.heads].get().tolist(), len(grad)]
    for begin, end in zip(edges[:-1], edges[1:], strict=True):  # a sequence's rows are distinct: no two add at once
        flat[compact.rows[begin:end] % len(flat)] += grad[begin:end]
    return whole
