"""Where a call runs: the device of its arrays, and the room that serves it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import arrays, rooms
from .errors import BackendError, DeviceError, message

FOREIGN = ("dlpack", "cuda_array")  # kinds that are worked on as views
_HASHABLE = (str, float, int, type(None))


def on_its_device(op: Callable) -> Callable:
    """Make an op work on the GPU of its first argument, whichever is current; torch's bridge does so for tensors."""

    @functools.wraps(op)
    def run(*args: Any, **options: Any) -> Any:
        first = arrays.untaped(args[0] if args else next(iter(options.values()), None))
        if arrays.module_of(first) is np:
            return op(*args, **options)
        with first.device:
            return op(*args, **options)

    return run


def plain_kind(given: Sequence[Any], choices: Sequence[Any] = ()) -> tuple[str, str] | None:
    """Return kind and device where the arrays' shapes and dtypes say all that there is to check, else None.

    A call repeats itself, and its checks may take longer than its kernel: what passed once need not be checked again.
    """
    kinds = {type(x) for x in given}
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling() or not all([isinstance(x, _HASHABLE) for x in choices]):
        return None
    if kinds == {np.ndarray}:
        return "numpy", "cpu"
    if torch is not None and kinds <= {torch.Tensor, torch.nn.Parameter} and not any([x.is_nested for x in given]):
        return "torch", str(given[0].device)
    return None


def device_of(op: str, kind: str, named: dict[str, Any]) -> str:
    """Return where a call's arrays lie; torch's bridge looks at the devices of tensors itself."""
    if kind == "torch":
        return str(next(iter(named.values())).device)
    return arrays.common_device(op, named)


def backend_of(op: str, device: str, backend: str | None) -> str:
    """Return the room of a call: the one asked for, which must serve the arrays' device, or the device's own."""
    if not isinstance(backend, (str, type(None))):
        raise BackendError(message(op, "backend", "a room's name or None", repr(backend), "see sdm_lite.backends()"))
    own = "cuda" if device.startswith("cuda") else "cpu"
    if backend is None or backend == own:
        return own
    if "cuda" in (backend, own) and backend in rooms.backends():
        rooms.room(backend, op)  # a room that is not ready says so first
        expected, got = f"arrays that the {backend} room serves", f"arrays on {device}"
        raise DeviceError(message(op, "backend", expected, got, f"move the arrays, or name {own!r} or None"))
    return backend


def host_backend(op: str, kind: str, backend: str | None) -> str:
    """Return the room of a call that no cuda room serves."""
    if kind in ("cupy", "cuda_array"):
        fix = "copy them to the CPU: no cuda room serves this"
        raise DeviceError(message(op, "arrays", "arrays on the CPU", "arrays on a GPU", fix))
    return backend_of(op, "cpu", backend)
