"""Public operations on product-key memories: retrieval by distance, lookup by dot product, weighted sums of rows."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from . import arrays, rooms, validate
from .errors import DtypeError, ShapeError, SlotError, ValueRangeError, message
from .placement import FOREIGN, backend_of, device_of, host_backend, on_its_device, plain_kind

__all__ = ["embedding_bag", "embedding_bag_gradient", "idw_product_key_topk", "product_key_lookup"]

#: of each compute dtype, the smallest and the greatest number above 0
_RANGES = {"float32": (2.0**-149, (2 - 2.0**-23) * 2.0**127), "float64": (5e-324, 1.7976931348623157e308)}
_UNSIGNED = {np.dtype(np.int32): np.dtype(np.uint32), np.dtype(np.int64): np.dtype(np.uint64)}
_TABLES = ("float64", "float32")  # dtypes of keys and values: fast weights are float32 at rest


def idw_product_key_topk(
    queries: Any, keys: Any, k: int, *, epsilon: float = 1e-3, backend: str | None = None
) -> tuple[Any, Any]:
    """Find the k nearest slots of each head, weighted inversely to their squared distances (docs/fwpkm.md)::

        u = epsilon + |q(m) - K[a, m, j]|^2          for half m of head a, by direct differences
        score of slot (i, j) = -log u(0)_i - log u(1)_j,   slot number i * n + j
        weights = softmax of the selected scores over all heads' slots of a token

    The selection is exact over all n * n slots; ties go to the lower sub-key and slot.

    Parameters
    ----------
    queries : array [..., H, 2h], float
        Arithmetic is float32 (float64 for float64 queries).
    keys : array [H, 2, n, h], float
        Sub-keys of each head and half.
    k : int
        Slots per head, 1 <= k <= n * n.
    epsilon : float
        Added to the squared distances, > 0.
    backend : str or None
        The room: "cpu" (default), "reference".

    Returns
    -------
    weights : array [..., H, k], float32 (float64)
        Sum to 1 over a token's H * k slots. Differentiable once in `queries` and `keys`.
    slots : array [..., H, k], int32
        Ascending within a head.

    Raises
    ------
    ShapeError, ValueRangeError, DtypeError, DeviceError, BackendError
        Naming the argument, what was expected, what came, and the fix.

    Examples
    --------
    >>> import numpy as np
    >>> keys = np.array([[[[0], [1]], [[0], [2]]]], np.float32)          # one head, n = 2, h = 1
    >>> weights, slots = idw_product_key_topk(np.zeros((1, 1, 1, 2), np.float32), keys, 2, epsilon=1.0)
    >>> slots.ravel(), weights.ravel().round(3)
    (array([0, 2], dtype=int32), array([0.667, 0.333], dtype=float32))
    """
    op = "idw_product_key_topk"
    kind, queries, keys, k, name = _opened_lookup(op, queries, keys, k, backend)
    epsilon = check_epsilon(op, epsilon, "float64" if arrays.dtype_name(queries) == "float64" else "float32")
    if kind == "torch":
        from . import torch_product_keys

        return torch_product_keys.idw_product_key_topk(queries, keys, k, epsilon, name)
    room = rooms.room(name, op)
    if kind == "tape":
        from .autograd import product_key_ops

        return product_key_ops.tape_idw_product_key_topk(queries, keys, k, epsilon, room)
    compute = compute_dtype(queries)
    flat = arrays.to_float(queries, compute).reshape(-1, *queries.shape[-2:])
    found = room.idw_product_key_topk_forward(flat, arrays.to_float(keys, compute), k, epsilon)
    shape = (*queries.shape[:-1], k)
    return found.weights.reshape(shape), found.slots.reshape(shape)


def product_key_lookup(queries: Any, keys: Any, k: int, *, backend: str | None = None) -> tuple[Any, Any]:
    """Select the k slots with the greatest dot products, with a softmax within each head: static product keys::

        score of slot (i, j) = q(0) K[a, 0, i] + q(1) K[a, 1, j],   weights = softmax over a head's k scores

    The dot products are the framework's matrix product (their bits depend on it, and on the batch); the selection
    from them is that of :func:`sdm_lite.product_key_topk`.

    Parameters
    ----------
    queries : array [..., H, 2h], float
    keys : array [H, 2, n, h], dtype of `queries`
    k : int
        Slots per head, 1 <= k <= n * n.
    backend : str or None
        The room: "cpu" (default), "reference".

    Returns
    -------
    weights : array [..., H, k], float32 (float64 for float64 queries)
        Sum to 1 within each head. Differentiable once in `queries` and `keys`.
    slots : array [..., H, k], int32
        Ascending within a head.

    Raises
    ------
    ShapeError, ValueRangeError, DtypeError, DeviceError, BackendError
        Naming the argument, what was expected, what came, and the fix.

    Examples
    --------
    >>> import numpy as np
    >>> keys = np.array([[[[0], [1]], [[0], [2]]]], np.float32)
    >>> weights, slots = product_key_lookup(np.ones((1, 1, 1, 2), np.float32), keys, 2)
    >>> slots.ravel(), weights.ravel().round(3)
    (array([1, 3], dtype=int32), array([0.269, 0.731], dtype=float32))
    """
    from .ops import product_key_topk

    op = "product_key_lookup"
    kind, queries, keys, k, name = _opened_lookup(op, queries, keys, k, backend)
    if arrays.dtype_name(queries) != arrays.dtype_name(keys):
        got = f"{arrays.dtype_name(keys)} beside queries of {arrays.dtype_name(queries)}"
        raise DtypeError(message(op, "keys", "the dtype of the queries", got, "convert one of the two"))
    heads, _, sub_keys, half = keys.shape
    tokens = math.prod(queries.shape[:-2])
    axes = (1, 0, 2)
    by_half = _permuted(queries.reshape((tokens, 2 * heads, half)), axes, kind)
    products = by_half @ _permuted(keys.reshape((2 * heads, sub_keys, half)), (0, 2, 1), kind)
    scores = _permuted(products, axes, kind).reshape((*queries.shape[:-1], 2 * sub_keys))
    values, slots = product_key_topk(scores, k, backend=name)
    return _softmax(values, kind), slots


@on_its_device
def embedding_bag(
    values: Any, slots: Any, weights: Any, *, sparse_gradient: bool = False, backend: str | None = None
) -> Any:
    """Sum table rows with weights: ``y = sum_a weights[..., a] * values[slots[..., a]]``, a ascending.

    The gradient of `values` sums each row's reads in their order, so it is the same bits for any number of threads,
    and takes no memory beyond itself. A slot may stand twice in a bag: both reads count.

    Parameters
    ----------
    values : array [S, D], float32 or float64
    slots : int32 or int64 array [..., k]
        In [0, S).
    weights : array [..., k], float
    sparse_gradient : bool
        torch only: the gradient of `values` is a coalesced sparse tensor of the rows that were read, as sparse
        optimisers take it. Elsewhere use :func:`embedding_bag_gradient`.
    backend : str or None
        The room: "cpu" (default), "reference"; "cuda" (default) for arrays on a GPU.

    Returns
    -------
    array [..., D], dtype of `values`
        Differentiable once in `values` and `weights`.

    Raises
    ------
    ShapeError, DtypeError, SlotError, ValueRangeError, DeviceError, BackendError
        Naming the argument, what was expected, what came, and the fix.

    Examples
    --------
    >>> import numpy as np
    >>> embedding_bag(np.array([[1.0], [10.0]]), np.array([[0, 1], [1, 1]]), np.array([[2.0, 0.5], [1.0, 1.0]]))
    array([[ 7.],
           [20.]])
    """
    op, given = "embedding_bag", values
    plain = plain_kind((values, slots, weights), (backend,))
    if plain is not None:
        kind, device = plain
        metadata = [arrays.Metadata(x.shape, x.dtype) for x in (values, slots, weights)]
        name = _settled_bag_before(op, device, *metadata, backend)
    else:
        named = {"values": values, "slots": slots, "weights": weights}
        kind = arrays.common_kind(op, named)
        device = device_of(op, kind, named)
        if kind in FOREIGN:
            values, slots, weights = (arrays.to_room(op, name, x) for name, x in named.items())
        name = _settled_bag(op, device, values, slots, weights, backend)
    if kind == "torch":
        from . import torch_product_keys

        return torch_product_keys.embedding_bag(values, slots, weights, bool(sparse_gradient), name)
    if sparse_gradient:
        expected, fix = "torch tensors", "use embedding_bag_gradient for NumPy arrays"
        raise ValueRangeError(message(op, "sparse_gradient", expected, f"{kind} arrays", fix))
    room = rooms.room(name, op)
    arrays.to_room(op, "values", values)  # refuses what no room views
    flat = check_bag_slots(op, arrays.to_room(op, "slots", slots), values.shape[0])
    if kind == "tape":
        from .autograd import product_key_ops

        return product_key_ops.tape_embedding_bag(values, flat, slots.shape, weights, room)
    scale = arrays.to_float(weights, values.dtype).reshape(flat.shape)
    readings = room.embedding_bag_forward(arrays.plain(values, None), flat, scale)
    return arrays.like(given, kind, readings.reshape(*slots.shape[:-1], values.shape[1]))


def _settled_bag(op: str, device: str, values: Any, slots: Any, weights: Any, backend: Any) -> str:
    """Check the metadata of an embedding bag and return the room."""
    validate.check_shape(op, "values", values, (None, None), "[S, D]")
    _check_bag(op, slots, weights, "weights", tuple(slots.shape), "[..., k]")
    validate.check_dtype(op, "values", values, _TABLES)
    return backend_of(op, device, backend)


_settled_bag_before = functools.lru_cache(maxsize=256, typed=True)(_settled_bag)


@on_its_device
def embedding_bag_gradient(
    dreadings: Any, slots: Any, weights: Any, num_slots: int, *, backend: str | None = None
) -> tuple[Any, Any]:
    """Return the gradient of :func:`embedding_bag`'s table in coalesced form: the rows that were read, and theirs::

        gradient[u] = sum over the reads (t, a) of slot rows[u] of weights[t, a] * dreadings[t]

    Parameters
    ----------
    dreadings : NumPy or CuPy array [..., D], float32 or float64
    slots : int32 or int64 array [..., k]
        In [0, num_slots).
    weights : array [..., k], float
    num_slots : int
    backend : str or None
        The room: "cpu" (default), "reference"; "cuda" (default) for arrays on a GPU.

    Returns
    -------
    rows : array [U], int32
        Ascending, distinct.
    gradient : array [U, D], dtype of `dreadings`

    Raises
    ------
    ShapeError, DtypeError, SlotError, DeviceError, BackendError
        Naming the argument, what was expected, what came, and the fix.

    Examples
    --------
    >>> import numpy as np
    >>> rows, gradient = embedding_bag_gradient(np.ones((2, 1)), np.array([[3, 5], [5, 5]]), np.ones((2, 2)), 9)
    >>> rows.tolist(), gradient.ravel().tolist()
    ([3, 5], [1.0, 3.0])
    """
    op = "embedding_bag_gradient"
    named = {"dreadings": dreadings, "slots": slots, "weights": weights}
    kind = arrays.common_kind(op, named)
    if kind in ("torch", "tape"):
        expected, fix = "NumPy or CuPy arrays", "use sparse_gradient=True for torch, .data for a tape Tensor"
        raise DtypeError(message(op, "dreadings", expected, f"{kind} arrays", fix))
    device = device_of(op, kind, named)
    dreadings, slots, weights = (arrays.to_room(op, name, x) for name, x in named.items())
    num_slots = validate.whole_number(op, "num_slots", num_slots)
    if not 0 <= num_slots <= 2**31 - 1:
        got, fix = validate.count_text(num_slots), "pass the rows of the table"
        raise ValueRangeError(message(op, "num_slots", "0 to 2^31 - 1", got, fix))
    validate.check_dtype(op, "dreadings", dreadings, _TABLES)
    _check_bag(op, slots, weights, "weights", tuple(slots.shape), "[..., k]")
    validate.check_shape(op, "dreadings", dreadings, (*slots.shape[:-1], None), "[..., D]")
    flat = check_bag_slots(op, slots, num_slots)
    room = rooms.room(backend_of(op, device, backend), op)
    upstream = arrays.plain(dreadings, None).reshape(len(flat), dreadings.shape[-1])
    return bag_rows(room, upstream, flat, arrays.to_float(weights, dreadings.dtype).reshape(flat.shape), num_slots)


def bag_rows(room: Any, dreadings: Any, slots: Any, weights: Any, num_slots: int) -> tuple[Any, Any]:
    """Return (rows, gradient) through a room's doors, from canonical arrays."""
    rows, places = room.number_slots(slots, num_slots)
    return rows, room.embedding_bag_backward(dreadings, places, weights, len(rows))


