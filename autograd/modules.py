"""Which array module an array belongs to: NumPy, or CuPy where the caller has imported it."""

from __future__ import annotations

import sys
from typing import Any

import numpy


def _module_of(*arrays: Any) -> Any:
    """Return ``cupy`` if one of `arrays` is a CuPy array, else ``numpy``; imports nothing.

    >>> _module_of(numpy.zeros(2)).__name__
    'numpy'
    """
    cupy = sys.modules.get("cupy")
    if cupy is not None and any(isinstance(array, cupy.ndarray) for array in arrays):
        return cupy
    return numpy


def _is_float(array: Any) -> bool:
    """Tell whether `array` is an array of real floating-point numbers."""
    return getattr(getattr(array, "dtype", None), "kind", None) == "f"
