"""Numba's launches in CuPy's queue: its current stream, and its arrays without a wait for the device."""

from __future__ import annotations

from typing import Any

from numba import cuda

from .devices import cupy


def current_stream() -> Any:
    """Return CuPy's current stream as one of Numba's."""
    return cuda.external_stream(cupy().cuda.get_current_stream().ptr)


def device_array(x: Any) -> Any:
    """Return a CuPy array as one of Numba's, without the wait that Numba has by default: all is in one stream."""
    return cuda.as_cuda_array(x, sync=False)
