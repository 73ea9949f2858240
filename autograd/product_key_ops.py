"""Product-key memories on the tape: retrieval by distance, weighted sums of rows, a stream of fast weights.

The callers (:mod:`sdm_lite.product_key_memory`, :mod:`sdm_lite.fwpkm_op`) have checked shapes, dtypes and values.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import rooms
from ..fwpkm_chunks import StreamCall, StreamOptions
from ..fwpkm_equations import distances_of_weights
from ..fwpkm_stream import dense_rows, stream_backward, stream_forward
from ..rooms import Lookup
from . import shaping
from .memory_ops import _canonical, _compute_dtype
from .tape import Context, Function, Tensor


class _IdwTopk(Function):
    """Weights and slots of the nearest sub-keys' best pairs."""

    @staticmethod
    def forward(ctx: Context, queries: Any, keys: Any, k: int, epsilon: float, room: Any) -> Any:
        dtype = _compute_dtype(queries.dtype.name)
        flat, table = _canonical(queries.reshape(-1, *queries.shape[-2:]), dtype), _canonical(keys, dtype)
        found = room.idw_product_key_topk_forward(flat, table, k, epsilon)
        ctx.save(flat, table, found)
        ctx.room, ctx.shape = room, queries.shape
        shape = (*queries.shape[:-1], k)
        return found.weights.reshape(shape), found.slots.reshape(shape)

    @staticmethod
    def backward(ctx: Context, dweights: Any, _dslots: Any = None) -> Any:
        queries, keys, found = ctx.saved
        dqueries, dkeys = lookup_backward(dweights, queries, keys, found, ctx.room)
        return dqueries.reshape(ctx.shape), dkeys, None, None, None


def lookup_backward(dweights: Any, queries: Any, keys: Any, found: Lookup, room: Any) -> tuple[Any, Any]:
    """Return (dqueries, dkeys), flat, from the gradient of the weights."""
    dweights = _canonical(dweights, queries.dtype).reshape(found.weights.shape)
    ddistances = distances_of_weights(dweights, found, keys.shape[2])
    return room.distances_backward(ddistances, queries, keys, found.columns)


class _EmbeddingBag(Function):
    """Weighted sums of table rows; the gradient of the table is dense."""

    @staticmethod
    def forward(ctx: Context, values: Any, weights: Any, slots: Any, room: Any) -> Any:
        table, scale = _canonical(values, values.dtype), _canonical(weights, values.dtype)
        ctx.save(table, slots, scale.reshape(slots.shape))
        ctx.room, ctx.shape = room, weights.shape
        readings = room.embedding_bag_forward(table, slots, scale.reshape(slots.shape))
        return readings.reshape(*weights.shape[:-1], values.shape[1])

    @staticmethod
    def backward(ctx: Context, dreadings: Any) -> Any:
        values, slots, weights = ctx.saved
        dreadings = _canonical(dreadings, values.dtype).reshape(len(slots), values.shape[1])
        dvalues = ctx.room.embedding_bag_backward(dreadings, slots, weights, len(values)) if ctx.needs[0] else None
        dweights = ctx.room.embedding_bag_weights_backward(dreadings, values, slots) if ctx.needs[1] else None
        return dvalues, None if dweights is None else dweights.reshape(ctx.shape), None, None


class _Stream(Function):
    """The retrieved values of one memory's stream; `results` receives what the call leaves, outside of the tape."""

    @staticmethod
    def forward(
        ctx: Context,
        queries: Any,
        values: Any,
        gates: Any,
        keys: Any,
        base: Any,
        *,
        call: tuple,
        lane: Any,
        options: StreamOptions,
        room: Any,
        results: list,
    ) -> Any:
        mask, carried, fresh = call
        flat = StreamCall._make((*(np.ascontiguousarray(x) for x in (queries, values, gates)), mask, carried, fresh))
        retrieved, keys, table, saved = stream_forward(flat, lane.keys, lane.table, options, room, save=any(ctx.needs))
        results.append((keys, table))
        ctx.save(flat, saved)
        ctx.options, ctx.room, ctx.slots = options, room, lane.table.shape[0]
        return retrieved

    @staticmethod
    def backward(ctx: Context, dretrieved: Any) -> Any:
        call, saved = ctx.saved
        d = stream_backward(call, ctx.options, saved, dretrieved, ctx.room)
        base = dense_rows(d, ctx.slots) if ctx.needs[4] else None
        return d.queries, d.values, d.gates, d.keys, base


