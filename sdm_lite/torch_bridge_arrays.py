"""Tensors to the arrays that a room takes, and back; and `saved`, a room's arrays for its backward, as tensors.

Everything here runs inside an op, where tensors are real ones: on the CPU they become NumPy arrays, on a GPU CuPy's,
with torch's device, stream and memory (:func:`borrowed`). A view is taken wherever
the dtype and the layout allow; 16-bit states cross as their bits (NumPy has no bfloat16).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import arrays
from .rooms import SAVED_ARRAYS, DeltaInputs

#: tensors that :func:`pack_saved` makes
SAVED_TENSORS = SAVED_ARRAYS + 1
# dtypes that an array of `saved` may have; its place in this tuple is its code in the header
_SAVED_DTYPES = tuple(np.dtype(n) for n in "float32 float64 uint16 uint8 int8 int32 int64 bool uint32 float16".split())
_MAX_RANK = 6
_HEADER_SHAPE = (SAVED_ARRAYS, 2 + _MAX_RANK)


def compute_dtype(state_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of all arithmetic: float64 for a float64 state, else float32."""
    return torch.float64 if state_dtype == torch.float64 else torch.float32


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype of a `state_dtype`.

    >>> dtype_named("bfloat16")
    torch.bfloat16
    """
    return getattr(torch, name)


def on_gpu(x: Tensor) -> bool:
    """Tell whether a tensor lies on a GPU that the cuda room serves."""
    return x.is_cuda


class _Stream(NamedTuple):
    """A stream by its address, as the CUDA stream protocol has it; not every torch says it so itself."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def borrowed(function: Callable) -> Callable:
    """Make an op's body work on the device and stream of its first tensor, and take memory from torch's allocator."""

    @functools.wraps(function)
    def on_device_of_first(*operands: Any) -> Any:
        x = operands[0]
        if not on_gpu(x):
            return function(*operands)
        from . import cuda_kernels

        def allocate(size: int) -> tuple[int, Tensor]:
            memory = torch.empty(size, dtype=torch.uint8, device=x.device)
            return memory.data_ptr(), memory

        stream = _Stream(torch.cuda.current_stream(x.device).cuda_stream)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.cuda.device(x.device))
            stack.enter_context(cuda_kernels.borrowed(x.device.index, stream=stream, allocate=allocate))
            return function(*operands)

    return on_device_of_first


def view(x: Tensor) -> Any:
    """Return a tensor's memory as NumPy's or CuPy's array."""
    if not on_gpu(x):
        return x.detach().numpy()
    from . import cuda_kernels

    return cuda_kernels.view(x.detach())


def from_room(array: Any) -> Tensor:
    """Return a room's array as a tensor over the same memory."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array)


def to_floats(x: Tensor, dtype: torch.dtype) -> Any:
    """Return a tensor's values as a plain array of the compute dtype: a view if it is one already."""
    return arrays.plain(view(x if x.dtype is dtype else x.detach().to(dtype)), None)


def to_int64(x: Tensor) -> Any:
    """Return integers as a plain int64 array."""
    return arrays.plain(view(x), np.int64)


def to_slots(x: Tensor) -> Any:
    """Return slots as plain int32; an int64 that does not fit stays outside any table's range."""
    return arrays.to_slots(view(x))


def to_bits(state: Tensor) -> Any:
    """Return a view of a state of any layout, of its bits (uint16) for bfloat16 and float16."""
    state = state.detach()
    return view(state.view(torch.uint16) if state.element_size() == 2 else state)


def from_bits(state: Any, dtype: torch.dtype) -> Tensor:
    """Return a room's state as a tensor over the same memory."""
    tensor = from_room(state)
    return tensor.view(dtype) if tensor.dtype == torch.uint16 else tensor


def to_inputs(call: Sequence[Tensor], cu_seqlens: Tensor | None, dtype: torch.dtype) -> DeltaInputs:
    """Return the seven tensors and `cu_seqlens` of a sparse delta call in the rooms' canonical form."""
    values, write_slots, write_weights, log_decay, beta, read_slots, read_weights = call
    return DeltaInputs(
        to_floats(values, dtype),
        to_slots(write_slots),
        to_floats(write_weights, dtype),
        to_floats(log_decay, dtype),
        to_floats(beta, dtype),
        to_slots(read_slots),
        to_floats(read_weights, dtype),
        None if cu_seqlens is None else to_int64(cu_seqlens),
    )


def pack_saved(saved: Sequence[Any]) -> list[Tensor]:
    """Return `saved` as SAVED_TENSORS tensors over the same memory: a header (dtypes, shapes), then each array's bytes.

    An op has to promise its outputs' dtypes and ranks before it runs; bytes of a size known only
    afterwards are a promise that every room can keep, whatever it saves. The cuda room saves flat arrays and knows
    their dtypes: its header, which the host would have to wait for, says nothing.

    >>> packed = pack_saved((np.ones((2, 3), np.uint16),) + (np.empty(0, np.float32),) * 7)
    >>> packed[1].shape, unpack_saved(packed)[0].shape
    (torch.Size([12]), (2, 3))
    """
    assert len(saved) == SAVED_ARRAYS, "a room pads `saved` with empty arrays"
    if not isinstance(saved[0], np.ndarray):
        flat = [from_room(array.view(np.uint8)) for array in saved]
        return [torch.zeros(_HEADER_SHAPE, dtype=torch.int64, device=flat[0].device), *flat]
    header = np.zeros(_HEADER_SHAPE, np.int64)
    for row, array in zip(header, saved, strict=True):
        row[0], row[1] = _SAVED_DTYPES.index(array.dtype), array.ndim
        row[2 : 2 + array.ndim] = array.shape
    flat = [torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8)) for array in saved]
    return [torch.from_numpy(header), *flat]


def unpack_saved(packed: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return views of the arrays that :func:`pack_saved` was given; of a GPU's, as bytes."""
    if on_gpu(packed[0]):
        return tuple(view(tensor) for tensor in packed[1:])
    header, *flat = (tensor.detach().numpy() for tensor in packed)
    return tuple(
        array.view(_SAVED_DTYPES[code]).reshape(shape[:rank])
        for (code, rank, *shape), array in zip(header.tolist(), flat, strict=True)
    )


def fake_saved(like: Tensor, new_size: Callable[[], int | torch.SymInt]) -> list[Tensor]:
    """Return what :func:`pack_saved` promises: tensors without data, of sizes that `new_size` makes up."""
    header = like.new_empty(_HEADER_SHAPE, dtype=torch.int64)
    return [header, *(like.new_empty((new_size(),), dtype=torch.uint8) for _ in range(SAVED_ARRAYS))]
