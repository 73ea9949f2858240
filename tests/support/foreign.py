"""A stranger's array: nothing but the DLPack protocol around NumPy memory, as another framework would hand it over."""

from __future__ import annotations

import types

import numpy as np


class ForeignArray:
    """Has shape, dtype and DLPack, and a namespace to come back through; `device` is what it says of itself."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0)):
        self.array, self.device = array, device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def __dlpack__(self, **options):
        assert self.device[0] == 1, "the memory of another device was asked for"
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __array_namespace__(self):
        return types.SimpleNamespace(from_dlpack=lambda x: ForeignArray(np.from_dlpack(x)))


class BareCapsule:
    """The least that DLPack asks for: no shape, no dtype, no namespace, the first version of the protocol."""

    def __init__(self, array: np.ndarray):
        self._array = array

    def __dlpack__(self, stream=None):
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)
