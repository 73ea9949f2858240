"""One call of a state, from the caller's arrays to readings: check, find rows, run the kernel, settle.

Nothing is changed before everything has been checked and the pages for the new rows are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import arrays, ops, validate
from ..cpu import overlay
from ..cpu.sparse_delta import sparse_delta_paged
from ..errors import DtypeError, ShapeError, SlotError, message
from ..rooms import DeltaInputs
from .undo import Index

if TYPE_CHECKING:
    from .state import MemoryState


class _Shape(NamedTuple):
    """What the checks of metadata want to know of a state."""

    shape: tuple[int, ...]
    dtype: Any


def run(state: MemoryState, op: str, given: tuple, *, one_token: bool) -> Any:
    """Return the readings of `step` or `extend` in the caller's kind."""
    kind = arrays.common_kind(op, dict(zip(DeltaInputs._fields, given)))
    ops.host_backend(op, kind, None)  # refuses a device that no room serves
    if kind == "tape":
        raise DtypeError(message(op, "arrays", "NumPy arrays or tensors", "a tape Tensor", "pass .data"))
    if kind == "torch":
        from .. import torch_state

        return torch_state.run(state, op, given, one_token)
    views = [arrays.to_numpy(op, name, x) for name, x in zip(DeltaInputs._fields, given)]
    call = lifted(op, views) if one_token else views
    check_once(state, op, call)
    compute = state._initial.compute
    inputs = DeltaInputs(
        arrays.to_float(call[0], compute),
        arrays.to_slots(call[1]),
        arrays.to_float(call[2], compute),
        arrays.to_float(call[3], compute),
        arrays.to_float(call[4], compute),
        arrays.to_slots(call[5]),
        arrays.to_float(call[6], compute),
    )
    readings = arrays.from_float(advance(state, op, inputs), call[0].dtype)
    return arrays.like(given[0], kind, readings[:, 0] if one_token else readings)


def lifted(op: str, call: list) -> list:
    """Return a step's arrays with an axis of one token, whatever their framework."""
    for name, x, letters in zip(DeltaInputs._fields, call, ("D", "W", "W", "", "", "R", "R")):
        ranks = (2, 3) if name == "log_decay" else (3,) if letters else (2,)
        if len(x.shape) not in ranks:
            sizes = (None,) * ranks[-1]
            fix = "pass one token, or call extend with [B, T, H, ...]"
            validate.check_shape(op, name, x, sizes, f"[B, H, {letters}]" if letters else "[B, H]", fix)
    return [x[:, None] for x in call]


def check(state: MemoryState, op: str, call: list) -> None:
    """Check the call's metadata."""
    like = _Shape(state.shape, np.dtype(state._initial.compute))
    v, ws, ww, g, b, rs, rw = call
    if len(v.shape) == 4 and v.shape[0] != state.batch:
        got, fix = f"{v.shape[0]} in shape {list(v.shape)}", "pass a token of every sequence"
        raise ShapeError(message(op, "values", f"a batch of {state.batch}, as the state has", got, fix))
    validate.check_delta(op, v, ws, ww, g, b, rs, rw, like, None, in_place=True)


def check_once(state: MemoryState, op: str, call: list) -> None:
    """Check the call's metadata, unless the last call that passed had the same: decoding repeats itself."""
    seen = (state.batch, *[(x.shape, x.dtype) for x in call])
    if seen != state._checked:
        check(state, op, call)
        state._checked = seen


def advance(state: MemoryState, op: str, inputs: DeltaInputs) -> np.ndarray:
    """Run the tokens of canonical inputs, whose values are not checked yet, and return the readings."""
    if inputs.log_decay.ndim == 3:
        inputs = inputs._replace(log_decay=inputs.log_decay[..., None])
    pool, log, num_slots = state._pool, state._log, state._initial.shape[1]
    with state._alone(op):
        with pool.lock:
            pool.settle()
            places = _resolve(state, op, inputs)
            try:
                pool.cover(op)
            except BaseException:
                overlay.undo(state._index.table, places.changes, pool.numbers)
                raise
            paged = pool.paged(state._initial.bits)
        try:
            return sparse_delta_paged(inputs, places, paged, num_slots, state._options)
        finally:
            with pool.lock:
                log.replaced(pool, places.changes)
            state._tokens = state._tokens + places.seen


def _resolve(state: MemoryState, op: str, inputs: DeltaInputs) -> overlay.Places:
    """Check the values, find the tokens' rows and give out those for first writes."""
    batch, tokens, heads, _ = inputs.values.shape
    count, writes, reads = batch * tokens * heads, inputs.write_slots.shape[3], inputs.read_slots.shape[3]
    num_slots, pool = state._initial.shape[1], state._pool
    most = min(tokens * writes, num_slots)  # first writes of a lane
    pool.reserve(batch * heads * most)
    _make_room(state, most)
    places = overlay.Places(
        np.empty(count, np.bool_),
        np.empty((count, writes), np.int32),
        np.empty((count, reads), np.int32),
        np.empty((batch * heads * most, 4), np.int32),
        np.empty(batch * heads + 1, np.int64),
        np.zeros(batch, np.int64),
    )
    flat = [x.reshape(count, x.shape[-1]) for x in (inputs.write_slots, inputs.read_slots, inputs.log_decay)]

    def resolve(check: bool) -> int:
        where = (*state._index, pool.numbers, pool.clock, state._log.epoch)
        return overlay.resolve(heads, tokens, *flat, num_slots, *where, check, places)

    changed = resolve(True)
    if changed == overlay.SUSPECT:
        _check_values(op, inputs, num_slots, places.padded)
        changed = resolve(False)
    return places._replace(changes=places.changes[:changed])


def _make_room(state: MemoryState, most: int) -> None:
    """Make the index large enough for so many more slots a lane, at most half full."""
    table, filled = state._index
    wanted = 2 * (int(filled.max(initial=0)) + most)
    if wanted > table.shape[1]:
        larger = np.full((len(table), 1 << (wanted - 1).bit_length(), 2), -1, np.int32)
        overlay.rehash(table, larger, filled)
        state._index = Index(larger, filled)


def _check_values(op: str, inputs: DeltaInputs, num_slots: int, padded: np.ndarray) -> None:
    """Set `padded`, and raise as the op does where the other tokens have wrong slots or decays."""
    absent = [(x == -1).all(-1) if x.shape[-1] else None for x in (inputs.write_slots, inputs.read_slots)]
    known = [x for x in absent if x is not None]
    lanes = np.logical_and.reduce(known) if known else np.zeros(inputs.beta.shape, np.bool_)
    if (lanes.any(-1) != lanes.all(-1)).any():
        where = [int(i) for i in np.argwhere(lanes.any(-1) != lanes.all(-1))[0]]
        fix = "pad a token with -1 in all slots of all heads"
        raise SlotError(message(op, "slots", "-1 in all heads or in none", f"a mixture at [B, T] = {where}", fix))
    padded[:] = lanes.reshape(-1)
    call = inputs
    if lanes.any():
        keep = ~lanes[..., None]
        call = inputs._replace(
            write_slots=np.where(keep, inputs.write_slots, np.arange(inputs.write_slots.shape[3], dtype=np.int32)),
            read_slots=np.where(keep, inputs.read_slots, np.arange(inputs.read_slots.shape[3], dtype=np.int32)),
            log_decay=np.where(keep, inputs.log_decay, inputs.log_decay.dtype.type(0)),
        )
    validate.check_delta_values(op, call, num_slots, check=True)
