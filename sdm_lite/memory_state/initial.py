"""The initial memory that all sequences share: kept by reference, read by the kernels, never written.

Where the state is to have another dtype, a converted copy takes its place.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np

from .. import arrays, placement, validate
from ..errors import DtypeError, ShapeError, ValueRangeError, message

# as cpu/vector.py takes 16-bit floats
_STORAGE = {name: np.dtype({"bfloat16": "uint16", "float16": "int16"}.get(name, name)) for name in arrays.FLOATS}
_BLOCK = 1 << 24  # bytes hashed at a time


class Initial:
    """An initial memory [H, N, D] in the state's dtype, or the shape of one that is zero.

    Attributes
    ----------
    kind : str
        "numpy", "torch" or "dlpack": what `dense` gives back.
    shape : tuple of int
        (H, N, D).
    dtype : str
        "float32", "float64", "bfloat16" or "float16".
    bits : array [H, N, D] or None
        In the storage dtype: bf16 as uint16, fp16 as int16. None for zeros.
    """

    def __init__(self, op: str, initial: Any, dtype: Any):
        self._digest: str | None = None
        self.bits: np.ndarray | None = None
        self.numpy_dtype: np.dtype | None = None
        check_given(op, initial)
        if isinstance(initial, (tuple, list)):
            self._open_zeros(op, initial, dtype)
        else:
            self._open_array(op, initial, dtype)
        heads, slots, width = self.shape
        if slots >= 2**31:
            raise ValueRangeError(message(op, "initial", "fewer than 2^31 slots", str(slots), "use more heads"))
        self.storage = _STORAGE[self.dtype]
        self.compute = np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    def _open_zeros(self, op: str, shape: Any, dtype: Any) -> None:
        sizes = tuple(validate.whole_number(op, "initial", size) for size in shape)
        if len(sizes) != 3 or min(sizes) < 0:
            expected = "an array [H, N, D], or the shape (H, N, D) of zeros"
            raise ShapeError(message(op, "initial", expected, str(sizes), "give three sizes"))
        self.shape = sizes
        self.dtype = _dtype_word(op, "float32" if dtype is None else dtype)
        self.kind = "torch" if type(dtype).__module__ == "torch" else "numpy"
        if self.kind == "numpy" and self.dtype == "bfloat16":
            fix = "pass dtype=torch.bfloat16, or an initial memory in bfloat16"
            raise DtypeError(message(op, "dtype", "a dtype that NumPy has", "bfloat16", fix))
        if self.kind == "numpy":
            self.numpy_dtype = np.dtype(self.dtype)

    def _open_array(self, op: str, initial: Any, dtype: Any) -> None:
        self.kind = arrays.kind_of(op, "initial", initial)
        placement.host_backend(op, self.kind, None)  # refuses a device that no room serves
        if self.kind == "tape":
            raise DtypeError(message(op, "initial", "a NumPy array or a tensor", "a tape Tensor", "pass .data"))
        validate.check_dtype(op, "initial", initial, arrays.FLOATS)
        validate.check_shape(op, "initial", initial, (None,) * 3, "[H, N, D]")
        given = arrays.dtype_name(initial)
        self.dtype = given if dtype is None else _dtype_word(op, dtype)
        if self.kind == "torch":
            from .. import torch_state

            bits = torch_state.initial_bits(op, initial, self.dtype)
        else:
            array = arrays.to_numpy(op, "initial", initial)
            if self.dtype != given:
                if "bfloat16" in (self.dtype, given):
                    raise DtypeError(message(op, "dtype", given, self.dtype, "convert the initial memory first"))
                array = arrays.from_float(array, np.dtype(self.dtype))
            self.numpy_dtype = array.dtype
            bits = arrays.state_bits(array)
        bits = bits.view(_STORAGE[self.dtype])
        if not (bits.flags.c_contiguous and bits.flags.aligned):
            fix = "pass a contiguous copy, and keep it: the state refers to it"
            raise ValueRangeError(message(op, "initial", "C-contiguous memory", f"strides {bits.strides}", fix))
        self.shape, self.bits, self.like = tuple(bits.shape), bits, initial

    def give_back(self, bits: np.ndarray) -> Any:
        """Return an array of the storage dtype as the caller's kind and dtype."""
        if self.kind == "torch":
            from .. import torch_state

            return torch_state.from_storage(bits, self.dtype)
        assert self.numpy_dtype is not None, "every kind but torch has one"
        bits = bits.view(self.numpy_dtype)
        return bits if self.bits is None else arrays.like(self.like, self.kind, bits)

    def dense(self, batch: int) -> np.ndarray:
        """Return [B, H, N, D] copies in the storage dtype."""
        if self.bits is None:
            return np.zeros((batch, *self.shape), self.storage)
        return np.array(np.broadcast_to(self.bits, (batch, *self.shape)), order="C")

    def nbytes(self) -> int:
        """Return the bytes of the initial memory; zeros need none."""
        return 0 if self.bits is None else math.prod(self.shape) * self.storage.itemsize

    def digest(self) -> str:
        """Return the SHA-256 of the bits, or "zeros"; taken once, as the memory must not change."""
        if self.bits is None:
            return "zeros"
        if self._digest is None:
            found = hashlib.sha256()
            flat = self.bits.reshape(-1).view(np.uint8)
            for start in range(0, len(flat), _BLOCK):
                found.update(flat[start : start + _BLOCK].data)
            self._digest = found.hexdigest()
        return self._digest


def check_given(op: str, initial: Any) -> None:
    """Raise DtypeError where there is no initial memory."""
    if initial is None:
        expected, fix = "an array [H, N, D], or the shape (H, N, D) of zeros", "pass what the sequences start from"
        raise DtypeError(message(op, "initial", expected, "None", fix))


def _dtype_word(op: str, dtype: Any) -> str:
    word = dtype if isinstance(dtype, str) else str(getattr(dtype, "__name__", dtype)).rpartition(".")[2]
    if word not in arrays.FLOATS:
        raise DtypeError(message(op, "dtype", f"one of {list(arrays.FLOATS)}", repr(dtype), "name one of these"))
    return word
