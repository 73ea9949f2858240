"""A sparse delta call on its way into a room: metadata checked, options settled, arrays in canonical form."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import arrays, validate
from .errors import DtypeError, ValueRangeError, message
from .placement import FOREIGN, backend_of, device_of, plain_kind
from .rooms import DeltaInputs, DeltaOptions

SevenArrays = tuple[Any, Any, Any, Any, Any, Any, Any]  # DeltaInputs without cu_seqlens


def opened(op: str, given: tuple, choices: tuple) -> tuple[str, SevenArrays, Any, Any, DeltaOptions, str]:
    """Check a sparse delta call's metadata; return kind, seven arrays, state, cu_seqlens, options and room.

    `given` holds nine arrays, of which foreign ones come back as views; `choices` those of :func:`_settled`.
    """
    plain = plain_kind(given[:8], choices) if given[8] is None else None
    if plain is not None:
        kind, device = plain
        metadata = tuple([arrays.Metadata(x.shape, x.dtype) for x in given[:8]])
        options, room = _settled_before(op, device, (*metadata, None), *choices)
    else:
        kind, device, given = _viewed(op, given)
        options, room = _settled(op, device, given, *choices)
    v, ws, ww, g, b, rs, rw, state, cu_seqlens = given
    return kind, (v, ws, ww, g if len(g.shape) == 4 else g[..., None], b, rs, rw), state, cu_seqlens, options, room


def _settled(
    op: str, device: str, call: tuple, rule: Any, restore: Any, restore_tau: Any, snapshot_dtype: Any, backend: Any
) -> tuple[DeltaOptions, str]:
    """Check nine arrays' metadata and the choices, and return options and room."""
    validate.check_delta(op, *call, in_place=op.endswith("_"))
    tau = validate.real_number(op, "restore_tau", restore_tau)
    options = DeltaOptions(rule, restore, tau, snapshot_dtype, arrays.dtype_name(call[7]))
    validate.check_options(op, options)
    return options, backend_of(op, device, backend)


_settled_before = functools.lru_cache(maxsize=256, typed=True)(_settled)


def _viewed(op: str, given: tuple) -> tuple[str, str, tuple]:
    """Return a sparse delta call's kind, its device, and its nine arrays, foreign ones as views."""
    named = dict(zip((*DeltaInputs._fields[:7], _state_name(op), "cu_seqlens"), given))
    if given[7] is None:
        letters = "[S, H, N, D]" if given[8] is not None else "[B, H, N, D]"
        fix = f"pass zeros of shape {letters}: they say how many slots N there are"
        raise DtypeError(message(op, _state_name(op), "an array", "None", fix))
    present = {name: x for name, x in named.items() if name != "cu_seqlens" or x is not None}
    kind = arrays.common_kind(op, present)
    device = device_of(op, kind, present)
    if kind in FOREIGN:
        given = tuple([x if x is None else arrays.to_room(op, name, x) for name, x in named.items()])
    return kind, device, given


def canonical(op: str, call: Sequence, state: Any, cu_seqlens: Any, check: bool, room: Any) -> DeltaInputs:
    """Return the seven arrays as DeltaInputs (contiguous, int32 slots, floats in the compute dtype), checked."""
    table = arrays.to_room(op, _state_name(op), state)
    compute = np.dtype(np.float64 if table.dtype == np.float64 else np.float32)
    views = [arrays.to_room(op, name, x) for name, x in zip(DeltaInputs._fields, call)]
    if cu_seqlens is not None:
        cu_seqlens = arrays.plain(arrays.to_room(op, "cu_seqlens", cu_seqlens), np.int64)
    v, ws, ww, g, b, rs, rw = views
    floats = [arrays.to_float(x, compute) for x in (v, ww, g, b, rw)]
    v, ww, g, b, rw = floats
    inputs = DeltaInputs(v, arrays.to_slots(ws), ww, g, b, arrays.to_slots(rs), rw, cu_seqlens)
    validate.check_delta_values(op, inputs, table.shape[-2], check, room)
    return inputs


def check_writable(op: str, table: Any) -> None:
    """Raise ValueRangeError where a state cannot be written in place: read-only, or two cells at one address."""
    if not getattr(table.flags, "writeable", True):  # CuPy has no read-only arrays
        raise ValueRangeError(message(op, "state", "a writable array", "a read-only one", "pass a copy"))
    if not table.size or table.flags.c_contiguous:
        return
    axes = sorted((abs(stride), size) for stride, size in zip(table.strides, table.shape) if size > 1)
    reach = table.itemsize
    for stride, size in axes:
        if stride < reach:
            raise ValueRangeError(
                message(op, "state", "an array whose cells do not overlap", f"strides {table.strides}", "pass a copy")
            )
        reach = stride * size


def _state_name(op: str) -> str:
    return "state" if op.endswith("_") else "initial_state"
