"""The public operations: dispatch on the kind of array, check, walk through a room, convert back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import arrays, rooms, validate
from .errors import DeviceError, DtypeError, ValueRangeError, message
from .rooms import DeltaInputs, DeltaOptions

__all__ = ["hash_slots", "product_key_topk", "sparse_delta_rule", "sparse_delta_rule_"]


def product_key_topk(scores: Any, k: int, *, factors: Any = None, backend: str | None = None) -> tuple[Any, Any]:
    """Select the k best slots of a product of factors, exactly, without forming the N scores.

    Slot (a, b) of two factors has the score ``s1[a] + s2[b]`` and the number ``a * n_1 + b``; more
    factors continue so (spec section 2). A NaN counts as -inf; ties go to the lower column and slot.

    Parameters
    ----------
    scores : array [..., sum of widths], float
        Per row the factors' scores, one factor after the other. Sums are float32 (float64 for float64).
    k : int
        Slots to select, 1 <= k <= N.
    factors : tuple of int, int or None
        Width of each factor; an int F means F equal ones, None two.
    backend : str or None
        The room: "cpu" (default), "reference".

    Returns
    -------
    values : array [..., k]
        The selected sums. Differentiable in `scores`; the selection itself has no gradient.
    slots : array [..., k], int32
        Ascending.

    Raises
    ------
    ShapeError, ValueRangeError
        Where the widths do not add up to the last axis, or k is no number of slots.
    DtypeError, DeviceError, BackendError
        Where no room serves the array.

    Examples
    --------
    >>> import numpy as np
    >>> scores = np.array([1, 1, 0, 0, 0, -1], np.float32)      # factors [1, 1, 0] and [0, 0, -1]
    >>> product_key_topk(scores, 3)
    (array([1., 1., 1.], dtype=float32), array([0, 1, 3], dtype=int32))
    """
    op = "product_key_topk"
    kind = arrays.kind_of(op, "scores", scores)
    validate.check_dtype(op, "scores", scores, arrays.FLOATS)
    if len(scores.shape) < 1:
        validate.check_shape(op, "scores", scores, (None,), "[..., columns]")
    widths = validate.factor_widths(op, scores.shape[-1], factors)
    validate.check_topk(op, k, math.prod(widths))
    k, name = int(k), _backend(op, kind, backend)
    if kind == "torch":
        from . import torch_bridge

        return torch_bridge.product_key_topk(scores, k, widths, name)
    room = rooms.room(name, op)
    if kind == "tape":
        from .autograd import memory_ops

        return memory_ops.tape_product_key_topk(scores, k, widths, room)
    array = arrays.to_numpy(op, "scores", scores)
    compute = np.dtype(np.float64 if array.dtype == np.float64 else np.float32)
    rows = arrays.to_float(array, compute).reshape(-1, array.shape[-1])
    values, slots = room.product_key_topk_forward(rows, widths, k)
    shape = (*array.shape[:-1], k)
    values = values.reshape(shape).astype(array.dtype, copy=False)
    return arrays.like(scores, kind, values), arrays.like(scores, kind, slots.reshape(shape))


def hash_slots(ids: Any, num_slots: int, k: int, *, seed: int = 0, backend: str | None = None) -> Any:
    """Draw k distinct slots from a seeded hash of each id: the control without content (spec section 2).

    Parameters
    ----------
    ids : array [...], int32 or int64
        Token ids or positions.
    num_slots, k : int
        Slots of the table and slots to draw, k <= num_slots.
    seed : int
        Another seed gives another draw.

    Returns
    -------
    slots : array [..., k], int32
        Ascending and distinct, a function of (id, num_slots, k, seed) alone.

    Examples
    --------
    >>> import numpy as np
    >>> hash_slots(np.array([5, 7, 5]), 16, 4).shape
    (3, 4)
    """
    op = "hash_slots"
    kind = arrays.kind_of(op, "ids", ids)
    validate.check_dtype(op, "ids", ids, arrays.INTEGERS)
    if not 1 <= num_slots < 2**31:
        raise ValueRangeError(message(op, "num_slots", "1 to 2^31 - 1", str(num_slots), "pass the table's slots"))
    validate.check_topk(op, k, num_slots)
    name = _backend(op, kind, backend)
    if kind == "torch":
        from . import torch_bridge

        return torch_bridge.hash_slots(ids, int(num_slots), int(k), int(seed), name)
    array = ids.data if kind == "tape" else arrays.to_numpy(op, "ids", ids)
    flat = np.ascontiguousarray(array, dtype=np.int64).reshape(-1)
    slots = rooms.room(name, op).hash_slots_forward(flat, int(num_slots), int(k), int(seed))
    return arrays.like(ids, kind, slots.reshape(*array.shape, int(k)))


def sparse_delta_rule(
    values: Any,
    write_slots: Any,
    write_weights: Any,
    log_decay: Any,
    beta: Any,
    read_slots: Any,
    read_weights: Any,
    initial_state: Any,
    *,
    rule: str = "shared",
    restore: str = "hybrid",
    restore_tau: float = math.log(10.0),
    snapshot_dtype: str | None = None,
    cu_seqlens: Any = None,
    output_final_state: bool = False,
    check: bool = True,
    backend: str | None = None,
) -> tuple[Any, Any]:
    """Write and read a sparse memory token by token with the gated delta rule (spec section 4)::

        m~_i  = exp(log_decay_t) * M[i]                     for the written slots i only
        delta = beta_t * (v_t - sum_j k_j m~_j)             rule="shared": one prediction per token
        M[i]  = m~_i + k_i * delta
        y_t   = sum_r q_r M[r]                              after the token's own write

    ``rule="per_slot"`` predicts per slot: ``M[i] = m~_i + beta_t k_i (v_t - m~_i)``.

    Parameters
    ----------
    values : array [B, T, H, D]
        What to write.
    write_slots, read_slots : int32 or int64 array [B, T, H, W], [B, T, H, R]
        Distinct per token and head, in [0, N).
    write_weights, read_weights : array [B, T, H, W], [B, T, H, R]
        k and q.
    log_decay : array [B, T, H] or [B, T, H, W]
        Natural logarithm of the decay, <= 0; -inf wipes.
    beta : array [B, T, H]
        Write strength.
    initial_state : array [B, H, N, D], or [H, N, D] shared by all sequences
        Never modified. With `cu_seqlens`, [S, H, N, D].
    restore : {"hybrid", "snapshot", "invert"}
        How the backward brings overwritten rows back (spec section 6); the readings do not depend on it.
    restore_tau : float
        hybrid: a row is logged before its decay since the last log passes exp(-restore_tau).
    snapshot_dtype : {None, "bf16", "fp8", "int4"}
        Storage of logged rows; anything but None makes dk, dq and dlog_decay approximate.
    cu_seqlens : int array [S + 1] or None
        Packed sequences (B = 1): token offsets, 0 first, T last.
    output_final_state : bool
        Also return the state after the last token (costs a copy of the table).
    check : bool
        Check slots and decays; False leaves out-of-range slots undefined.
    backend : str or None
        The room: "cpu" (default), "reference".

    Returns
    -------
    readings : array [B, T, H, D]
        In the dtype of `values`; sums in float32 (float64 for a float64 state).
    final_state : array or None
        [B, H, N, D] ([S, H, N, D] packed) in the dtype of the state.

    Raises
    ------
    ShapeError, DtypeError, ValueRangeError, SlotError, DeviceError, BackendError
        Naming the argument, what was expected, what came, and the fix.

    Examples
    --------
    >>> import numpy as np
    >>> one = lambda *x: np.array(x, np.float32).reshape(1, 1, 1, -1)
    >>> state = np.array([[2, 4]], np.float32).reshape(1, 1, 1, 2)
    >>> readings, final = sparse_delta_rule(
    ...     one(1, 1), np.zeros((1, 1, 1, 1), np.int32), one(1), np.log(one(0.5))[..., 0], one(0.5)[..., 0],
    ...     np.zeros((1, 1, 1, 1), np.int32), one(1), state, output_final_state=True)
    >>> readings.ravel(), final.ravel()
    (array([1. , 1.5], dtype=float32), array([1. , 1.5], dtype=float32))
    """
    op = "sparse_delta_rule"
    call = (values, write_slots, write_weights, log_decay, beta, read_slots, read_weights, initial_state, cu_seqlens)
    kind = _delta_kind(op, call)
    validate.check_delta(op, *call, in_place=False)
    options = DeltaOptions(rule, restore, float(restore_tau), snapshot_dtype, arrays.dtype_name(initial_state))
    validate.check_options(op, options)
    name = _backend(op, kind, backend)
    if len(log_decay.shape) == 3:
        log_decay = log_decay[..., None]
    call = (values, write_slots, write_weights, log_decay, beta, read_slots, read_weights)
    if kind == "torch":
        from . import torch_bridge

        return torch_bridge.sparse_delta_rule(
            *call, initial_state, cu_seqlens, options, check, output_final_state, name
        )
    room = rooms.room(name, op)
    if kind == "tape":
        return _tape_delta(op, call, initial_state, cu_seqlens, options, check, output_final_state, room)
    inputs = _canonical(op, call, cu_seqlens, options.state_dtype)
    state = arrays.to_numpy(op, "initial_state", initial_state)
    if check:
        validate.check_delta_values(op, inputs, state.shape[-2])
    readings, final, _ = room.sparse_delta_forward(inputs, arrays.state_bits(state), options, final=output_final_state)
    readings = _readings_like(readings, arrays.to_numpy(op, "values", values).dtype)
    if final is not None:
        final = arrays.like(initial_state, kind, final.view(state.dtype))
    return arrays.like(values, kind, readings), final


def sparse_delta_rule_(
    values: Any,
    write_slots: Any,
    write_weights: Any,
    log_decay: Any,
    beta: Any,
    read_slots: Any,
    read_weights: Any,
    state: Any,
    *,
    rule: str = "shared",
    cu_seqlens: Any = None,
    check: bool = True,
    backend: str | None = None,
) -> Any:
    """Write and read a sparse memory in place: as :func:`sparse_delta_rule`, without its copy.

    Parameters
    ----------
    state : array [B, H, N, D] ([S, H, N, D] with `cu_seqlens`)
        Holds the state after the last token when the call returns; nothing is changed if it raises.

    Returns
    -------
    readings : array [B, T, H, D]
        In the dtype of `values`. No gradients.

    Raises
    ------
    ValueRangeError
        Also where `state` is read-only, overlaps itself or requires a gradient.

    Examples
    --------
    >>> import numpy as np
    >>> one = lambda *x: np.array(x, np.float32).reshape(1, 1, 1, -1)
    >>> slot, state = np.zeros((1, 1, 1, 1), np.int32), np.zeros((1, 1, 4, 1), np.float32)
    >>> for _ in range(3):
    ...     y = sparse_delta_rule_(one(1), slot, one(1), one(0)[..., 0], one(0.5)[..., 0], slot, one(1), state)
    >>> float(y.item()), state.ravel()
    (0.875, array([0.875, 0.   , 0.   , 0.   ], dtype=float32))
    """
    op = "sparse_delta_rule_"
    call = (values, write_slots, write_weights, log_decay, beta, read_slots, read_weights, state, cu_seqlens)
    kind = _delta_kind(op, call)
    validate.check_delta(op, *call, in_place=True)
    options = DeltaOptions(rule=rule, state_dtype=arrays.dtype_name(state))
    validate.check_options(op, options)
    name = _backend(op, kind, backend)
    if len(log_decay.shape) == 3:
        log_decay = log_decay[..., None]
    call = (values, write_slots, write_weights, log_decay, beta, read_slots, read_weights)
    if kind == "torch":
        from . import torch_bridge

        return torch_bridge.sparse_delta_rule_(*call, state, cu_seqlens, options, check, name)
    if kind == "tape":
        raise DtypeError(
            message(
                op,
                "state",
                "NumPy arrays: this form has no gradient",
                "a tape Tensor",
                "use sparse_delta_rule, or .data",
            )
        )
    room = rooms.room(name, op)
    inputs = _canonical(op, call, cu_seqlens, options.state_dtype)
    table = arrays.to_numpy(op, "state", state)
    check_writable(op, table)
    if check:
        validate.check_delta_values(op, inputs, table.shape[-2])
    readings = room.sparse_delta_update(inputs, arrays.state_bits(table), options)
    return arrays.like(values, kind, _readings_like(readings, arrays.to_numpy(op, "values", values).dtype))


def check_writable(op: str, table: np.ndarray) -> None:
    """Raise ValueRangeError where a state cannot be written in place: read-only, or two cells at one address."""
    if not table.flags.writeable:
        raise ValueRangeError(message(op, "state", "a writable array", "a read-only one", "pass a copy"))
    axes = sorted((abs(stride), size) for stride, size in zip(table.strides, table.shape) if size > 1)
    reach = table.itemsize
    for stride, size in axes:
        if stride < reach:
            raise ValueRangeError(
                message(op, "state", "an array whose cells do not overlap", f"strides {table.strides}", "pass a copy")
            )
        reach = stride * size


def _delta_kind(op: str, call: tuple) -> str:
    names = ("values", "write_slots", "write_weights", "log_decay", "beta", "read_slots", "read_weights", "state")
    return arrays.common_kind(op, dict(zip((*names, "cu_seqlens"), call)))


def _backend(op: str, kind: str, backend: str | None) -> str:
    if kind == "cupy":
        reason = rooms.backends()["cuda"]
        raise DeviceError(message(op, "arrays", "arrays on the CPU", "CuPy arrays", f"the cuda room: {reason}"))
    return "cpu" if backend is None else backend


def _canonical(op: str, call: tuple, cu_seqlens: Any, state_dtype: str) -> DeltaInputs:
    """Return the seven arrays as DeltaInputs: contiguous, int32 slots, floats in the compute dtype."""
    compute = np.dtype(np.float64 if state_dtype == "float64" else np.float32)
    names = DeltaInputs._fields
    named = {name: arrays.to_numpy(op, name, x) for name, x in zip(names, call)}
    ready = {
        name: arrays.to_slots(x) if name.endswith("slots") else arrays.to_float(x, compute) for name, x in named.items()
    }
    if cu_seqlens is not None:
        cu_seqlens = np.ascontiguousarray(arrays.to_numpy(op, "cu_seqlens", cu_seqlens), dtype=np.int64)
        validate.check_cu_seqlens(op, cu_seqlens, ready["values"].shape[1])
    return DeltaInputs(**ready, cu_seqlens=cu_seqlens)


def _tape_delta(
    op: str, call: tuple, state: Any, cu_seqlens: Any, options: DeltaOptions, check: bool, final: bool, room: Any
) -> tuple[Any, Any]:
    from .autograd import Tensor, memory_ops

    plain = tuple(x.data if isinstance(x, Tensor) else x for x in call)
    inputs = _canonical(op, plain, cu_seqlens, options.state_dtype)
    if check:
        validate.check_delta_values(op, inputs, state.shape[-2])
    mixed = inputs._replace(**{name: x for name, x in zip(DeltaInputs._fields, call) if isinstance(x, Tensor)})
    return memory_ops.tape_sparse_delta_rule(mixed, state, options, room, final)


def _readings_like(readings: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype.name == "bfloat16":  # from ml_dtypes
        return arrays.narrow_bf16(readings).view(dtype)
    return readings.astype(dtype, copy=False)
