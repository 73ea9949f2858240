"""Checks of a call: shapes and dtypes from metadata alone, then values. Each failure names its fix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .arrays import FLOATS, INTEGERS, dtype_name, module_of, numbers_of
from .errors import DtypeError, ShapeError, SlotError, ValueRangeError, message
from .rooms import DeltaInputs, DeltaOptions

_INT32_MAX = 2**31 - 1


def check_dtype(op: str, name: str, x: Any, allowed: Sequence[str]) -> None:
    """Raise DtypeError unless x has one of the dtypes named."""
    if dtype_name(x) not in allowed:
        raise DtypeError(message(op, name, f"dtype {' or '.join(allowed)}", dtype_name(x), "convert it first"))


def check_shape(op: str, name: str, x: Any, expected: tuple, letters: str, fix: str = "pass it in this layout") -> None:
    """Raise ShapeError unless x has the shape given; None stands for any size."""
    shape = tuple(x.shape)
    if len(shape) != len(expected) or any(want is not None and want != size for want, size in zip(expected, shape)):
        sizes = ", ".join("any" if want is None else str(want) for want in expected)
        raise ShapeError(message(op, name, f"shape {letters} = [{sizes}]", str(list(shape)), fix))


def whole_number(op: str, name: str, value: Any) -> int:
    """Return an argument that counts something as an int, or raise DtypeError: no bool, no float, no array."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise DtypeError(message(op, name, "a whole number", f"{value!r:.40} ({type(value).__name__})", "pass an int"))
    return int(value)


def sequence_indices(op: str, name: str, indices: Any, count: int) -> list[int]:
    """Return an argument that names some of `count` sequences as a list, or raise for one that is not there."""
    listed = indices.tolist() if hasattr(indices, "tolist") else indices
    if not isinstance(listed, Sequence) or isinstance(listed, (str, bytes)):
        raise ShapeError(message(op, name, "a sequence of indices", f"{indices!r:.40}", "pass a list of whole numbers"))
    found = [whole_number(op, name, i) for i in listed]
    outside = [i for i in found if not 0 <= i < count]
    if outside:
        fix = "name sequences that are there" if count else "there are none yet: make a call, or append() some"
        raise ValueRangeError(message(op, name, f"indices in [0, {count})", count_text(outside[0]), fix))
    return found


def count_text(number: int) -> str:
    """Return an int for an error text: Python refuses to print one of thousands of digits."""
    return str(number) if abs(number) < 2**63 else "an int beyond 64 bits"


