"""Arrays of any kind in, NumPy or CuPy arrays for the rooms, and the caller's kind back.

A kind is "numpy", "torch", "cupy", "tape" (``sdm_lite.autograd.Tensor``), "dlpack" (anything else with
``__dlpack__``) or "cuda_array" (with ``__cuda_array_interface__`` only, as Numba's device arrays). A framework
is looked up only where the caller has imported it already; CuPy, which views whatever lies on a GPU, by its room.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import numpy as np

from .errors import DeviceError, DtypeError, message

FLOATS = ("float64", "float32", "bfloat16", "float16")
INTEGERS = ("int32", "int64")
IDS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")  # all that int64 holds
_DLPACK_CPU = (1, 3)  # kDLCPU and pinned host memory
_DLPACK_CUDA = (2, 13)  # kDLCUDA and managed memory


class Metadata(NamedTuple):
    """What the checks of metadata want to know of an array: a stand-in that can be compared and kept."""

    shape: tuple[int, ...]
    dtype: Any


def kind_of(op: str, name: str, x: Any) -> str:
    """Return the kind of one argument, or raise DtypeError where it is no array."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        if x.is_nested:  # even its shape would raise
            raise DtypeError(message(op, name, "a dense tensor", "a nested one", "pad it: x.to_padded_tensor(0.0)"))
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
    if hasattr(x, "__cuda_array_interface__"):
        return "cuda_array"
    raise DtypeError(message(op, name, "an array", type(x).__name__, "pass numpy.asarray(...) or a tensor"))


def common_kind(op: str, named: dict[str, Any]) -> str:
    """Return the one kind of all arguments (a tape call may hold plain arrays)."""
    kinds = {name: kind_of(op, name, x) for name, x in named.items()}
    found = set(kinds.values())
    if found in ({"tape", "numpy"}, {"tape", "cupy"}):
        return "tape"
    if len(found) != 1:
        listed = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        raise DtypeError(message(op, "arrays", "all of one kind", listed, "convert them to one framework first"))
    return found.pop()


def dtype_name(x: Any) -> str:
    """Return "float32", "bfloat16", "int64"...: the same word for every framework."""
    dtype = x.dtype
    if isinstance(dtype, np.dtype):
        return _numpy_name(dtype)
    name = getattr(dtype, "name", None)
    return name if isinstance(name, str) else str(dtype).rpartition(".")[2]


@functools.lru_cache(maxsize=64)  # NumPy takes longer over a name than a kernel over a token
def _numpy_name(dtype: np.dtype) -> str:
    return dtype.name


def module_of(*arrays: Any) -> Any:
    """Return ``cupy`` if one of `arrays` is a CuPy array, else ``numpy``; imports nothing.

    >>> module_of(np.zeros(2)).__name__
    'numpy'
    """
    cupy = sys.modules.get("cupy")
    if cupy is not None and any(isinstance(array, cupy.ndarray) for array in arrays):
        return cupy
    return np


def common_device(op: str, named: dict[str, Any]) -> str:
    """Return where all of a call's arrays lie, "cpu" or "cuda:N", or raise DeviceError: none is copied in silence."""
    devices = {name: _device_of(x) for name, x in named.items()}
    away = next((name for name, device in devices.items() if device != "cpu"), None)
    if away is None:
        return "cpu"
    device, state = devices[away], _cuda_room_state()
    if state != "ready" or not device.startswith("cuda:"):
        fix = f"copy it to the CPU; the cuda room: {state}"
        raise DeviceError(message(op, away, "an array on the CPU", f"this array is on {device}", fix))
    for name, other in devices.items():
        if other != device:
            fix = f"move one of the two: {away} is on {device}"
            raise DeviceError(message(op, name, f"an array on {device}", f"this array is on {other}", fix))
    return device


def _device_of(x: Any) -> str:
    x = untaped(x)
    if isinstance(x, np.ndarray):
        return "cpu"
    if module_of(x) is not np:
        return f"cuda:{x.device.id}"
    if hasattr(x, "__dlpack_device__"):
        device, number = x.__dlpack_device__()
        if int(device) in _DLPACK_CPU:
            return "cpu"
        return f"cuda:{number}" if int(device) in _DLPACK_CUDA else f"DLPack device {int(device)}:{number}"
    return f"cuda:{_on_gpu(x).device.id}" if _cuda_room_state() == "ready" else "a GPU"


def untaped(x: Any) -> Any:
    """Return a tape Tensor's array, anything else as it is."""
    tape = sys.modules.get("sdm_lite.autograd")
    return x.data if tape is not None and isinstance(x, tape.Tensor) else x


def _cuda_room_state() -> str:
    from . import rooms

    return rooms.backends()["cuda"]


