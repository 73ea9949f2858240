"""Arrays of any kind in, NumPy arrays for the rooms, and the caller's kind back.

A kind is "numpy", "torch", "cupy", "tape" (``sdm_lite.autograd.Tensor``) or "dlpack" (anything else
with ``__dlpack__``). A framework is looked up only where the caller has imported it already.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from .errors import DeviceError, DtypeError, message

FLOATS = ("float64", "float32", "bfloat16", "float16")
INTEGERS = ("int32", "int64")
IDS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")  # all that int64 holds
_DLPACK_CPU = (1, 3)  # kDLCPU and pinned host memory


def kind_of(op: str, name: str, x: Any) -> str:
    """Return the kind of one argument, or raise DtypeError where it is no array."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return "torch"
    if isinstance(x, np.ma.MaskedArray):
        raise DtypeError(message(op, name, "an array without a mask", "a masked array", "pass x.filled(...)"))
    if isinstance(x, np.ndarray):
        return "numpy"
    tape = sys.modules.get("sdm_lite.autograd")
    if tape is not None and isinstance(x, tape.Tensor):
        return "tape"
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        return "cupy"
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return "dlpack"
    raise DtypeError(message(op, name, "an array", type(x).__name__, "pass numpy.asarray(...) or a tensor"))


def common_kind(op: str, named: dict[str, Any]) -> str:
    """Return the one kind of all arguments (a tape call may hold NumPy arrays)."""
    kinds = {name: kind_of(op, name, x) for name, x in named.items()}
    found = set(kinds.values())
    if found == {"tape", "numpy"}:
        return "tape"
    if len(found) != 1:
        listed = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        raise DtypeError(message(op, "arrays", "all of one kind", listed, "convert them to one framework first"))
    return found.pop()


def dtype_name(x: Any) -> str:
    """Return "float32", "bfloat16", "int64"...: the same word for every framework."""
    return _word(x.dtype)


@functools.lru_cache(maxsize=64)  # NumPy takes longer over a name than a kernel over a token
def _word(dtype: Any) -> str:
    name = getattr(dtype, "name", None)
    return name if isinstance(name, str) else str(dtype).rpartition(".")[2]


def to_numpy(op: str, name: str, x: Any) -> np.ndarray:
    """Return a NumPy view of a NumPy, tape or DLPack array on the CPU, without a copy; bf16 is not viewed here."""
    tape = sys.modules.get("sdm_lite.autograd")
    if tape is not None and isinstance(x, tape.Tensor):
        x = x.data
    if not isinstance(x, np.ndarray):
        check_on_cpu(op, name, x)
        try:
            x = np.from_dlpack(x)
        except (BufferError, RuntimeError) as error:
            raise DtypeError(message(op, name, "an array NumPy can view", str(error), "convert it first")) from error
    if not x.dtype.isnative:
        raise DtypeError(
            message(op, name, "native byte order", str(x.dtype), "call .astype(x.dtype.newbyteorder('='))")
        )
    return x


def check_on_cpu(op: str, name: str, x: Any) -> None:
    """Raise DeviceError where a DLPack array lies on another device: nothing is copied in silence."""
    device, number = x.__dlpack_device__()
    if int(device) not in _DLPACK_CPU:
        from . import rooms

        where = f"cuda:{number}" if int(device) in (2, 13) else f"DLPack device {int(device)}:{number}"
        reason = rooms.backends()["cuda"]
        raise DeviceError(message(op, name, "an array on the CPU", f"this array is on {where}", reason))


def like(x: Any, kind: str, result: np.ndarray) -> Any:
    """Return `result` as the caller's kind: NumPy, or through x's own namespace for other DLPack arrays."""
    if kind == "dlpack" and hasattr(x, "__array_namespace__"):
        return x.__array_namespace__().from_dlpack(result)
    return result


def to_float(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return x, of any float dtype, plain in the compute dtype (without a copy where it is already)."""
    if x.dtype == dtype:
        return plain(x, dtype)
    if dtype_name(x) == "bfloat16":  # from ml_dtypes
        return widen_bf16(x.view(np.uint16)).astype(dtype, copy=False)
    with np.errstate(over="ignore"):  # a float64 log decay of -1e300 is a wipe in float32
        return plain(x, dtype)


def plain(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Return x as a C-contiguous, aligned, writable array; the latter two since each mix of others compiles kernels."""
    x = np.ascontiguousarray(x, dtype=dtype)
    return x if x.flags.writeable and x.flags.aligned else x.copy()


def from_float(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return results of the compute dtype in the dtype of an input."""
    if dtype == x.dtype:
        return x
    if _word(dtype) == "bfloat16":  # from ml_dtypes
        return narrow_bf16(x).view(dtype)
    with np.errstate(over="ignore"):  # beyond float16's 65504 is inf, as torch has it
        return x.astype(dtype, copy=False)


def to_slots(x: np.ndarray) -> np.ndarray:
    """Return int32 or int64 slots as contiguous int32; what does not fit stays out of any table's range."""
    if x.dtype == np.int64:
        x = np.clip(x, np.iinfo(np.int32).min, np.iinfo(np.int32).max)
    return plain(x, np.int32)


def widen_bf16(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values of bf16 bits (uint16): exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow_bf16(x: np.ndarray) -> np.ndarray:
    """Return the bf16 bits (uint16) of float32 values, rounded to nearest even; a NaN stays one, quiet."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), (bits >> 16).astype(np.uint16) | np.uint16(0x40), rounded)


def widen_state(bits: np.ndarray, state_dtype: str) -> np.ndarray:
    """Return rows of a state as the compute dtype: float32 for the 16-bit dtypes, else as they are."""
    if state_dtype == "bfloat16":
        return widen_bf16(bits)
    if state_dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return bits


def narrow_state(rows: np.ndarray, state_dtype: str) -> np.ndarray:
    """Return compute-dtype rows as the state stores them (bits for the 16-bit dtypes)."""
    if state_dtype == "bfloat16":
        return narrow_bf16(rows)
    if state_dtype == "float16":
        with np.errstate(over="ignore"):
            return rows.astype(np.float16).view(np.uint16)
    return rows


def state_bits(x: np.ndarray) -> np.ndarray:
    """Return a state array as the rooms take it: 16-bit floats as their bits (a view), others as they are."""
    return x.view(np.uint16) if dtype_name(x) in ("bfloat16", "float16") else x
