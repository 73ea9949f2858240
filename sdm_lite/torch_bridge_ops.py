"""The operations as `torch.library.custom_op`s over the doors of a room; :mod:`sdm_lite.torch_bridge` calls them.

An op gives torch four things: an implementation (tensors to views as arrays, a room's door, and back); a
fake kernel (shapes and dtypes without data, with which `torch.compile` and `torch.export` trace); a
derivative, whose backward is an op of its own so that it is traced too; and the names of what it
mutates. Schemas are written out, and each has a NamedTuple that gives its operands their names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op, get_ctx

from . import rooms, validate
from . import torch_bridge_arrays as convert
from . import torch_direct as direct
from .arrays import module_of
from .errors import SdmError, message
from .rooms import DeltaInputs, DeltaOptions

_CALL = (
    "Tensor values, Tensor write_slots, Tensor write_weights, Tensor log_decay, Tensor beta, Tensor read_slots, "
    "Tensor read_weights"
)
_OPTIONS = "str backend, str rule, str restore, float restore_tau, str? snapshot_dtype"


class SecondDerivativeError(SdmError, NotImplementedError):
    """A gradient of a gradient was asked for; only first derivatives exist."""


def _no_second_derivative(op: str):
    def raise_error(ctx, *_):
        expected, got = "first derivatives only", "a derivative of a gradient"
        fix = "drop create_graph=True, or detach the gradient"
        raise SecondDerivativeError(message(op, "gradient", expected, got, fix))

    return raise_error


# ---- addressing -----------------------------------------------------------------------------------------------


@direct.op(
    "sdm_lite::product_key_topk",
    device_types=("cpu", "cuda"),
    schema="(Tensor scores, SymInt k, SymInt[] widths, str backend) -> (Tensor, Tensor)",
)
@convert.borrowed
def product_key_topk(scores, k, widths, backend):
    """Return the k best slots of each row [..., k] and their sums, float32 or float64."""
    rows = convert.to_floats(scores, convert.compute_dtype(scores.dtype)).reshape(-1, scores.shape[-1])
    values, slots = rooms.room(backend, "product_key_topk").product_key_topk_forward(rows, tuple(widths), k)
    shape = (*scores.shape[:-1], k)
    return convert.from_room(values).view(shape), convert.from_room(slots).view(shape)


@product_key_topk.register_fake
def _(scores, k, widths, backend):
    shape = (*scores.shape[:-1], k)
    sums = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return scores.new_empty(shape, dtype=sums), scores.new_empty(shape, dtype=torch.int32)


@custom_op(
    "sdm_lite::product_key_topk_backward",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema="(Tensor dvalues, Tensor slots, SymInt[] widths, str backend) -> Tensor",
)
@convert.borrowed
def product_key_topk_backward(dvalues, slots, widths, backend):
    """Return the gradient of the scores, in the dtype of `dvalues`."""
    k = slots.shape[-1]
    rows = convert.to_floats(dvalues, convert.compute_dtype(dvalues.dtype)).reshape(-1, k)
    room = rooms.room(backend, "product_key_topk")
    dscores = room.product_key_topk_backward(rows, convert.to_slots(slots).reshape(-1, k), tuple(widths))
    return convert.from_room(dscores).to(dvalues.dtype).view(*slots.shape[:-1], sum(widths))


@product_key_topk_backward.register_fake
def _(dvalues, slots, widths, backend):
    return dvalues.new_empty((*slots.shape[:-1], sum(widths)))


def _topk_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    scores, _, ctx.widths, ctx.backend = inputs
    ctx.dtype = scores.dtype
    ctx.save_for_backward(output[1])


def _topk_gradient(ctx, dvalues, _dslots):
    (slots,) = ctx.saved_tensors
    if dvalues is None:
        return None, None, None, None
    dscores = product_key_topk_backward(dvalues, slots, ctx.widths, ctx.backend).to(ctx.dtype)
    return dscores, None, None, None


product_key_topk.register_autograd(_topk_gradient, setup_context=_topk_setup)
product_key_topk_backward.register_autograd(_no_second_derivative("product_key_topk"))


@direct.op(
    "sdm_lite::hash_slots",
    device_types=("cpu", "cuda"),
    schema="(Tensor ids, SymInt num_slots, SymInt k, int seed, str backend) -> Tensor",
)
@convert.borrowed
def hash_slots(ids, num_slots, k, seed, backend):
    """Return k slots per id, [..., k]."""
    flat = convert.to_int64(ids).reshape(-1)
    slots = rooms.room(backend, "hash_slots").hash_slots_forward(flat, num_slots, k, seed)
    return convert.from_room(slots).view(*ids.shape, k)


@hash_slots.register_fake
def _(ids, num_slots, k, seed, backend):
    return ids.new_empty((*ids.shape, k), dtype=torch.int32)


# ---- the sparse delta rule ------------------------------------------------------------------------------------


class _Delta(NamedTuple):
    """Operands of sparse_delta_rule, in the order of its schema."""

    values: Tensor
    write_slots: Tensor
    write_weights: Tensor
    log_decay: Tensor
    beta: Tensor
    read_slots: Tensor
    read_weights: Tensor
    cu_seqlens: Tensor | None
    initial_state: Tensor
    backend: str
    rule: str
    restore: str
    restore_tau: float
    snapshot_dtype: str | None
    check: bool
    final: bool
    save: bool


#: where DeltaGradients' six stand among the operands
_DIFFERENTIABLE = (0, 2, 3, 4, 6, 8)


@direct.op(
    "sdm_lite::sparse_delta_rule",
    device_types=("cpu", "cuda"),
    schema=f"({_CALL}, Tensor? cu_seqlens, Tensor initial_state, {_OPTIONS}, bool check, bool final, bool save)"
    " -> Tensor[]",
)
@convert.borrowed
def sparse_delta_rule(*operands):
    """Return the readings; where `final`, the final state; where `save`, the tensors that the backward needs."""
    x = _Delta(*operands)
    dtype = x.initial_state.dtype
    room = rooms.room(x.backend, "sparse_delta_rule")
    inputs = _checked("sparse_delta_rule", operands[:7], x.cu_seqlens, x.initial_state, x.check, room)
    readings, state, saved = room.sparse_delta_forward(
        inputs, convert.to_bits(x.initial_state), _options(dtype, *operands[10:14]), save=x.save, final=x.final
    )
    outputs = [convert.from_room(readings).to(x.values.dtype)]
    if x.final:
        outputs.append(convert.from_bits(state, dtype))
    return outputs + convert.pack_saved(saved) if x.save else outputs


@sparse_delta_rule.register_fake
def _(*operands):
    x = _Delta(*operands)
    outputs = [x.values.new_empty(x.values.shape)]
    if x.final:
        sequences = x.values.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
        outputs.append(x.initial_state.new_empty((sequences, *x.initial_state.shape[-3:])))
    return outputs + convert.fake_saved(x.values, get_ctx().new_dynamic_size) if x.save else outputs


class _DeltaBackward(NamedTuple):
    """Operands of sparse_delta_rule_backward, in the order of its schema."""

    values: Tensor
    write_slots: Tensor
    write_weights: Tensor
    log_decay: Tensor
    beta: Tensor
    read_slots: Tensor
    read_weights: Tensor
    cu_seqlens: Tensor | None
    saved: list[Tensor]
    dreadings: Tensor
    dfinal: Tensor | None
    state_shape: list[int]
    state_dtype: torch.dtype
    backend: str
    rule: str
    restore: str
    restore_tau: float
    snapshot_dtype: str | None
    wanted: list[bool]


@custom_op(
    "sdm_lite::sparse_delta_rule_backward",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema=f"({_CALL}, Tensor? cu_seqlens, Tensor[] saved, Tensor dreadings, Tensor? dfinal, SymInt[] state_shape,"
    f" ScalarType state_dtype, {_OPTIONS}, bool[] wanted) -> Tensor[]",
)
@convert.borrowed
def sparse_delta_rule_backward(*operands):
    """Return those of DeltaGradients that are wanted, each in the dtype of its input."""
    x = _DeltaBackward(*operands)
    compute = convert.compute_dtype(x.state_dtype)
    gradients = rooms.room(x.backend, "sparse_delta_rule").sparse_delta_backward(
        convert.to_inputs(operands[:7], x.cu_seqlens, compute),
        _options(x.state_dtype, *operands[14:18]),
        convert.unpack_saved(x.saved),
        convert.to_floats(x.dreadings, compute),
        None if x.dfinal is None else convert.to_floats(x.dfinal, compute),
        tuple(x.state_shape) if x.wanted[5] else None,
    )
    dtypes = [like.dtype for like in (x.values, x.write_weights, x.log_decay, x.beta, x.read_weights)]
    named = zip(gradients, [*dtypes, x.state_dtype], x.wanted, strict=True)
    return [convert.from_room(gradient).to(dtype) for gradient, dtype, want in named if want]


@sparse_delta_rule_backward.register_fake
def _(*operands):
    x = _DeltaBackward(*operands)
    likes = (x.values, x.write_weights, x.log_decay, x.beta, x.read_weights)
    outputs = [like.new_empty(like.shape) for like, want in zip(likes, x.wanted[:5], strict=True) if want]
    return [*outputs, x.values.new_empty(x.state_shape, dtype=x.state_dtype)] if x.wanted[5] else outputs


def _delta_setup(ctx, inputs, output):
    x = _Delta(*inputs)
    # undefined gradients stay None: zeros for that of the final state would cost a table
    ctx.set_materialize_grads(False)
    ctx.options, ctx.final, ctx.save = inputs[9:14], x.final, x.save
    ctx.state_shape, ctx.state_dtype = list(x.initial_state.shape), x.initial_state.dtype
    ctx.save_for_backward(*inputs[:8], *output[1 + x.final :])


def _delta_gradient(ctx, doutputs):
    assert ctx.save, "the op was asked to save nothing, so it has no backward"
    tensors = ctx.saved_tensors  # once: under activation checkpointing a second look is an error
    call, saved = tensors[:8], tensors[8:]
    dreadings, dfinal = doutputs[0], doutputs[1] if ctx.final else None
    if dreadings is None:
        dreadings = torch.zeros_like(call[0])
    wanted = [ctx.needs_input_grad[place] for place in _DIFFERENTIABLE]
    state = (ctx.state_shape, ctx.state_dtype)
    gradients = iter(sparse_delta_rule_backward(*call, saved, dreadings, dfinal, *state, *ctx.options, wanted))
    named = dict(zip(_DIFFERENTIABLE, wanted, strict=True))
    return tuple(next(gradients) if named.get(place) else None for place in range(len(_Delta._fields)))


sparse_delta_rule.register_autograd(_delta_gradient, setup_context=_delta_setup)
sparse_delta_rule_backward.register_autograd(_no_second_derivative("sparse_delta_rule"))


class _DeltaUpdate(NamedTuple):
    """Operands of sparse_delta_rule_, in the order of its schema."""

    values: Tensor
    write_slots: Tensor
    write_weights: Tensor
    log_decay: Tensor
    beta: Tensor
    read_slots: Tensor
    read_weights: Tensor
    cu_seqlens: Tensor | None
    state: Tensor
    backend: str
    rule: str
    check: bool


@direct.op(
    "sdm_lite::sparse_delta_rule_",
    writes=(8, "state"),
    device_types=("cpu", "cuda"),
    schema=f"({_CALL}, Tensor? cu_seqlens, Tensor(a!) state, str backend, str rule, bool check) -> Tensor",
)
@convert.borrowed
def sparse_delta_rule_(*operands):
    """Update `state` in place and return the readings."""
    x = _DeltaUpdate(*operands)
    room, options = rooms.room(x.backend, "sparse_delta_rule_"), _options(x.state.dtype, x.rule)
    inputs = _checked("sparse_delta_rule_", operands[:7], x.cu_seqlens, x.state, x.check, room)
    table = convert.to_bits(x.state)
    # an input that lies in the state would change under the kernel's hands
    may_share = module_of(table).may_share_memory
    shared = {name: a.copy() for name, a in inputs._asdict().items() if a is not None and may_share(a, table)}
    readings = room.sparse_delta_update(inputs._replace(**shared), table, options)
    return convert.from_room(readings).to(x.values.dtype)


@sparse_delta_rule_.register_fake
def _(*operands):
    values = operands[0]
    return values.new_empty(values.shape)


def _checked(op: str, call: tuple, cu_seqlens: Tensor | None, state: Tensor, check: bool, room: Any) -> DeltaInputs:
    """Return the call in canonical form, its values checked."""
    inputs = convert.to_inputs(call, cu_seqlens, convert.compute_dtype(state.dtype))
    validate.check_delta_values(op, inputs, state.shape[-2], check, room)
    return inputs


def _options(state_dtype: torch.dtype, rule: str, *rest: Any) -> DeltaOptions:
    """Return DeltaOptions from the operands, in the order of _OPTIONS, and the state's dtype."""
    named = dict(zip(("restore", "restore_tau", "snapshot_dtype"), rest))
    return DeltaOptions(rule, **named, state_dtype=str(state_dtype).removeprefix("torch."))