def compute_dtype(x: Any) -> np.dtype:
    """Return float64 for a float64 array, else float32."""
    return np.dtype(np.float64 if arrays.dtype_name(x) == "float64" else np.float32)


def check_number(op: str, name: str, value: Any, dtype: str, fix: str) -> float:
    """Return a number as a float, or raise ValueRangeError where it is infinite, NaN or lost in the compute dtype."""
    number = validate.real_number(op, name, value)
    smallest, greatest = _RANGES[dtype]
    if number != 0 and not smallest <= abs(number) <= greatest:
        raise ValueRangeError(message(op, name, f"a finite number that {dtype} holds", repr(number), fix))
    return number


def check_epsilon(op: str, epsilon: Any, dtype: str) -> float:
    """Return epsilon, or raise ValueRangeError unless it is a finite number > 0 in the compute dtype."""
    number = check_number(op, "epsilon", epsilon, dtype, "1e-3 is the default")
    if number <= 0:
        raise ValueRangeError(message(op, "epsilon", "a finite number > 0", repr(number), "1e-3 is the default"))
    return number


def check_keys(op: str, keys: Any) -> None:
    """Raise unless keys are [H, 2, n, h], none of them 0, of fewer than 2^31 slots."""
    validate.check_shape(op, "keys", keys, (None, 2, None, None), "[H, 2, n, h]")
    if 0 in keys.shape:
        got = str(list(keys.shape))
        raise ShapeError(message(op, "keys", "[H, 2, n, h] of at least 1 each", got, "pass keys with numbers in them"))
    if keys.shape[2] ** 2 > 2**31 - 1:
        raise ValueRangeError(message(op, "keys", "n * n below 2^31", f"n = {keys.shape[2]}", "use fewer sub-keys"))


