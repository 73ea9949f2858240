"""The public operations: dispatch on the kind of array, check, walk through a room, convert back."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import arrays, rooms, validate
from .errors import BackendError, DeviceError, DtypeError, ValueRangeError, message
from .rooms import DeltaInputs, DeltaOptions

__all__ = ["hash_slots", "product_key_topk", "sparse_delta_rule", "sparse_delta_rule_"]

_FOREIGN = ("dlpack", "cuda_array")  # kinds that are worked on as views
_Call = tuple[Any, Any, Any, Any, Any, Any, Any]  # DeltaInputs without cu_seqlens


def _on_its_device(op: Callable) -> Callable:
    """Make an op work on the GPU of its first argument, whichever is current; torch's bridge does so for tensors."""

    @functools.wraps(op)
    def run(*args: Any, **options: Any) -> Any:
        first = arrays.untaped(args[0] if args else next(iter(options.values()), None))
        if arrays.module_of(first) is np:
            return op(*args, **options)
        with first.device:
            return op(*args, **options)

    return run


@_on_its_device
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
    device = _device(op, kind, {"scores": scores})
    if kind in _FOREIGN:
        scores = arrays.to_room(op, "scores", scores)
    validate.check_dtype(op, "scores", scores, arrays.FLOATS)
    if len(scores.shape) < 1:
        validate.check_shape(op, "scores", scores, (None,), "[..., columns]")
    widths = validate.factor_widths(op, scores.shape[-1], factors)
    k, name = validate.check_topk(op, k, math.prod(widths)), _backend(op, device, backend)
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


@_on_its_device
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
    device = _device(op, kind, {"ids": ids})
    if kind in _FOREIGN:
        ids = arrays.to_room(op, "ids", ids)
    validate.check_dtype(op, "ids", ids, arrays.IDS)
    num_slots, seed = (validate.whole_number(op, name, n) for name, n in (("num_slots", num_slots), ("seed", seed)))
    if not 1 <= num_slots < 2**31:
        raise ValueRangeError(message(op, "num_slots", "1 to 2^31 - 1", str(num_slots), "pass the table's slots"))
    k, name = validate.check_topk(op, k, num_slots, "lower k or raise num_slots"), _backend(op, device, backend)
    if kind == "torch":
        from . import torch_bridge

        return torch_bridge.hash_slots(ids, num_slots, k, seed, name)
    array = arrays.to_room(op, "ids", ids)
    flat = arrays.plain(array, np.int64).reshape(-1)
    slots = rooms.room(name, op).hash_slots_forward(flat, num_slots, k, seed)
    return arrays.like(given, kind, slots.reshape(*array.shape, k))


@_on_its_device
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
    kind, call, initial_state, cu_seqlens, options, name = _opened(op, given, choices)
    if kind == "torch":
        from . import torch_bridge

        return torch_bridge.sparse_delta_rule(
            *call, initial_state, cu_seqlens, options, check, output_final_state, name
        )
    room = rooms.room(name, op)
    if kind == "tape":
        return _tape_delta(op, call, initial_state, cu_seqlens, options, check, output_final_state, room)
    inputs = _canonical(op, call, initial_state, cu_seqlens, check, room)
    bits = arrays.state_bits(initial_state)
    readings, final, _ = room.sparse_delta_forward(inputs, bits, options, final=output_final_state)
    if final is not None:
        final = arrays.like(given[7], kind, final.view(initial_state.dtype))
    return arrays.like(given[0], kind, arrays.from_float(readings, call[0].dtype)), final


@_on_its_device
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
    kind, call, state, cu_seqlens, options, name = _opened(op, given, choices)
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
    inputs = _canonical(op, apart, state, cu_seqlens, check, room)
    readings = room.sparse_delta_update(inputs, arrays.state_bits(state), options)
    return arrays.like(given[0], kind, arrays.from_float(readings, call[0].dtype))


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