def factor_widths(op: str, width: int, factors: Any) -> tuple[int, ...]:
    """Return the factors' widths: two equal ones by default, F equal ones for an int F."""
    if isinstance(factors, Iterable) and not isinstance(factors, str):
        widths = tuple(whole_number(op, "factors", n) for n in factors)
        if not widths or min(widths) < 1 or sum(widths) != width:
            expected = f"positive widths that add up to {width}"
            raise ShapeError(message(op, "factors", expected, str(widths), "give one width per factor"))
    else:
        count = 2 if factors is None else whole_number(op, "factors", factors)
        if count < 1 or width < 1 or width % count:
            expected = f"a last axis of {count} equal factors"
            raise ShapeError(message(op, "scores", expected, str(width), "pass factors=(n_0, n_1, ...)"))
        widths = (width // count,) * count
    if math.prod(widths) > _INT32_MAX:
        got = f"{math.prod(widths)} slots of factors {widths}"
        raise ValueRangeError(message(op, "factors", "fewer than 2^31 slots", got, "narrow the factors"))
    return widths


def check_topk(op: str, k: Any, num_slots: int, fix: str = "lower k or widen the factors") -> int:
    """Return k as an int, or raise unless it is a whole number from 1 to num_slots."""
    k = whole_number(op, "k", k)
    if not 1 <= k <= num_slots:
        raise ValueRangeError(message(op, "k", f"1 to {num_slots} slots", str(k), fix))
    return k


def real_number(op: str, name: str, value: Any) -> float:
    """Return an argument as a float, or raise DtypeError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise DtypeError(message(op, name, "a number", f"{value!r:.40} ({type(value).__name__})", "pass a float"))
    try:
        return float(value)
    except OverflowError:  # an int that no float holds: beyond every bound
        return math.inf if value > 0 else -math.inf


def check_options(op: str, options: DeltaOptions) -> None:
    """Raise ValueRangeError where an option has a value that no room knows."""
    for name, allowed in (
        ("rule", ("shared", "per_slot")),
        ("restore", ("hybrid", "snapshot", "invert")),
        ("snapshot_dtype", (None, "bf16", "fp8", "int4")),
    ):
        value = getattr(options, name)
        if not isinstance(value, (str, type(None))) or value not in allowed:
            raise ValueRangeError(message(op, name, f"one of {list(allowed)}", repr(value), "name one of these"))
    if not 0 <= options.restore_tau < math.inf:
        raise ValueRangeError(
            message(op, "restore_tau", "a finite number >= 0", repr(options.restore_tau), "math.log(10) is the default")
        )


def check_delta(
    op: str,
    values: Any,
    write_slots: Any,
    write_weights: Any,
    log_decay: Any,
    beta: Any,
    read_slots: Any,
    read_weights: Any,
    state: Any,
    cu_seqlens: Any,
    *,
    in_place: bool,
) -> None:
    """Check ranks, sizes and dtypes of a sparse delta call (spec section 4) from metadata alone."""
    check_shape(op, "values", values, (None,) * 4, "[B, T, H, D]")
    batch, tokens, heads, width = values.shape
    token = (batch, tokens, heads)
    fix = f"the sizes B, T, H, D follow values {list(values.shape)}: change one of the two"
    check_shape(op, "write_slots", write_slots, (*token, None), "[B, T, H, W]", fix)
    writes = write_slots.shape[3]
    check_shape(op, "write_weights", write_weights, (*token, writes), "[B, T, H, W]", fix)
    if len(log_decay.shape) == 4:
        check_shape(op, "log_decay", log_decay, (*token, writes), "[B, T, H, W]", fix)
    else:
        check_shape(op, "log_decay", log_decay, token, "[B, T, H]", fix)
    check_shape(op, "beta", beta, token, "[B, T, H]", fix)
    check_shape(op, "read_slots", read_slots, (*token, None), "[B, T, H, R]", fix)
    check_shape(op, "read_weights", read_weights, (*token, read_slots.shape[3]), "[B, T, H, R]", fix)
    state_name = "state" if in_place else "initial_state"
    sequences = batch
    if cu_seqlens is not None:
        check_shape(op, "cu_seqlens", cu_seqlens, (None,), "[S + 1]")
        check_dtype(op, "cu_seqlens", cu_seqlens, INTEGERS)
        if batch != 1 or cu_seqlens.shape[0] < 2:
            got = f"B = {batch}, cu_seqlens of {cu_seqlens.shape[0]}"
            raise ShapeError(message(op, "cu_seqlens", "B = 1 and at least two entries", got, "pack along T"))
        sequences = cu_seqlens.shape[0] - 1
        entries = numbers_of(cu_seqlens) if state.shape[:1] != (sequences,) else None
        if entries is not None:  # cu_seqlens may be at fault, not the state whose size it gives
            check_cu_seqlens(op, entries, tokens)
    if len(state.shape) == 3 and not in_place:  # one initial memory, shared by the sequences
        check_shape(op, "initial_state", state, (heads, None, width), "[H, N, D]", fix)
    else:
        check_shape(op, state_name, state, (sequences, heads, None, width), "[B, H, N, D]", fix)
    if state.shape[-2] > _INT32_MAX:
        got = str(state.shape[-2])
        raise ValueRangeError(message(op, state_name, "fewer than 2^31 slots", got, "use more heads"))
    for name, x in (("write_slots", write_slots), ("read_slots", read_slots)):
        check_dtype(op, name, x, INTEGERS)
    floats = {"values": values, "write_weights": write_weights, "log_decay": log_decay, "beta": beta}
    for name, x in (floats | {"read_weights": read_weights, state_name: state}).items():
        check_dtype(op, name, x, FLOATS)


def check_cu_seqlens(op: str, cu_seqlens: np.ndarray, tokens: int) -> None:
    """Raise ValueRangeError unless cu_seqlens starts at 0, never decreases and ends at T."""
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != tokens or (np.diff(cu_seqlens) < 0).any():
        raise ValueRangeError(
            message(
                op, "cu_seqlens", f"0, non-decreasing, {tokens}", str(cu_seqlens.tolist())[:80], "give token offsets"
            )
        )


def check_delta_values(op: str, inputs: DeltaInputs, num_slots: int, check: bool, room: Any) -> None:
    """Check what metadata cannot show: slots in range and distinct per token, log decays <= 0 and not NaN.

    Without `check` only `cu_seqlens` is looked at, since a wrong one sends a room out of bounds; on a GPU it is not
    either, for that would wait for the device: the cuda room keeps within its arrays whatever the offsets are.
    """
    on_host = module_of(inputs.values) is np
    if on_host and inputs.cu_seqlens is not None:
        check_cu_seqlens(op, inputs.cu_seqlens, inputs.values.shape[1])
    if check and not room.values_are_fine(inputs, num_slots):
        look_closer(op, inputs if on_host else DeltaInputs(*(x if x is None else x.get() for x in inputs)), num_slots)


def look_closer(op: str, inputs: DeltaInputs, num_slots: int) -> None:
    """Raise for the first value that no room takes; slots of a token that do not ascend are fine."""
    if inputs.cu_seqlens is not None:
        check_cu_seqlens(op, inputs.cu_seqlens, inputs.values.shape[1])
    check_slots(op, "write_slots", inputs.write_slots, num_slots)
    check_slots(op, "read_slots", inputs.read_slots, num_slots)
    if not (inputs.log_decay <= 0).all():
        worst = inputs.log_decay[~(inputs.log_decay <= 0)][0]
        raise ValueRangeError(
            message(op, "log_decay", "numbers <= 0 (natural logarithm of the decay)", str(worst), "pass log(alpha)")
        )


def check_slots(op: str, name: str, slots: np.ndarray, num_slots: int) -> None:
    """Raise SlotError unless the slots of each token are distinct and in [0, num_slots)."""
    if not slots.size:
        return
    ascending = np.sort(slots, axis=-1)
    outside = (ascending[..., 0] < 0) | (ascending[..., -1] >= num_slots)
    if outside.any():
        where = tuple(int(i) for i in np.argwhere(outside)[0])
        row = slots[where]
        got = f"{row[(row < 0) | (row >= num_slots)][0]} at {_place(where)}"
        raise SlotError(message(op, name, f"slots in [0, {num_slots})", got, "check the table's size"))
    repeated = (ascending[..., 1:] == ascending[..., :-1]).any(axis=-1)
    if repeated.any():
        where = tuple(int(i) for i in np.argwhere(repeated)[0])
        row = ascending[where]
        twice = row[1:][row[1:] == row[:-1]][0]
        got = f"slot {twice} twice at {_place(where)}"
        raise SlotError(message(op, name, "distinct slots per token", got, "merge the repeated slot's weights"))


def _place(where: tuple[int, ...]) -> str:
    """Return where a lane's token stands, in the letters of an op, or of a step, whose arrays have no T."""
    return f"{'[B, T, H]' if len(where) == 3 else '[B, H]'} = {list(where)}"
