"""How often each slot is accessed (spec section 9), counted on a GPU: a thread per access.

Counts are integers, so the order of the additions does not show: the same result every time. Traffic: 4 bytes per
access, and one atomic addition.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

_THREADS = 256


def count_accesses(slots: Any, counts: Any, stream: Any = 0) -> None:
    """Add to counts[n] how often `slots` name slot n.

    Parameters
    ----------
    slots : device array [n], int32
        In [0, N).
    counts : device array [N], int64
        Added to.
    stream
        A Numba stream.
    """
    if slots.size:
        grid = -(-slots.size // _THREADS)
        _count[grid, _THREADS, stream](slots, counts)


@cuda.jit
def _count(slots, counts):
    i = cuda.grid(1)
    if i < slots.size:
        cuda.atomic.add(counts, slots[i], 1)
