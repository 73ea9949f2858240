"""The CUDA room's doors of addressing: product-key selection, its gradient, and hash slots."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import launch
from .devices import check_numba, cupy

_THREADS = 128
_FIX = "select in several calls"


def product_key_topk_forward(scores: Any, widths: Sequence[int], k: int) -> tuple[Any, Any]:
    """Return the k slots with the greatest sums of one score per factor, ascending, and their sums.

    Definition, shapes and bits as :func:`sdm_lite.cpu.product_key_topk_forward`.
    """
    with launch.on_device_of(scores):
        values = launch.empty((len(scores), k), scores.dtype, "the selected sums", _FIX)
        slots = launch.empty((len(scores), k), np.int32, "the selected slots", _FIX)
        sizes = (len(widths), sum(widths), k, _candidates(tuple(widths), k))
        launch.launch(
            "product_key_topk_forward.cu", f"product_key_topk_forward<{_c_name(scores)}, {_THREADS}>",
            (len(scores),), _THREADS,
            (scores, _on_device(tuple(widths), cupy().cuda.Device().id), *(np.int32(n) for n in sizes), values, slots),
            forward_shared_bytes(tuple(widths), k, scores.itemsize),
        )  # fmt: skip
        return values, slots


def product_key_topk_backward(dvalues: Any, slots: Any, widths: Sequence[int]) -> Any:
    """Return the gradient of the scores: each selected sum's goes to one column of each factor, in ascending order."""
    with launch.on_device_of(dvalues):
        rows, k = slots.shape
        dscores = launch.empty((rows, sum(widths)), dvalues.dtype, "the gradient of the scores", _FIX)
        sizes = (np.int32(n) for n in (len(widths), sum(widths), k))
        launch.launch(
            "product_key_topk_backward.cu", f"product_key_topk_backward<{_c_name(dvalues)}, {_THREADS}>",
            (rows,), _THREADS,
            (dvalues, slots, _on_device(tuple(widths), cupy().cuda.Device().id), *sizes, dscores),
            sum(_round(k * size) for size in (dvalues.itemsize, 4, 4)),
        )  # fmt: skip
        return dscores


def hash_slots_forward(ids: Any, num_slots: int, k: int, seed: int) -> Any:
    """Return k distinct slots per id, [n, k] int32, ascending: those of every room."""
    check_numba("hash_slots")
    from . import hash_slots_numba, stream_numba

    with launch.on_device_of(ids):
        slots = launch.empty((len(ids), k), np.int32, "the slots", _FIX)
        to, stream = stream_numba.device_array(slots), stream_numba.current_stream()
        hash_slots_numba.hash_slots(stream_numba.device_array(ids), num_slots, seed, to, stream)
        return slots


def count_accesses(slots: Any, counts: Any) -> None:
    """Add to counts [N], int64, how often `slots`, int32 [n] in [0, N), name each slot."""
    check_numba("SlotUsage.add")
    from . import access_statistics_numba, stream_numba

    with launch.on_device_of(slots):
        to, stream = stream_numba.device_array(counts), stream_numba.current_stream()
        access_statistics_numba.count_accesses(stream_numba.device_array(slots), to, stream)


def _c_name(array: Any) -> str:
    return "double" if array.dtype == np.float64 else "float"


@functools.lru_cache(maxsize=256)
def _on_device(widths: tuple[int, ...], device: int) -> Any:
    """Return the widths on a device: copied there once, so that a later call may be captured in a graph."""
    copied = cupy().asarray(np.array(widths, np.int32))
    cupy().cuda.get_current_stream().synchronize()  # the next call may be in another stream
    return copied


def _candidates(widths: tuple[int, ...], k: int) -> int:
    """Return the most pairs of ranks that a staircase has: (i + 1) (j + 1) <= k, for each factor that joins."""
    firsts = [min(k, math.prod(widths[:f])) for f in range(1, len(widths))]
    return max(
        (sum(min(k // (i + 1), w) for i in range(n)) for n, w in zip(firsts, widths[1:], strict=True)), default=0
    )


def forward_shared_bytes(widths: tuple[int, ...], k: int, itemsize: int) -> int:
    """Return the shared bytes of product_key_topk_forward.cu, by the formula of its header."""
    chosen, pairs = 1 << (k - 1).bit_length(), _candidates(widths, k)
    lists = 3 * (_round(k * itemsize) + _round(k * 4))
    return lists + sum(_round(n) for n in (chosen * (itemsize + 8), pairs * itemsize, pairs * 4, (k + 1) * 4))


def _round(size: int) -> int:
    return -(-size // 16) * 16