def _on_gpu(x: Any) -> Any:
    from . import rooms

    return rooms.room("cuda", "arrays").view(x)


def to_room(op: str, name: str, x: Any) -> Any:
    """Return a NumPy view of x (a CuPy one, where x is on a GPU), without a copy; bf16 is not viewed here."""
    if type(x) is np.ndarray and x.dtype.isnative:
        return x
    x = untaped(x)
    if not isinstance(x, np.ndarray):
        if module_of(x) is np:
            host = _device_of(x) == "cpu"
            try:
                x = np.from_dlpack(x) if host else _on_gpu(x)
            except (BufferError, RuntimeError) as error:
                fix = "convert it first"
                raise DtypeError(message(op, name, "an array the rooms can view", str(error), fix)) from error
        return x
    if not x.dtype.isnative:
        raise DtypeError(
            message(op, name, "native byte order", str(x.dtype), "call .astype(x.dtype.newbyteorder('='))")
        )
    return x


def numbers_of(x: Any) -> np.ndarray | None:
    """Return the numbers of a small array of any kind, or None where only its shape is known (a traced graph)."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return np.asarray(x)
    if x.is_meta or torch.compiler.is_compiling() or isinstance(x, torch._subclasses.FakeTensor):
        return None
    return np.array(x.tolist())


def to_numpy(op: str, name: str, x: Any) -> np.ndarray:
    """Return a NumPy view as :func:`to_room` does, or raise DeviceError: for what the CPU rooms alone serve."""
    device = _device_of(x)
    if device != "cpu":
        fix = "copy it to the CPU: no cuda room serves this"
        raise DeviceError(message(op, name, "an array on the CPU", f"this array is on {device}", fix))
    return to_room(op, name, x)


def like(x: Any, kind: str, result: Any) -> Any:
    """Return `result` as the caller's kind: through x's own namespace for DLPack arrays, and a Numba device array."""
    if kind == "dlpack" and hasattr(x, "__array_namespace__"):
        return x.__array_namespace__().from_dlpack(result)
    numba_cuda = sys.modules.get("numba.cuda")
    if kind == "cuda_array" and numba_cuda is not None and hasattr(x, "__cuda_ndarray__"):
        return numba_cuda.as_cuda_array(result)
    return result


def to_float(x: Any, dtype: np.dtype) -> Any:
    """Return x, of any float dtype, plain in the compute dtype (without a copy where it is already)."""
    if x.dtype == dtype:
        return plain(x, dtype)
    if dtype_name(x) == "bfloat16":  # from ml_dtypes
        return widen_bf16(x.view(np.uint16)).astype(dtype, copy=False)
    with np.errstate(over="ignore"):  # a float64 log decay of -1e300 is a wipe in float32
        return plain(x, dtype)


def plain(x: Any, dtype: Any) -> Any:
    """Return x as a C-contiguous, aligned, writable array; the latter two since each mix of others compiles kernels."""
    if type(x) is np.ndarray and (dtype is None or x.dtype == dtype) and x.flags.carray:
        return x
    xp = module_of(x)
    x = xp.ascontiguousarray(x, dtype=dtype)
    if xp is not np:
        return x
    return x if x.flags.writeable and x.flags.aligned else x.copy()


def from_float(x: Any, dtype: np.dtype) -> Any:
    """Return results of the compute dtype in the dtype of an input."""
    if dtype == x.dtype:
        return x
    if _numpy_name(dtype) == "bfloat16":  # from ml_dtypes
        return narrow_bf16(x).view(dtype)
    with np.errstate(over="ignore"):  # beyond float16's 65504 is inf, as torch has it
        return x.astype(dtype, copy=False)


def to_slots(x: Any) -> Any:
    """Return int32 or int64 slots as contiguous int32; what does not fit stays out of any table's range."""
    if x.dtype == np.int64:
        limits = np.iinfo(np.int32)
        x = x.clip(limits.min, limits.max)
    return plain(x, np.int32)


def widen_bf16(bits: Any) -> Any:
    """Return the float32 values of bf16 bits (uint16): exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow_bf16(x: Any) -> Any:
    """Return the bf16 bits (uint16) of float32 values, rounded to nearest even; a NaN stays one, quiet."""
    xp = module_of(x)
    bits = xp.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    return xp.where(xp.isnan(x), (bits >> 16).astype(np.uint16) | np.uint16(0x40), rounded)


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


def state_bits(x: Any) -> Any:
    """Return a state array as the rooms take it: 16-bit floats as their bits (a view), others as they are."""
    return x.view(np.uint16) if dtype_name(x) in ("bfloat16", "float16") else x
