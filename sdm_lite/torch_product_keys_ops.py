"""Product-key memories as `torch.library.custom_op`s over a room's doors, for :mod:`sdm_lite.torch_product_keys`.

The form is that of :mod:`sdm_lite.torch_bridge_ops`: an implementation, a fake kernel, a derivative whose backward
is an op of its own, and a second derivative that raises. Floats come in the compute dtype.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op, get_ctx

from . import rooms
from . import torch_bridge_arrays as convert
from . import torch_direct as direct
from .fwpkm_chunks import StreamCall, StreamOptions
from .fwpkm_equations import distances_of_weights
from .fwpkm_stream import StreamSaved, dense_rows, stream_backward, stream_forward
from .product_key_memory import bag_rows, check_bag_slots
from .rooms import Lookup
from .row_table import RowTable
from .torch_bridge_ops import _no_second_derivative


def _array(x: Tensor) -> Any:
    return convert.to_floats(x, x.dtype)


# ---- retrieval by distance --------------------------------------------------------------------------------------


@direct.op(
    "sdm_lite::idw_product_key_topk",
    schema="(Tensor queries, Tensor keys, SymInt k, float epsilon, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
)
def idw_product_key_topk(queries, keys, k, epsilon, backend):
    """Return weights and slots [..., H, k], and for the backward columns and distances [..., H, 2, c]."""
    room = rooms.room(backend, "idw_product_key_topk")
    flat = _array(queries).reshape(-1, *queries.shape[-2:])
    found = room.idw_product_key_topk_forward(flat, _array(keys), k, epsilon)
    lead = queries.shape[:-1]
    return tuple(torch.from_numpy(x).reshape(*lead, *x.shape[2:]) for x in found)


@idw_product_key_topk.register_fake
def _(queries, keys, k, epsilon, backend):
    shape, near = (*queries.shape[:-1], k), (*queries.shape[:-1], 2, min(k, keys.shape[2]))
    slots, columns = (queries.new_empty(s, dtype=torch.int32) for s in (shape, near))
    return queries.new_empty(shape), slots, columns, queries.new_empty(near)


@custom_op(
    "sdm_lite::idw_product_key_topk_backward",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor dweights, Tensor queries, Tensor keys, Tensor weights, Tensor slots, Tensor columns,"
    " Tensor distances, str backend) -> (Tensor, Tensor)",
)
def idw_product_key_topk_backward(dweights, queries, keys, weights, slots, columns, distances, backend):
    """Return the gradients of queries and keys."""
    heads = keys.shape[0]
    flat = _array(queries).reshape(-1, *queries.shape[-2:])
    found = Lookup(
        _array(weights).reshape(-1, heads, weights.shape[-1]),
        convert.to_slots(slots).reshape(-1, heads, slots.shape[-1]),
        convert.to_slots(columns).reshape(-1, heads, *columns.shape[-2:]),
        _array(distances).reshape(-1, heads, *distances.shape[-2:]),
    )
    upstream = _array(dweights).reshape(found.weights.shape)
    ddistances = distances_of_weights(upstream, found, keys.shape[2])
    room = rooms.room(backend, "idw_product_key_topk")
    dqueries, dkeys = room.distances_backward(ddistances, flat, _array(keys), found.columns)
    return torch.from_numpy(dqueries).view(queries.shape), torch.from_numpy(dkeys)


@idw_product_key_topk_backward.register_fake
def _(dweights, queries, keys, weights, slots, columns, distances, backend):
    return queries.new_empty(queries.shape), keys.new_empty(keys.shape)


def _idw_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.backend = inputs[4]
    ctx.save_for_backward(*inputs[:2], *output)


def _idw_gradient(ctx, dweights, *_):
    if dweights is None:
        return (None,) * 5
    return (*idw_product_key_topk_backward(dweights, *ctx.saved_tensors, ctx.backend), None, None, None)


idw_product_key_topk.register_autograd(_idw_gradient, setup_context=_idw_setup)
idw_product_key_topk_backward.register_autograd(_no_second_derivative("idw_product_key_topk"))

# ---- weighted sums of rows --------------------------------------------------------------------------------------


@direct.op(
    "sdm_lite::embedding_bag",
    device_types=("cpu", "cuda"),
    schema="(Tensor values, Tensor slots, Tensor weights, bool sparse_gradient, str backend) -> Tensor",
)
@convert.borrowed
def embedding_bag(values, slots, weights, sparse_gradient, backend):
    """Return the sums [..., D]; slots out of range raise."""
    flat = check_bag_slots("embedding_bag", convert.view(slots), values.shape[0])
    room = rooms.room(backend, "embedding_bag")
    readings = room.embedding_bag_forward(_array(values), flat, _array(weights).reshape(flat.shape))
    return convert.from_room(readings).view(*slots.shape[:-1], values.shape[1])


@embedding_bag.register_fake
def _(values, slots, weights, sparse_gradient, backend):
    return values.new_empty((*slots.shape[:-1], values.shape[1]))


def _flat_bag(dreadings: Tensor, slots: Tensor, weights: Tensor | None) -> tuple[Any, Any, Any]:
    flat = convert.to_slots(slots).reshape(math.prod(slots.shape[:-1]), slots.shape[-1])
    upstream = _array(dreadings).reshape(len(flat), dreadings.shape[-1])
    return upstream, flat, None if weights is None else _array(weights).reshape(flat.shape)


@custom_op(
    "sdm_lite::embedding_bag_backward",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema="(Tensor dreadings, Tensor slots, Tensor weights, SymInt num_slots, str backend) -> Tensor",
)
@convert.borrowed
def embedding_bag_backward(dreadings, slots, weights, num_slots, backend):
    """Return the dense gradient of the values [S, D]."""
    room = rooms.room(backend, "embedding_bag")
    return convert.from_room(room.embedding_bag_backward(*_flat_bag(dreadings, slots, weights), num_slots))


@embedding_bag_backward.register_fake
def _(dreadings, slots, weights, num_slots, backend):
    return dreadings.new_empty((num_slots, dreadings.shape[-1]))


@custom_op(
    "sdm_lite::embedding_bag_rows",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema="(Tensor dreadings, Tensor slots, Tensor weights, SymInt num_slots, str backend) -> (Tensor, Tensor)",
)
@convert.borrowed
def embedding_bag_rows(dreadings, slots, weights, num_slots, backend):
    """Return the gradient of the values as rows [U] int64, ascending, and their gradients [U, D]."""
    room = rooms.room(backend, "embedding_bag")
    rows, gradient = bag_rows(room, *_flat_bag(dreadings, slots, weights), num_slots)
    return convert.from_room(rows).long(), convert.from_room(gradient)


@embedding_bag_rows.register_fake
def _(dreadings, slots, weights, num_slots, backend):
    count = get_ctx().new_dynamic_size()
    return slots.new_empty((count,), dtype=torch.int64), dreadings.new_empty((count, dreadings.shape[-1]))


@custom_op(
    "sdm_lite::embedding_bag_weights_backward",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema="(Tensor dreadings, Tensor values, Tensor slots, str backend) -> Tensor",
)
@convert.borrowed
def embedding_bag_weights_backward(dreadings, values, slots, backend):
    """Return the gradient of the weights, in the shape of the slots."""
    upstream, flat, _ = _flat_bag(dreadings, slots, None)
    room = rooms.room(backend, "embedding_bag")
    return convert.from_room(room.embedding_bag_weights_backward(upstream, _array(values), flat)).view(slots.shape)


@embedding_bag_weights_backward.register_fake
def _(dreadings, values, slots, backend):
    return dreadings.new_empty(slots.shape)


def _bag_setup(ctx, inputs, output):
    values, slots, weights, ctx.sparse, ctx.backend = inputs
    ctx.num_slots = values.shape[0]
    # the table only where the gradient of the weights will need it
    ctx.save_for_backward(slots, weights, values if ctx.needs_input_grad[2] else None)


def _bag_gradient(ctx, dreadings):
    slots, weights, values = ctx.saved_tensors
    dvalues = dweights = None
    if ctx.needs_input_grad[0]:
        call = (dreadings, slots, weights, ctx.num_slots, ctx.backend)
        if ctx.sparse:
            rows, gradient = embedding_bag_rows(*call)
            size = (ctx.num_slots, dreadings.shape[-1])
            dvalues = torch.sparse_coo_tensor(rows[None], gradient, size, is_coalesced=True, check_invariants=False)
        else:
            dvalues = embedding_bag_backward(*call)
    if ctx.needs_input_grad[2]:
        dweights = embedding_bag_weights_backward(dreadings, values, slots, ctx.backend)
    return dvalues, None, dweights, None, None


embedding_bag.register_autograd(_bag_gradient, setup_context=_bag_setup)
for _op in (embedding_bag_backward, embedding_bag_rows, embedding_bag_weights_backward):
    _op.register_autograd(_no_second_derivative("embedding_bag"))

# ---- the stream -------------------------------------------------------------------------------------------------

#: the fields of StreamOptions as operands, in order
OPTION_FIELDS = tuple(StreamOptions.__dataclass_fields__)
_OPTIONS = (
    "SymInt k, SymInt chunk, SymInt lookahead, str pairs, str scale, float value_rate, float key_rate, float epsilon,"
    " bool update, SymInt? detach_every, bool mse_to_keys"
)


class _Stream(NamedTuple):
    """Operands of fwpkm, in the order of its schema, options as in OPTION_FIELDS."""

    queries: Tensor
    values: Tensor
    gates: Tensor
    mask: Tensor
    keys: Tensor
    table: Tensor
    place: Tensor
    owned: Tensor
    carried: int
    fresh: int
    options: StreamOptions
    backend: str
    save: bool


def _operands(flat: tuple) -> _Stream:
    first, last = 10, 10 + len(OPTION_FIELDS)
    return _Stream._make((*flat[:first], StreamOptions(*flat[first:last]), *flat[last:]))


def _call(x: Any) -> StreamCall:
    floats = (_array(t) for t in (x.queries, x.values, x.gates))
    return StreamCall._make((*floats, x.mask.detach().numpy(), x.carried, x.fresh))


@direct.op(
    "sdm_lite::fwpkm",
    schema="(Tensor queries, Tensor values, Tensor gates, Tensor mask, Tensor keys, Tensor table, Tensor place,"
    f" Tensor owned, SymInt carried, SymInt fresh, {_OPTIONS}, str backend, bool save) -> Tensor[]",
)
def fwpkm(*operands):
    """Return the retrieved values, the keys after the call, the slots that were written and their rows.

    `place` and `owned` are the parts of a RowTable over `table`. Where `save`, what the backward needs follows.
    """
    x = _operands(operands)
    table = RowTable.from_parts(_array(x.table), x.place.detach().numpy(), _array(x.owned))
    room, before = rooms.room(x.backend, "fwpkm"), _array(x.keys)
    retrieved, keys, after, saved = stream_forward(_call(x), before, table, x.options, room, save=x.save)
    keys = keys.copy() if keys is before else keys  # an output must not be an input
    outputs = [torch.from_numpy(a.copy() if a.base is not None else a) for a in (retrieved, keys, *after.owned())]
    return outputs if saved is None else outputs + convert.pack_saved(saved)


@fwpkm.register_fake
def _(*operands):
    x, context = _operands(operands), get_ctx()
    sequences, end = x.gates.shape
    count = context.new_dynamic_size()
    outputs = [
        x.values.new_empty((sequences, end - x.fresh, x.table.shape[1])),
        x.keys.new_empty(x.keys.shape),
        x.values.new_empty((count,), dtype=torch.int32),
        x.values.new_empty((count, x.table.shape[1])),
    ]
    return outputs + convert.fake_saved(x.values, context.new_dynamic_size) if x.save else outputs


@custom_op(
    "sdm_lite::fwpkm_backward",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor queries, Tensor values, Tensor gates, Tensor mask, Tensor[] saved, Tensor dretrieved,"
    f" SymInt carried, SymInt fresh, {_OPTIONS}, SymInt[] keys_shape, SymInt num_slots, str backend) -> Tensor[]",
)
def fwpkm_backward(queries, values, gates, mask, saved, dretrieved, carried, fresh, *rest):
    """Return the gradients of queries, values, gates and keys, and where num_slots >= 0 of the whole table."""
    *options, _, num_slots, backend = rest
    floats = (_array(x) for x in (queries, values, gates))
    call = StreamCall._make((*floats, mask.detach().numpy(), carried, fresh))
    room, kept = rooms.room(backend, "fwpkm"), StreamSaved(*convert.unpack_saved(saved))
    d = stream_backward(call, StreamOptions(*options), kept, _array(dretrieved), room)
    gradients = [*d[:4], dense_rows(d, num_slots)] if num_slots >= 0 else d[:4]
    return [torch.from_numpy(gradient) for gradient in gradients]


@fwpkm_backward.register_fake
def _(queries, values, gates, mask, saved, dretrieved, carried, fresh, *rest):
    *_, keys_shape, num_slots, _backend = rest
    outputs = [x.new_empty(x.shape) for x in (queries, values, gates)] + [values.new_empty(keys_shape)]
    return [*outputs, values.new_empty((num_slots, values.shape[2]))] if num_slots >= 0 else outputs


def _stream_setup(ctx, inputs, output):
    x = _operands(inputs)
    ctx.set_materialize_grads(False)
    ctx.counts, ctx.options, ctx.backend = inputs[8:10], inputs[10 : 10 + len(OPTION_FIELDS)], x.backend
    ctx.keys_shape, ctx.num_slots = list(x.keys.shape), x.table.shape[0]
    ctx.save, ctx.inputs = x.save, len(inputs)
    ctx.save_for_backward(*inputs[:4], *output[4:])


def _stream_gradient(ctx, doutputs):
    """Only the retrieved values have a gradient: what a call leaves is detached."""
    if doutputs[0] is None:
        return (None,) * ctx.inputs
    assert ctx.save, "the op was asked to save nothing, so it has no backward"
    tensors = ctx.saved_tensors
    num_slots = ctx.num_slots if ctx.needs_input_grad[5] else -1
    rest = (*ctx.counts, *ctx.options, ctx.keys_shape, num_slots, ctx.backend)
    gradients = fwpkm_backward(*tensors[:4], list(tensors[4:]), doutputs[0], *rest)
    *floats, dkeys = gradients[:4]
    found = [*floats, None, dkeys, gradients[4] if num_slots >= 0 else None]
    wanted = [d if need else None for d, need in zip(found, ctx.needs_input_grad)]
    return tuple(wanted + [None] * (ctx.inputs - len(wanted)))


fwpkm.register_autograd(_stream_gradient, setup_context=_stream_setup)
fwpkm_backward.register_autograd(_no_second_derivative("fwpkm"))
