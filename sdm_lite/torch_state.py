"""`MemoryState` for torch: tensors to the arrays of a call and back, and a custom op for `torch.compile`.

Eager calls go straight to the state. While `torch.compile` traces, a call becomes one opaque op,
``sdm_lite::memory_state_advance``: what a state holds grows in pages, so it is no tensor that a graph could own. The
graph carries a small tensor instead, the state's *handle* (int64 [2]: its number, its count of calls). The op looks the
state up by the number and declares that it mutates the handle, so that calls keep their order and none is dropped; the
number is data, so that one compiled graph serves every state.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.library import custom_op

from . import torch_bridge
from . import torch_bridge_arrays as convert
from .errors import ValueRangeError, message
from .memory_state import call as calls
from .rooms import DeltaInputs

if TYPE_CHECKING:
    from .memory_state import MemoryState

_states: weakref.WeakValueDictionary[int, MemoryState] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_NAMES = DeltaInputs._fields[:7]


def run(state: MemoryState, op: str, given: tuple[Tensor, ...], one_token: bool) -> Tensor:
    """Return the readings of `step` or `extend`, in the dtype of `values`."""
    torch_bridge._check_devices(op, _NAMES, given)
    if torch.is_grad_enabled() and any([x.requires_grad for x in given]):
        name = next(name for name, x in zip(_NAMES, given) if x.requires_grad)
        expected, got = "tensors without gradients: a state has none", "one that requires a gradient"
        raise ValueRangeError(message(op, name, expected, got, "use sparse_delta_rule, or torch.no_grad()"))
    calls.check(state, op, given, one_token)
    if torch.compiler.is_compiling():
        return memory_state_advance(*given, state._handle, op)
    readings, plan = _advance(state, op, given)
    calls.keep(state, plan, Tensor, given, one_token)
    return readings


def _advance(state: MemoryState, op: str, call: Sequence[Tensor]) -> tuple[Tensor, calls.Plan]:
    """Run a call whose metadata have been checked; return its readings and its plan."""
    inputs = _canonical(state.dtype, call)
    plan = calls.plan_of(state, inputs)._replace(
        canonical=functools.partial(_again, state.dtype), give_back=functools.partial(_give_back, call[0].dtype)
    )
    return plan.give_back(calls.advance(state, op, plan, inputs)), plan


def _again(state_dtype: str, call: Sequence[Tensor]) -> list[np.ndarray] | None:
    """Return the arrays of a call whose shapes and dtypes have passed the checks, or None where those see more."""
    if not all([x.is_cpu and x.layout is torch.strided and not x.requires_grad and not x.is_neg() for x in call]):
        return None
    return _canonical(state_dtype, call)


def _canonical(state_dtype: str, call: Sequence[Tensor]) -> list[np.ndarray]:
    """Return a call's tensors as arrays in the compute dtype and int32, C-contiguous, aligned and writable."""
    compute = convert.compute_dtype(convert.dtype_named(state_dtype))
    dtypes = (compute, torch.int32, compute, compute, compute, torch.int32, compute)
    if all([x.dtype is dtype and not x.requires_grad for x, dtype in zip(call, dtypes)]):
        views = [x.numpy() for x in call]
        if all([x.flags.carray for x in views]):
            return views
    return list(convert.to_inputs(call, None, compute)[:7])


def _give_back(dtype: torch.dtype, readings: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(readings)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def open_handle(state: MemoryState) -> Tensor:
    """Return a new state's handle, by which the op finds it."""
    number = next(_numbers)
    _states[number] = state
    with torch.inference_mode(False):  # a handle made in inference mode could not be counted up outside it
        return torch.tensor([number, 0])


def initial_bits(op: str, initial: Tensor, dtype: str) -> np.ndarray:
    """Return a view of an initial memory, 16-bit ones as their bits; a copy only where the dtype is another."""
    torch_bridge._check_devices(op, ("initial",), (initial,))
    if initial.requires_grad:
        expected, got = "a tensor without a gradient: a state has none", "one that requires a gradient"
        raise ValueRangeError(message(op, "initial", expected, got, "pass initial.detach(), which shares its memory"))
    return convert.to_bits(initial.to(convert.dtype_named(dtype)))


def from_storage(bits: np.ndarray, dtype: str) -> Tensor:
    """Return an array of a state's storage dtype as a tensor over the same memory."""
    return convert.from_bits(bits.view(np.uint16) if bits.itemsize == 2 else bits, convert.dtype_named(dtype))


@custom_op(
    "sdm_lite::memory_state_advance",
    mutates_args={"handle"},
    device_types="cpu",
    schema="(Tensor values, Tensor write_slots, Tensor write_weights, Tensor log_decay, Tensor beta, "
    "Tensor read_slots, Tensor read_weights, Tensor(a!) handle, str op) -> Tensor",
)
def memory_state_advance(*operands: Any) -> Tensor:
    """Advance the state with this handle and return the readings."""
    *call, handle, op = operands
    state = _states[int(handle[0])]
    readings, _ = _advance(state, op, call)
    handle[1] += 1
    return readings


@memory_state_advance.register_fake
def _(*operands: Any) -> Tensor:
    return operands[0].new_empty(operands[0].shape)
