"""Launches and memory: where the CUDA room asks CuPy for either."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import DeviceMemoryError, ValueRangeError, message
from . import modules
from .devices import cupy

#: a null pointer as an argument of a launch
NULL = np.uint64(0)
_GRID_X, _GRID_YZ = 2**31 - 1, 2**16 - 1


def on_device_of(array: Any) -> Any:
    """Return the context in which launches and memory are those of an array's device."""
    return cupy().cuda.Device(array.device.id)


def launch(
    file: str, expression: str, grid: Sequence[int], block: int, arguments: Sequence[Any], shared_bytes: int = 0
) -> None:
    """Launch a kernel on the current device and stream; None among the arguments is a null pointer.

    Scalars are NumPy scalars of the very type that the kernel declares.
    """
    if 0 in grid:
        return
    run = modules.kernel(file, expression, cupy().cuda.Device().id)
    limit = run.max_dynamic_shared_size_bytes
    if max(grid[1:], default=0) > _GRID_YZ or grid[0] > _GRID_X or shared_bytes > limit:
        expected = f"at most {_GRID_X} by {_GRID_YZ} blocks of {limit} shared bytes"
        got, fix = f"{tuple(grid)} blocks of {shared_bytes} bytes", "split the call, or use the cpu room"
        raise ValueRangeError(message("the cuda room", expression, expected, got, fix))
    run(tuple(grid), (block,), tuple(NULL if a is None else a for a in arguments), shared_mem=shared_bytes)


def over(count: int, per_block: int) -> tuple[int]:
    """Return the grid that gives `per_block` of `count` things to each block."""
    return (-(-count // per_block),)


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
