"""How often each slot is accessed (spec section 9), counted on a GPU: a thread per access.

Counts are integers, so the order of the additions does not show: the same result every time. Traffic: 4 bytes per
access, and one atomic addition.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

_THREADS = 256


def count_accesses(slots: Any, counts: Any, stream: Any = 0) -> None:
    """Add to counts[h, n] how often slots[.., h, :] name slot n.

    Parameters
    ----------
    slots : device array [B, T, H, k], int32
        In [0, N), or -1: padding, not counted.
    counts : device array [H, N], int32
        Added to.
    stream
        A Numba stream.
    """
    if slots.size:
        grid = -(-slots.size // _THREADS)
        _count[grid, _THREADS, stream](slots.reshape(-1), slots.shape[-1], counts)


@cuda.jit
def _count(slots, each, counts):
    i = cuda.grid(1)
    if i < slots.size and slots[i] >= 0:
        cuda.atomic.add(counts, (i // each % counts.shape[0], slots[i]), 1)
