"""The sparse-memory operations on the tape: each walks through a room's doors, forward and backward.

The callers (:mod:`sdm_lite.ops`) have checked shapes, dtypes and values; what a room is, and the canonical form that
its doors take, stands in :mod:`sdm_lite.rooms`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..rooms import DeltaInputs, DeltaOptions
from .modules import _is_float, _module_of
from .tape import Context, Function, Tensor


class _ProductKeyTopk(Function):
    """Selected scores [..., k] and their slots; a score's gradient flows to one column of each factor."""

    @staticmethod
    def forward(ctx: Context, scores: Any, k: int, widths: tuple[int, ...], room: Any) -> Any:
        dtype = _compute_dtype(scores.dtype.name)
        rows = _canonical(scores.reshape(-1, scores.shape[-1]), dtype)
        values, slots = room.product_key_topk_forward(rows, widths, k)
        ctx.save(slots, scores.shape, dtype)
        ctx.widths, ctx.room, ctx.dtype = widths, room, scores.dtype
        shape = (*scores.shape[:-1], k)
        return values.reshape(shape), slots.reshape(shape)

    @staticmethod
    def backward(ctx: Context, dvalues: Any, _dslots: Any) -> Any:
        slots, shape, dtype = ctx.saved
        dvalues = _canonical(dvalues.reshape(slots.shape), dtype)
        dscores = ctx.room.product_key_topk_backward(dvalues, slots, ctx.widths)
        return dscores.reshape(shape).astype(ctx.dtype, copy=False), None, None, None


class _SparseDeltaRule(Function):
    """Readings and, if asked for, the final state of the sparse delta rule."""

    @staticmethod
    def forward(
        ctx: Context,
        *arguments: Any,
        cu_seqlens: Any,
        options: DeltaOptions,
        room: Any,
        final: bool,
    ) -> Any:
        *arrays, state = arguments
        dtype = _compute_dtype(options.state_dtype)
        inputs = DeltaInputs._make([*(_canonical(a, dtype if _is_float(a) else np.int32) for a in arrays), cu_seqlens])
        bits = _state_bits(state, options)
        readings, final_state, saved = room.sparse_delta_forward(
            inputs, bits, options, save=any(ctx.needs), final=final
        )
        if any(ctx.needs):
            ctx.save(inputs, saved)
            ctx.options, ctx.room = options, room
            ctx.state_shape = state.shape if ctx.needs[-1] else None
        if final_state is not None:
            final_state = final_state.view(state.dtype) if _half(options) else final_state
        return readings.astype(arrays[0].dtype, copy=False), final_state

    @staticmethod
    def backward(ctx: Context, dreadings: Any, dfinal: Any) -> Any:
        inputs, saved = ctx.saved
        dtype = inputs.values.dtype
        xp = _module_of(inputs.values)
        # the doors take None for an absent gradient of the state only: the loop over tokens always reads the readings'
        dreadings = xp.zeros(_readings_shape(inputs), dtype) if dreadings is None else _canonical(dreadings, dtype)
        dfinal = None if dfinal is None else _canonical(dfinal, dtype)
        d = ctx.room.sparse_delta_backward(inputs, ctx.options, saved, dreadings, dfinal, ctx.state_shape)
        return d.values, None, d.write_weights, d.log_decay, d.beta, None, d.read_weights, d.initial_state


def tape_product_key_topk(scores: Tensor, k: int, widths: tuple[int, ...], room: Any) -> tuple[Tensor, Any]:
    """Return the k best scores of each row and their slots, recorded on the tape.

    Parameters
    ----------
    scores : Tensor [..., sum(widths)]
    k : int
    widths : tuple of int
        Columns of each factor.
    room : module
        Whose doors are used.

    Returns
    -------
    values : Tensor [..., k]
        In the dtype of `scores`.
    slots : array [..., k] int32
        Ascending; the selection has no gradient.

    >>> from sdm_lite.rooms import room
    >>> scores = Tensor([[1.0, 1.0, 0.0, 0.0, 0.0, -1.0]], requires_grad=True)
    >>> values, slots = tape_product_key_topk(scores, 3, (3, 3), room("reference", "example"))
    >>> values.data, slots
    (array([[1., 1., 1.]]), array([[0, 1, 3]], dtype=int32))
    >>> values.sum().backward()
    >>> scores.grad
    array([[2., 1., 0., 2., 1., 0.]])
    """
    return _ProductKeyTopk.apply(scores, k, widths, room)


def tape_sparse_delta_rule(
    inputs: DeltaInputs, state: Any, options: DeltaOptions, room: Any, final: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the readings and, with `final`, the final state of the sparse delta rule, recorded on the tape.

    Parameters
    ----------
    inputs : DeltaInputs
        Of tensors or arrays, with `log_decay` as [B, T, H, 1] or [B, T, H, W].
    state : Tensor or array [S, H, N, D]
    options : DeltaOptions
    room : module
        Whose doors are used.
    final : bool
        Whether the final state is wanted.

    Returns
    -------
    readings : Tensor [B, T, H, D]
        In the dtype of `inputs.values`.
    final_state : Tensor [S, H, N, D] or None
        In the dtype of `state`.

    Gradients come in the dtype and the shape of each input.
    """
    *arrays, cu_seqlens = inputs
    if isinstance(cu_seqlens, Tensor):
        cu_seqlens = cu_seqlens.data
    return _SparseDeltaRule.apply(*arrays, state, cu_seqlens=cu_seqlens, options=options, room=room, final=final)


def _compute_dtype(name: str) -> Any:
    """Return the dtype a room computes in, for scores or a state of the dtype `name`."""
    return np.dtype(np.float64 if name == "float64" else np.float32)


def _canonical(array: Any, dtype: Any) -> Any:
    return _module_of(array).ascontiguousarray(array, dtype=dtype)


def _half(options: DeltaOptions) -> bool:
    return options.state_dtype in ("float16", "bfloat16")


def _state_bits(state: Any, options: DeltaOptions) -> Any:
    """Return the state as rooms take it: a 16-bit one as its bits."""
    state = _module_of(state).ascontiguousarray(state)
    return state.view(np.uint16) if _half(options) else state


def _readings_shape(inputs: DeltaInputs) -> tuple[int, ...]:
    return (*inputs.read_slots.shape[:3], inputs.values.shape[-1])