def check_bag_slots(op: str, slots: Any, num_slots: int) -> Any:
    """Return the slots as flat rows [n, k] int32, or raise SlotError where one is outside [0, num_slots).

    Waits for the device of slots on a GPU.
    """
    beyond = slots.view(_UNSIGNED[slots.dtype])  # a negative one is beyond all
    if slots.size and beyond.max() >= num_slots:
        bad = int(slots[(slots < 0) | (slots >= num_slots)][0])
        raise SlotError(message(op, "slots", f"slots in [0, {num_slots})", str(bad), "check the table's size"))
    return arrays.plain(slots, np.int32).reshape(math.prod(slots.shape[:-1]), slots.shape[-1])


def _opened_lookup(op: str, queries: Any, keys: Any, k: Any, backend: Any) -> tuple[str, Any, Any, int, str]:
    """Return the kind, both arrays (foreign ones as NumPy views), k and the room's name, all checked."""
    kind = arrays.common_kind(op, {"queries": queries, "keys": keys})
    if kind == "dlpack":
        queries, keys = arrays.to_numpy(op, "queries", queries), arrays.to_numpy(op, "keys", keys)
    for name, x in (("queries", queries), ("keys", keys)):
        validate.check_dtype(op, name, x, arrays.FLOATS)
    check_keys(op, keys)
    heads, _, sub_keys, half = keys.shape
    if len(queries.shape) < 2 or tuple(queries.shape[-2:]) != (heads, 2 * half):
        expected, got = f"shape [..., H, 2h] = [..., {heads}, {2 * half}]", str(list(queries.shape))
        raise ShapeError(message(op, "queries", expected, got, "the sizes follow keys [H, 2, n, h]: change one"))
    k = validate.check_topk(op, k, sub_keys**2, "lower k or use more sub-keys")
    return kind, queries, keys, k, host_backend(op, kind, backend)


def _check_bag(op: str, slots: Any, weights: Any, name: str, shape: tuple, letters: str) -> None:
    if not shape:
        validate.check_shape(op, "slots", slots, (None,), letters)
    validate.check_dtype(op, "slots", slots, arrays.INTEGERS)
    validate.check_shape(op, name, weights, shape, letters, "give one weight per slot")
    validate.check_dtype(op, name, weights, arrays.FLOATS)


def _permuted(x: Any, axes: tuple[int, int, int], kind: str) -> Any:
    return x.permute(*axes) if kind == "torch" else x.transpose(*axes)


def _softmax(x: Any, kind: str) -> Any:
    if kind == "torch":
        return x.softmax(-1)
    if kind == "tape":
        from .autograd import softmax

        return softmax(x)
    shifted = np.exp(x - x.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)
