"""Product-key memories for torch: what the public functions call for tensors, once shapes and dtypes are checked.

The operations are custom ops (:mod:`sdm_lite.torch_product_keys_ops`); nothing is cast by autocast, as in
:mod:`sdm_lite.torch_bridge`. An `FwPKMState` lives outside of the graph: a stream's op takes its arrays as tensors
and returns the rows that changed, which the state then takes over.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import torch_direct as direct
from . import torch_product_keys_ops as ops
from . import validate
from .fwpkm_chunks import StreamCall, StreamOptions
from .torch_bridge import _check_devices
from .torch_bridge_arrays import compute_dtype, dtype_named


def idw_product_key_topk(queries: Tensor, keys: Tensor, k: int, epsilon: float, backend: str) -> tuple[Tensor, Tensor]:
    """Return weights and slots, as :func:`sdm_lite.idw_product_key_topk`.

    >>> keys = torch.tensor([[[[0.0], [1.0]], [[0.0], [2.0]]]])
    >>> idw_product_key_topk(torch.zeros(1, 1, 2), keys, 1, 1.0, "reference")
    (tensor([[[1.]]]), tensor([[[0]]], dtype=torch.int32))
    """
    _check_devices("idw_product_key_topk", ("queries", "keys"), (queries, keys))
    dtype = compute_dtype(queries.dtype)
    return direct.call(ops.idw_product_key_topk, queries.to(dtype), keys.to(dtype), k, epsilon, backend)[:2]


def embedding_bag(values: Tensor, slots: Tensor, weights: Tensor, sparse_gradient: bool, backend: str) -> Tensor:
    """Return the weighted sums of rows, as :func:`sdm_lite.embedding_bag`.

    >>> values = torch.tensor([[1.0], [10.0]], requires_grad=True)
    >>> y = embedding_bag(values, torch.tensor([[1, 1]]), torch.tensor([[2.0, 0.5]]), True, "reference")
    >>> y.sum().backward()
    >>> values.grad.coalesce().indices().tolist(), values.grad.coalesce().values().tolist()
    ([[1]], [[2.5]])
    """
    _check_devices("embedding_bag", ("values", "slots", "weights"), (values, slots, weights))
    return direct.call(ops.embedding_bag, values, slots, weights.to(values.dtype), sparse_gradient, backend)


# ---- what sdm_lite.fwpkm_op and FwPKMState need of a kind of array ------------------------------------------


def canonical(x: Tensor, dtype: np.dtype) -> Tensor:
    """Return x in the dtype of the state."""
    _check_devices("fwpkm", ("queries, values or gates",), (x,))
    return x.to(dtype_named(dtype.name))


def concatenate(parts: list) -> Tensor:
    """Return the parts joined along the tokens; the past ones are arrays of the state."""
    return torch.cat([x if isinstance(x, Tensor) else torch.from_numpy(x) for x in parts], dim=1)


def arrays(call: StreamCall) -> StreamCall:
    """Return the call with NumPy views, for the state to keep."""
    return StreamCall._make(x.detach().numpy() if isinstance(x, Tensor) else x for x in call)


def stream(call: StreamCall, lane: Any, options: StreamOptions, name: str, leaves: Any) -> tuple[Tensor, tuple]:
    """Return the retrieved values [P, T, D], and (keys, slots, rows) after the call as arrays.

    `leaves` are the tensors that the state was made from, where their gradients are wanted.
    """
    base, place, owned = lane.table.parts()
    keys, table = leaves or (torch.from_numpy(lane.keys), torch.from_numpy(base))
    floats: Any = (call.queries, call.values, call.gates)
    save = torch.is_grad_enabled() and any([x.requires_grad for x in (*floats, keys, table)])
    given = (*floats, torch.from_numpy(call.mask), keys, table, torch.from_numpy(place), torch.from_numpy(owned))
    flat = [getattr(options, field) for field in ops.OPTION_FIELDS]
    outputs = direct.call(ops.fwpkm, *given, call.carried, call.fresh, *flat, name, save)
    return outputs[0], tuple(x.detach().numpy() for x in outputs[1:4])


def stream_without_state(
    op: str,
    given: tuple[Tensor, Tensor, Tensor],
    start: tuple[Tensor, Tensor],
    mask: Tensor | None,
    options: dict[str, Any],
    per_sequence: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Return what :func:`sdm_lite.fwpkm` retrieves in a first call from the keys and values `start`, as a graph can.

    Beside it (keys, slots, rows) after the call, detached, where one memory serves the batch: an open chunk is left
    out. The options are checked ones.
    """
    (batch, tokens), (keys, table) = given[1].shape[:2], start
    if mask is None:
        mask = torch.ones((batch, tokens), dtype=torch.bool)
    validate.check_shape(op, "mask", mask, (batch, tokens), "[B, T]", "B and T follow values")
    validate.check_dtype(op, "mask", mask, ("bool",))
    _check_devices(op, ("queries", "values", "gates", "mask", "keys", "values"), (*given, mask, *start))
    floats = [x.to(keys.dtype) for x in given]
    save = torch.is_grad_enabled() and any([x.requires_grad for x in floats])
    # where no chunk is completed the tokens are only read
    options = {**options, "update": options["update"] and tokens >= options["chunk"]}
    nothing = torch.empty(0, dtype=torch.int32), keys.new_empty((0, table.shape[1]))
    flat = [options[field] for field in ops.OPTION_FIELDS]
    outputs = [
        direct.call(ops.fwpkm, *(x[part] for x in (*floats, mask)), keys, table, *nothing, 0, 0, *flat, "cpu", save)
        for part in ([slice(i, i + 1) for i in range(batch)] if per_sequence else [slice(None)])
    ]
    end = None if per_sequence else tuple(x.detach() for x in outputs[0][1:4])
    return finish([found[0] for found in outputs], given[1]), end


def finish(retrieved: list[Tensor], values: Tensor) -> Tensor:
    """Return the sequences' readings as one tensor, in the dtype of the values."""
    joined = retrieved[0] if len(retrieved) == 1 else torch.cat([*retrieved, values[:0]])
    return joined.to(values.dtype)


def own_arrays(keys: Tensor, values: Tensor) -> tuple[np.ndarray, np.ndarray, tuple[Tensor, Tensor] | None]:
    """Return copies of a state's start as arrays, and as tensors with history where a gradient is wanted."""
    _check_devices("FwPKMState", ("keys", "values"), (keys, values))
    keys, values = (x.clone(memory_format=torch.contiguous_format) for x in (keys, values))
    leaves = (keys, values) if keys.requires_grad or values.requires_grad else None
    return keys.detach().numpy(), values.detach().numpy(), leaves


def to_tensor(array: np.ndarray) -> Tensor:
    """Return an array's memory as a tensor."""
    return torch.from_numpy(array)
