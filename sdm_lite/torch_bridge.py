"""The torch bridge: what :mod:`sdm_lite.ops` calls for torch tensors, once shapes and dtypes are checked.

The operations are `torch.library` custom ops (:mod:`sdm_lite.torch_bridge_ops`), so that they work under
`torch.compile(fullgraph=True)`, activation checkpointing, DDP and `torch.library.opcheck`. What the
delta rule saves for its backward has a size that depends on the data: `torch.compile` without
``fullgraph=True`` runs a *training* step's delta rule outside the graph, unless
``torch._dynamo.config.capture_dynamic_output_shape_ops`` is set (``fullgraph=True`` implies it in torch 2.13;
an older torch may want it set).

Autocast: no operand is cast, on purpose. All arithmetic is in float32 (float64 for a float64 state)
whatever comes in, so under bf16 or fp16 autocast values, weights and gates may each be 16-bit or
float32, the state keeps its own dtype, and readings come in the dtype of `values`. One cast for all
operands, which is what `torch.library.register_autocast` offers, would round the state and the gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from . import rooms
from . import torch_bridge_ops as ops
from . import torch_direct as direct
from .errors import DeviceError, DtypeError, ValueRangeError, message
from .rooms import DeltaOptions
from .torch_bridge_ops import SecondDerivativeError

__all__ = ["SecondDerivativeError", "hash_slots", "product_key_topk", "sparse_delta_rule", "sparse_delta_rule_"]


def product_key_topk(scores: Tensor, k: int, widths: Sequence[int], backend: str) -> tuple[Tensor, Tensor]:
    """Return the k best slots of each row and their sums, as :func:`sdm_lite.product_key_topk`.

    Parameters
    ----------
    scores : Tensor [..., sum(widths)], float
        Sums are float32 (float64 for float64 scores).
    k : int
        Slots to select.
    widths : sequence of int
        Columns of each factor.
    backend : str
        The room.

    Returns
    -------
    values : Tensor [..., k], float32 (float64 for float64 scores)
        Differentiable once.
    slots : Tensor [..., k], int32
        Ascending.

    Raises
    ------
    DeviceError, BackendError
        Where no room serves the tensor.
    SecondDerivativeError
        In the backward of a backward.

    Examples
    --------
    >>> product_key_topk(torch.tensor([1.0, 1, 0, 0, 0, -1]), 3, (3, 3), "reference")
    (tensor([1., 1., 1.]), tensor([0, 1, 3], dtype=torch.int32))
    """
    _check_devices("product_key_topk", ("scores",), (scores,))
    return direct.call(ops.product_key_topk, scores, k, widths, backend)


def hash_slots(ids: Tensor, num_slots: int, k: int, seed: int, backend: str) -> Tensor:
    """Return k distinct slots per id, [..., k] int32, as :func:`sdm_lite.hash_slots`.

    >>> hash_slots(torch.tensor([7, -7]), 100, 4, 0, "reference")
    tensor([[ 0, 55, 86, 87],
            [10, 42, 72, 97]], dtype=torch.int32)
    """
    _check_devices("hash_slots", ("ids",), (ids,))
    # an op takes 64-bit integers; rooms take the seed modulo 2**64
    return direct.call(ops.hash_slots, ids, num_slots, k, (seed + 2**63) % 2**64 - 2**63, backend)


def sparse_delta_rule(
    values: Tensor,
    write_slots: Tensor,
    write_weights: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    read_slots: Tensor,
    read_weights: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    options: DeltaOptions,
    check: bool,
    final: bool,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """Run the recurrence of :func:`sdm_lite.sparse_delta_rule`.

    Parameters
    ----------
    values, write_slots, write_weights, beta, read_slots, read_weights : Tensor
        As in the public op. Floats of any dtype are computed with in float32 (float64 for a float64 state).
    log_decay : Tensor [B, T, H, 1] or [B, T, H, W]
        Natural logarithm of the decay.
    initial_state : Tensor [S, H, N, D] or [H, N, D]
        Any layout; left as it is.
    cu_seqlens : Tensor [S + 1] or None
        Token offsets of packed sequences.
    options : DeltaOptions
        `state_dtype` is that of `initial_state`.
    check : bool
        Check slots and decays.
    final : bool
        Return the state after the last token.
    backend : str
        The room.

    Returns
    -------
    readings : Tensor [B, T, H, D], dtype of `values`
        Differentiable once.
    final_state : Tensor [S, H, N, D], dtype of the state, or None
        Differentiable once; a backward leaves it as it is.

    Raises
    ------
    DeviceError, BackendError
        Where no room serves the tensors.
    SlotError, ValueRangeError
        Where a value check fails.
    SecondDerivativeError
        In the backward of a backward.
    """
    call = (values, write_slots, write_weights, log_decay, beta, read_slots, read_weights, cu_seqlens, initial_state)
    _check_devices("sparse_delta_rule", (*_NAMES[:-1], "initial_state"), call)
    # what the backward needs costs memory and time: nothing is saved where nobody will ask for it
    save = torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in call])
    options_flat = (options.rule, options.restore, options.restore_tau, options.snapshot_dtype)
    outputs = direct.call(ops.sparse_delta_rule, *call, backend, *options_flat, check, final, save)
    return outputs[0], outputs[1] if final else None


def sparse_delta_rule_(
    values: Tensor,
    write_slots: Tensor,
    write_weights: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    read_slots: Tensor,
    read_weights: Tensor,
    state: Tensor,
    cu_seqlens: Tensor | None,
    options: DeltaOptions,
    check: bool,
    backend: str,
) -> Tensor:
    """Run the recurrence in place on `state` and return the readings; arguments as :func:`sparse_delta_rule`.

    Raises
    ------
    ValueRangeError
        Also where `state`, or with gradients enabled any tensor, requires a gradient, and where cells of
        `state` overlap. The state is unchanged then.
    """
    op = "sparse_delta_rule_"
    call = (values, write_slots, write_weights, log_decay, beta, read_slots, read_weights, cu_seqlens, state)
    _check_devices(op, _NAMES, call)
    if state.requires_grad or (torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in call])):
        name = next(name for name, x in zip(_NAMES, call) if x is not None and x.requires_grad)
        expected, got = "tensors without gradients: this form has none", "one that requires a gradient"
        raise ValueRangeError(message(op, name, expected, got, "use sparse_delta_rule, or torch.no_grad()"))
    if not state.is_contiguous() and _overlaps(state):
        got = f"strides {list(state.stride())}"
        raise ValueRangeError(message(op, "state", "a tensor whose cells do not overlap", got, "call .contiguous()"))
    return direct.call(ops.sparse_delta_rule_, *call, backend, options.rule, check)


_NAMES = (*rooms.DeltaInputs._fields, "state")  # of the tensors of a call, in the order of the ops' schemas


def _overlaps(x: Tensor) -> bool:
    """Return whether two cells of x may share an address, as those of an expanded tensor do."""
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size > 1 and stride < reach:
            return True
        reach = max(reach, stride * size)
    return False


def _refuse(op: str, name: str, x: Tensor) -> NoReturn:
    """Raise DtypeError for a tensor whose numbers do not lie in memory as its strides say."""
    if x.layout is not torch.strided or x.is_nested:
        got, fix = "a nested one" if x.is_nested else f"layout {x.layout}", "call .to_dense(), or pad it"
        raise DtypeError(message(op, name, "a dense tensor", got, fix))
    got, fix = "one with the negative bit, such as z.conj().imag", "call .resolve_neg()"
    raise DtypeError(message(op, name, "a tensor that holds its numbers", got, fix))


def _check_devices(op: str, names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """Raise unless all tensors are dense and lie on the CPU, or on one GPU that the cuda room serves."""
    present = {name: x for name, x in zip(names, tensors) if x is not None}
    compiling = torch.compiler.is_compiling()
    for name, x in present.items():
        if x.layout is not torch.strided or x.is_nested or (not compiling and x.is_neg()):
            _refuse(op, name, x)
    away = next((x for x in present.values() if x.device.type != "cpu"), None)
    if away is None:
        return
    if away.device.type == "cuda" and rooms.backends()["cuda"] == "ready":
        wanted, fix = str(away.device), "move one of the two"
    elif away.device.type == "cuda":
        wanted, fix = "cpu", f"call .cpu(); the cuda room: {rooms.backends()['cuda']}"
    else:
        wanted, fix = "cpu", f"no room serves {away.device.type}: make the tensor on the CPU"
    for name, x in present.items():
        if str(x.device) != wanted:
            raise DeviceError(message(op, name, f"a tensor on {wanted}", f"this tensor is on {x.device}", fix))
