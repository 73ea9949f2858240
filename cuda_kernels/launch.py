"""Launches, memory and borrowed devices: the only place where the CUDA room asks CuPy for any of the three."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import DeviceMemoryError, message
from . import modules
from .devices import cupy

#: a null pointer as an argument of a launch
NULL = np.uint64(0)
_GRID_X = 2**31 - 1


@contextlib.contextmanager
def borrowed(
    device: int, *, stream: Any = None, allocate: Callable[[int], tuple[int, Any]] | None = None
) -> Iterator[None]:
    """Work on a device, and with another framework's stream and memory where it gives them.

    Parameters
    ----------
    device : int
        Its number.
    stream : object with ``__cuda_stream__``, or None
        None for CuPy's current stream.
    allocate : callable or None
        Given a number of bytes > 0, returns (address, owner); the memory is free again when the owner is collected.
        None for CuPy's pool.
    """
    cp = cupy()

    def memory(size: int) -> Any:
        address, owner = allocate(max(size, 1))  # type: ignore[misc]
        return cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(address, size, owner, device), 0)

    with contextlib.ExitStack() as stack:
        stack.enter_context(cp.cuda.Device(device))
        if stream is not None:
            stack.enter_context(cp.cuda.Stream.from_external(stream))
        if allocate is not None:
            stack.enter_context(cp.cuda.using_allocator(memory))
        yield


def launch(
    file: str, expression: str, grid: Sequence[int], block: int, arguments: Sequence[Any], shared_bytes: int = 0
) -> None:
    """Launch a kernel on the current device and stream; None among the arguments is a null pointer.

    Scalars are NumPy scalars of the very type that the kernel declares.
    """
    if 0 in grid:
        return
    cp = cupy()
    run = modules.kernel(file, expression, cp.cuda.Device().id)
    run(tuple(grid), (block,), tuple(NULL if a is None else a for a in arguments), shared_mem=shared_bytes)


def over(count: int, per_block: int) -> tuple[int]:
    """Return the grid that gives `per_block` of `count` things to each block."""
    blocks = -(-count // per_block)
    assert blocks <= _GRID_X, "callers split what does not fit one launch"
    return (blocks,)


def empty(shape: Sequence[int], dtype: Any, what: str, fix: str) -> Any:
    """Return an uninitialised array, or raise DeviceMemoryError with the bytes that `what` takes and the `fix`."""
    try:
        return cupy().empty(tuple(shape), dtype)
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":  # CuPy's and torch's have no other name in common
            raise
        raise out_of_memory(math.prod(shape) * np.dtype(dtype).itemsize, what, fix) from error


def zeros(shape: Sequence[int], dtype: Any, what: str, fix: str) -> Any:
    """Return an array of zeros; errors as :func:`empty`."""
    array = empty(shape, dtype, what, fix)
    array.fill(0)
    return array


def out_of_memory(size: int, what: str, fix: str) -> DeviceMemoryError:
    """Return the error of an allocation of `size` bytes that the device did not have."""
    got = "less than that free on the device"
    return DeviceMemoryError(message("the cuda room", what, f"{size:,} bytes", got, fix))


def is_capturing() -> bool:
    """Tell whether the current stream is recording a CUDA graph, where nothing may wait for the device."""
    return bool(cupy().cuda.get_current_stream().is_capturing())
