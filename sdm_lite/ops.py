"""The public operations: dispatch on the kind of array, check, walk through a room, convert back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import arrays, rooms, validate
from .delta_call import SevenArrays, canonical, check_writable, opened
from .errors import DtypeError, ValueRangeError, message
from .placement import FOREIGN, backend_of, device_of, on_its_device
from .rooms import DeltaInputs, DeltaOptions

__all__ = ["hash_slots", "product_key_topk", "sparse_delta_rule", "sparse_delta_rule_"]


@on_its_device
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
        The room: "cpu" (default), "reference"; "cuda" (default) for arrays on a GPU.

    Returns
    -------
    values : array [..., k]
        The selected sums, float32 (float64 for float64 scores). Differentiable in `scores`; the selection
        itself has no gradient.
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
    kind, given = arrays.kind_of(op, "scores", scores), scores
    device = device_of(op, kind, {"scores": scores})
    if kind in FOREIGN:
        scores = arrays.to_room(op, "scores", scores)
    validate.check_dtype(op, "scores", scores, arrays.FLOATS)
    if len(scores.shape) < 1:
        validate.check_shape(op, "scores", scores, (None,), "[..., columns]")
    widths = validate.factor_widths(op, scores.shape[-1], factors)
    k, name = validate.check_topk(op, k, math.prod(widths)), backend_of(op, device, backend)
    if kind == "torch":
        from . import torch_bridge

        return torch_bridge.product_key_topk(scores, k, widths, name)
    room = rooms.room(name, op)
    if kind == "tape":
        from .autograd import memory_ops

        return memory_ops.tape_product_key_topk(scores, k, widths, room)
    array = arrays.to_room(op, "scores", scores)
    compute = np.dtype(np.float64 if array.dtype == np.float64 else np.float32)
    rows = arrays.to_float(array, compute).reshape(-1, array.shape[-1])
    values, slots = room.product_key_topk_forward(rows, widths, k)
    shape = (*array.shape[:-1], k)
    return arrays.like(given, kind, values.reshape(shape)), arrays.like(given, kind, slots.reshape(shape))


@on_its_device
def hash_slots(ids: Any, num_slots: int, k: int, *, seed: int = 0, backend: str | None = None) -> Any:
    """Draw k distinct slots from a seeded hash of each id: the control without content (spec section 2).

    Parameters
    ----------
    ids : array [...], integers of up to 64 bits (uint64 apart)
        Token ids or positions.
    num_slots, k : int
        Slots of the table and slots to draw, k <= num_slots.
    seed : int
        Another seed gives another draw.

    Returns
    -------
    slots : array [..., k], int32
        Ascending and distinct, a function of (id, num_slots, k, seed) alone.

    Raises
    ------
    ValueRangeError
        Where num_slots is not 1 to 2^31 - 1, or k not 1 to num_slots.
    DtypeError, DeviceError, BackendError
        Where an argument is no whole number, or no room serves the array.

    Examples
    --------
    >>> import numpy as np
    >>> hash_slots(np.array([5, 7, 5]), 16, 4).shape
    (3, 4)
    """
    op = "hash_slots"
    kind, given = arrays.kind_of(op, "ids", ids), ids
    device = device_of(op, kind, {"ids": ids})
    if kind in FOREIGN:
        ids = arrays.to_room(op, "ids", ids)
    validate.check_dtype(op, "ids", ids, arrays.IDS)
    num_slots, seed = (validate.whole_number(op, name, n) for name, n in (("num_slots", num_slots), ("seed", seed)))
    if not 1 <= num_slots < 2**31:
        raise ValueRangeError(message(op, "num_slots", "1 to 2^31 - 1", str(num_slots), "pass the table's slots"))
    k, name = validate.check_topk(op, k, num_slots, "lower k or raise num_slots"), backend_of(op, device, backend)
    if kind == "torch":
        from . import torch_bridge

        return torch_bridge.hash_slots(ids, num_slots, k, seed, name)
    array = arrays.to_room(op, "ids", ids)
    flat = arrays.plain(array, np.int64).reshape(-1)
    slots = rooms.room(name, op).hash_slots_forward(flat, num_slots, k, seed)
    return arrays.like(given, kind, slots.reshape(*array.shape, k))


@on_its_device
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
        Storage of logged rows; anything but None makes dk, dq and dlog_decay approximate (per_slot: dbeta too).
    cu_seqlens : int array [S + 1] or None
        Packed sequences (B = 1): token offsets, 0 first, T last.
    output_final_state : bool
        Also return the state after the last token (costs a copy of the table).
    check : bool
        Check slots and decays; False leaves out-of-range slots undefined.
    backend : str or None
        The room: "cpu" (default), "reference"; "cuda" (default) for arrays on a GPU.

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
    given = (values, write_slots, write_weights, log_decay, beta, read_slots, read_weights, initial_state, cu_seqlens)
    choices = (rule, restore, restore_tau, snapshot_dtype, backend)
    kind, call, initial_state, cu_seqlens, options, name = opened(op, given, choices)
    if kind == "torch":
        from . import torch_bridge

        return torch_bridge.sparse_delta_rule(
            *call, initial_state, cu_seqlens, options, check, output_final_state, name
        )
    room = rooms.room(name, op)
    if kind == "tape":
        return _tape_delta(op, call, initial_state, cu_seqlens, options, check, output_final_state, room)
    inputs = canonical(op, call, initial_state, cu_seqlens, check, room)
    bits = arrays.state_bits(initial_state)
    readings, final, _ = room.sparse_delta_forward(inputs, bits, options, final=output_final_state)
    if final is not None:
        final = arrays.like(given[7], kind, final.view(initial_state.dtype))
    return arrays.like(given[0], kind, arrays.from_float(readings, call[0].dtype)), final


@on_its_device
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
        Holds the state after the last token when the call returns; an error in the arguments changes nothing.

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
    given = (values, write_slots, write_weights, log_decay, beta, read_slots, read_weights, state, cu_seqlens)
    choices = (rule, DeltaOptions.restore, DeltaOptions.restore_tau, None, backend)
    kind, call, state, cu_seqlens, options, name = opened(op, given, choices)
    if kind == "torch":
        from . import torch_bridge

        return torch_bridge.sparse_delta_rule_(*call, state, cu_seqlens, options, check, name)
    if kind == "tape":
        expected = "NumPy arrays: this form has no gradient"
        raise DtypeError(message(op, "state", expected, "a tape Tensor", "use sparse_delta_rule, or .data"))
    room = rooms.room(name, op)
    check_writable(op, state)
    # an input that lies in the state would change under the kernel's hands
    apart = [x.copy() if arrays.module_of(x).may_share_memory(x, state) else x for x in call]
    inputs = canonical(op, apart, state, cu_seqlens, check, room)
    readings = room.sparse_delta_update(inputs, arrays.state_bits(state), options)
    return arrays.like(given[0], kind, arrays.from_float(readings, call[0].dtype))


def _tape_delta(
    op: str, call: SevenArrays, state: Any, cu_seqlens: Any, options: DeltaOptions, check: bool, final: bool, room: Any
) -> tuple[Any, Any]:
    from .autograd import Tensor, memory_ops

    inputs = canonical(op, call, state, cu_seqlens, check, room)
    mixed = inputs._replace(**{name: x for name, x in zip(DeltaInputs._fields, call) if isinstance(x, Tensor)})
    return memory_ops.tape_sparse_delta_rule(mixed, state, options, room, final)
