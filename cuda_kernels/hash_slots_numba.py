"""Hash addressing on a GPU: k distinct slots per id by Floyd's sampling with splitmix64, a thread per id.

The hash is defined in sdm_lite/reference/addressing.py; the slots are the same. The output row is the list that is kept
sorted: about k^2 / 4 moves of 4 bytes. Twins: sdm_lite/reference/addressing.py, sdm_lite/cpu/addressing.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

_THREADS = 128
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 0xFFFFFFFFFFFFFFFF


def hash_slots(ids: Any, num_slots: int, seed: int, slots: Any, stream: Any = 0) -> None:
    """Write the slots of each id, distinct and ascending.

    Parameters
    ----------
    ids : device array [n], int64
    num_slots : int
        At least k.
    seed : int
        Any integer; taken modulo 2^64.
    slots : device array [n, k], int32
        Where they go.
    stream
        A Numba stream.
    """
    if slots.size:
        grid = -(-slots.shape[0] // _THREADS)
        key = np.uint64(_mixed((seed + _GOLDEN) & _WORD))
        _hash_rows[grid, _THREADS, stream](ids.view(np.uint64), num_slots, key, slots)


def _mixed(word: int) -> int:
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


@cuda.jit(device=True)
def _mix(word):
    """As `_mixed`, in 64 bits."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(_MIX_1)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(_MIX_2)
    return word ^ (word >> np.uint64(31))


@cuda.jit
def _hash_rows(words, num_slots, key, slots):
    row = cuda.grid(1)
    if row >= slots.shape[0]:
        return
    k = slots.shape[1]
    state = _mix(words[row] ^ key)
    for j in range(k):
        state += np.uint64(_GOLDEN)
        top = num_slots - k + j
        slot = np.int64(_mix(state) % np.uint64(top + 1))
        low, high = 0, j
        while low < high:
            middle = (low + high) // 2
            if slots[row, middle] < slot:
                low = middle + 1
            else:
                high = middle
        if low < j and slots[row, low] == slot:
            low, slot = j, np.int64(top)  # drawn before: top instead, which is above all earlier draws
        for i in range(j, low, -1):
            slots[row, i] = slots[row, i - 1]
        slots[row, low] = slot
