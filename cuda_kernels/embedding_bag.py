"""The CUDA room's doors of embedding bags: weighted sums of table rows, their gradients, and the numbering of slots.

Definitions, shapes and bits as in :mod:`sdm_lite.cpu.bag`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ValueRangeError, message
from . import launch
from .devices import cupy

_THREADS = 128
_FIX = "read in several calls"


def embedding_bag_forward(values: Any, slots: Any, weights: Any) -> Any:
    """Return y_t = sum_a w_ta V[slot_ta], [n, D]."""
    with launch.on_device_of(values):
        (tokens, bag), width = slots.shape, values.shape[1]
        readings = launch.empty((tokens, width), values.dtype, "the readings", _FIX)
        arguments = (values, slots, weights, readings, np.int32(bag), np.int32(width))
        _launch("forward", "forward", (tokens, *launch.over(width, _THREADS)), arguments)
        return readings


def embedding_bag_backward(dreadings: Any, slots: Any, weights: Any, num_slots: int) -> Any:
    """Return dV [num_slots, D]: each row the sum of its reads, in their order; zero where no token reads."""
    if slots.size >= 2**31:
        expected, fix = "fewer than 2^31 reads n K in one call with gradients", "split the call"
        raise ValueRangeError(message("embedding_bag", "slots", expected, str(slots.size), fix))
    with launch.on_device_of(dreadings):
        bag, width = slots.shape[1], dreadings.shape[1]
        dvalues = launch.zeros((num_slots, width), dreadings.dtype, "the gradient of the table", _FIX)
        order = cupy().argsort(slots.reshape(-1), kind="stable")
        sizes = (np.int32(slots.size), np.int32(bag), np.int32(width))
        grid = (slots.size, *launch.over(width, _THREADS))
        _launch("backward", "values_backward", grid, (dreadings, slots, weights, order, dvalues, *sizes))
        return dvalues


def embedding_bag_weights_backward(dreadings: Any, values: Any, slots: Any) -> Any:
    """Return dw [n, K] = <V[slot_ta], dy_t>."""
    with launch.on_device_of(dreadings):
        bag, width = slots.shape[1], dreadings.shape[1]
        dweights = launch.empty(slots.shape, dreadings.dtype, "the gradient of the weights", _FIX)
        sizes = (np.int64(slots.size), np.int32(bag), np.int32(width))
        grid = launch.over(slots.size, _THREADS // 16)
        _launch("backward", "weights_backward", grid, (dreadings, values, slots, dweights, *sizes))
        return dweights


def number_slots(slots: Any, num_slots: int) -> tuple[Any, Any]:
    """Return the distinct slots [U], ascending, and the place of each slot among them [n, K]; both int32.

    Waits for the device: U is known only then.
    """
    with launch.on_device_of(slots):
        rows, places = cupy().unique(slots.reshape(-1), return_inverse=True)
        return rows.astype(np.int32), places.reshape(slots.shape).astype(np.int32)


def _launch(file: str, kernel: str, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
    real = "double" if arguments[0].dtype == np.float64 else "float"
    launch.launch(f"embedding_bag_{file}.cu", f"embedding_bag_{kernel}<{real}>", grid, _THREADS, arguments)
