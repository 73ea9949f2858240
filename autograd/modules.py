"""Which array module an array belongs to: NumPy, or CuPy where the caller has imported it."""

from __future__ import annotations

from typing import Any

from ..arrays import module_of as _module_of

__all__ = ["_is_float", "_module_of"]


def _is_float(array: Any) -> bool:
    """Tell whether `array` is an array of real floating-point numbers."""
    return getattr(getattr(array, "dtype", None), "kind", None) == "f"