def _opened(op: str, given: tuple, choices: tuple) -> tuple[str, _Call, Any, Any, DeltaOptions, str]:
    """Check a sparse delta call's metadata; return kind, seven arrays, state, cu_seqlens, options and room.

    `given` holds nine arrays, of which foreign ones come back as views; `choices` those of :func:`_settled`.
    """
    plain = _plain_kind(given) if all([isinstance(x, (str, float, int, type(None))) for x in choices]) else None
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
    return options, _backend(op, device, backend)


# a call repeats itself, and a token takes a kernel less time than its checks take: what passed once passes again
_settled_before = functools.lru_cache(maxsize=256, typed=True)(_settled)


def _plain_kind(given: tuple) -> tuple[str, str] | None:
    """Return kind and device where the arrays' shapes and dtypes say all that there is to check, else None."""
    kinds = {type(x) for x in given[:8]}
    torch = sys.modules.get("torch")
    if given[8] is not None or (torch is not None and torch.compiler.is_compiling()):
        return None
    if kinds == {np.ndarray}:
        return "numpy", "cpu"
    if torch is not None and kinds <= {torch.Tensor, torch.nn.Parameter} and not any([x.is_nested for x in given[:8]]):
        return "torch", str(given[0].device)
    return None


def _viewed(op: str, given: tuple) -> tuple[str, str, tuple]:
    """Return a sparse delta call's kind, its device, and its nine arrays, foreign ones as views."""
    named = dict(zip((*DeltaInputs._fields[:7], _state_name(op), "cu_seqlens"), given))
    if given[7] is None:
        letters = "[S, H, N, D]" if given[8] is not None else "[B, H, N, D]"
        fix = f"pass zeros of shape {letters}: they say how many slots N there are"
        raise DtypeError(message(op, _state_name(op), "an array", "None", fix))
    present = {name: x for name, x in named.items() if name != "cu_seqlens" or x is not None}
    kind = arrays.common_kind(op, present)
    device = _device(op, kind, present)
    if kind in _FOREIGN:
        given = tuple([x if x is None else arrays.to_room(op, name, x) for name, x in named.items()])
    return kind, device, given


def _device(op: str, kind: str, named: dict[str, Any]) -> str:
    """Return where a call's arrays lie; torch's bridge looks at the devices of tensors itself."""
    if kind == "torch":
        return str(next(iter(named.values())).device)
    return arrays.common_device(op, named)


def _backend(op: str, device: str, backend: str | None) -> str:
    """Return the room of a call: the one asked for, which must serve the arrays' device, or the device's own."""
    if not isinstance(backend, (str, type(None))):
        raise BackendError(message(op, "backend", "a room's name or None", repr(backend), "see sdm_lite.backends()"))
    own = "cuda" if device.startswith("cuda") else "cpu"
    if backend is None or backend == own:
        return own
    if "cuda" in (backend, own) and backend in rooms.backends():
        rooms.room(backend, op)  # a room that is not ready says so first
        expected, got = f"arrays that the {backend} room serves", f"arrays on {device}"
        raise DeviceError(message(op, "backend", expected, got, f"move the arrays, or name {own!r} or None"))
    return backend


def host_backend(op: str, kind: str, backend: str | None) -> str:
    """Return the room of a call that no cuda room serves."""
    if kind in ("cupy", "cuda_array"):
        fix = "copy them to the CPU: no cuda room serves this"
        raise DeviceError(message(op, "arrays", "arrays on the CPU", "arrays on a GPU", fix))
    return _backend(op, "cpu", backend)


def _canonical(op: str, call: Sequence, state: Any, cu_seqlens: Any, check: bool, room: Any) -> DeltaInputs:
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


def _tape_delta(
    op: str, call: _Call, state: Any, cu_seqlens: Any, options: DeltaOptions, check: bool, final: bool, room: Any
) -> tuple[Any, Any]:
    from .autograd import Tensor, memory_ops

    inputs = _canonical(op, call, state, cu_seqlens, check, room)
    mixed = inputs._replace(**{name: x for name, x in zip(DeltaInputs._fields, call) if isinstance(x, Tensor)})
    return memory_ops.tape_sparse_delta_rule(mixed, state, options, room, final)
