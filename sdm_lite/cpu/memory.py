"""Large arrays whose memory is kept, when they are freed, for the next array of that size.

A fresh page costs the system a fault and a fill, several times what a kernel pays to use it; a training step asks for
the same tables again and again. Blocks return here when the last view of them is gone, and at most LIMIT bytes wait.
"""

from __future__ import annotations

import collections
import math
import os
import threading

import numpy as np

from .vector import CACHE_LINE

_SMALLEST = 1 << 18  # bytes; below this malloc keeps the memory itself
_STEP = 1 << 16  # sizes are rounded up to it, or to 1/16 of the size, so that nearly equal requests share


def _limit() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 16
    except (AttributeError, ValueError, OSError):
        return 1 << 28


LIMIT = _limit()  # bytes: a sixteenth of the machine's memory
_waiting: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()  # by id, oldest first
_bytes = 0
_lock = threading.RLock()  # a collection of garbage may return a block while this thread holds the lock


class _Block:
    """Owns the memory of one array; whatever views it keeps it alive."""

    def __init__(self, memory: np.ndarray, shape: tuple[int, ...], dtype: np.dtype):
        self.memory = memory
        address = memory.__array_interface__["data"][0]
        place = (address + -address % CACHE_LINE, False)
        self.__array_interface__ = {"shape": shape, "typestr": dtype.str, "data": place, "version": 3}

    def __del__(self) -> None:
        if _lock is not None:  # None while the interpreter shuts down
            _put_back(self.memory)


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised C-contiguous array; a large one begins with a cache line, so that rows straddle fewer."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALLEST:
        return np.empty(shape, dtype)
    step = max(_STEP, size >> 4)
    return np.asarray(_Block(_take(-(-(size + CACHE_LINE) // step) * step), shape, dtype))


def origin(width: int, dtype: np.dtype) -> np.ndarray:
    """Return rows of numbers that lie one element apart: to a kernel, row n is what lies n elements from here.

    So one array, read and written by addresses (:func:`elements_to`), spans many.
    """
    dtype = np.dtype(dtype)
    start = np.zeros(width + 1, dtype)
    return np.lib.stride_tricks.as_strided(start, (2, width), (dtype.itemsize,) * 2)


def elements_to(array: np.ndarray, start: np.ndarray) -> int:
    """Return where an array begins, in elements from an origin."""
    apart = array.__array_interface__["data"][0] - start.__array_interface__["data"][0]
    assert apart % array.itemsize == 0, "arrays are aligned"
    return apart // array.itemsize


class _Writable:
    """Shows a read-only array's memory as writable, to a kernel that only reads it."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


def for_kernels(array: np.ndarray) -> np.ndarray:
    """Return an array that Numba types like all others: C-contiguous, aligned, writable. Kernels only read it.

    Another type would mean compiling the kernel once more.
    """
    if not (array.flags.c_contiguous and array.flags.aligned):
        array = np.require(array, requirements=["C", "A"])
    return array if array.flags.writeable else np.asarray(_Writable(array))


def _take(size: int) -> np.ndarray:
    global _bytes
    with _lock:
        for key, memory in reversed(list(_waiting.items())):  # a list: returning blocks change the dict
            if size <= memory.nbytes <= size + (size >> 3) and _waiting.pop(key, None) is not None:
                _bytes -= memory.nbytes
                return memory
    return np.empty(size, np.uint8)


def _put_back(memory: np.ndarray) -> None:
    global _bytes
    with _lock:
        _waiting[id(memory)] = memory
        _bytes += memory.nbytes
        while _bytes > LIMIT:
            _bytes -= _waiting.popitem(last=False)[1].nbytes


def _forget_lock() -> None:
    """Give a forked child a lock of its own: the parent's may be held by a thread that is not in it."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)