def tape_idw_product_key_topk(queries: Any, keys: Any, k: int, epsilon: float, room: Any) -> tuple[Tensor, Any]:
    """Return weights (a Tensor) and slots, as :func:`sdm_lite.idw_product_key_topk`.

    >>> from sdm_lite.rooms import room
    >>> q = Tensor(np.full((1, 1, 2), 0.25), requires_grad=True)
    >>> keys = np.array([[[[0.0], [1.0]], [[0.0], [1.0]]]])
    >>> weights, slots = tape_idw_product_key_topk(q, keys, 1, 1e-3, room("reference", "example"))
    >>> weights.data.tolist(), slots.tolist()
    ([[[1.0]]], [[[0]]])
    """
    return _IdwTopk.apply(queries, keys, k, epsilon, room)


def tape_embedding_bag(values: Any, slots: Any, shape: tuple[int, ...], weights: Any, room: Any) -> Tensor:
    """Return the weighted sums of rows, as :func:`sdm_lite.embedding_bag`; `slots` are flat and checked.

    >>> from sdm_lite.rooms import room
    >>> w = Tensor([[2.0, 0.5]], requires_grad=True)
    >>> values, slots = np.array([[1.0], [10.0]]), np.array([[0, 1]], np.int32)
    >>> tape_embedding_bag(values, slots, (1, 2), w, room("reference", "example")).sum().backward()
    >>> w.grad
    array([[ 1., 10.]])
    """
    assert slots.size == math.prod(shape), "flat slots of these shape"
    return _EmbeddingBag.apply(values, weights, slots, room)


class _Cast(Function):
    """An array in another dtype; its gradient comes back in its own."""

    @staticmethod
    def forward(ctx: Context, x: Any, dtype: Any) -> Any:
        ctx.dtype = x.dtype
        return _canonical(x, dtype)

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        return dy.astype(ctx.dtype, copy=False), None


# ---- what sdm_lite.fwpkm_op needs of a kind of array ---------------------------------------------------------


def canonical(x: Any, dtype: Any) -> Any:
    """Return x in the dtype of the state.

    >>> canonical(Tensor(np.ones(2, np.float32)), np.dtype(np.float64)).dtype
    dtype('float64')
    """
    return x if isinstance(x, Tensor) and x.dtype == dtype else _Cast.apply(x, dtype)


def concatenate(parts: list) -> Any:
    """Return the parts joined along the tokens, past ones first."""
    return shaping.concatenate(parts, axis=1)


def arrays(call: StreamCall) -> StreamCall:
    """Return the call with plain arrays, for the state to keep."""
    return StreamCall._make(x.data if isinstance(x, Tensor) else x for x in call)


def stream(call: StreamCall, lane: Any, options: StreamOptions, name: str, leaves: Any) -> tuple[Tensor, tuple]:
    """Return the retrieved values (a Tensor), and (keys, slots, rows) after the call, without history.

    `leaves` are the tensors that the state was made from, where their gradients are wanted.
    """
    results: list = []
    keys, base = leaves or (lane.keys, lane.table.shape[0])
    retrieved = _Stream.apply(
        call.queries, call.values, call.gates, keys, base, call=(call.mask, call.carried, call.fresh),
        lane=lane, options=options, room=rooms.room(name, "fwpkm"), results=results,
    )  # fmt: skip
    keys, table = results[0]
    return retrieved, (keys, *table.owned())


def finish(retrieved: list, values: Any) -> Any:
    """Return the sequences' readings as one Tensor, in the dtype of the values."""
    joined = retrieved[0] if len(retrieved) == 1 else None
    if joined is None:
        joined = shaping.concatenate(retrieved, axis=0) if retrieved else Tensor(np.zeros(values.shape))
    return canonical(joined, values.dtype)
