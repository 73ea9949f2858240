"""The log of overwritten rows (spec section 6): which are kept, how they are stored, and how many bytes that takes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..errors import BackendError, ValueRangeError, message
from ..rooms import DeltaOptions
from . import launch, shared_memory
from .call import Call
from .devices import check_numba, cupy

_NATIVE = {"bf16": "bf16", "fp16": "fp16", "float": None, "double": None}  # names in LOG_STORAGE of what is exact
_SCALED = ("fp8", "int4")


class Log(NamedTuple):
    """Arrays of a log as delta_log.cuh has them; `place` is empty where nothing is logged."""

    place: Any  # int32 [n, W]
    rows: Any  # uint8
    scales: Any  # float32
    storage: int
    bits: int  # per column
    is_complete: bool  # every overwritten row is in it

    @property
    def is_empty(self) -> bool:
        """Whether no row is kept at all."""
        return not self.place.size

    @classmethod
    def restored(cls, call: Call, options: DeltaOptions, rows: Any, scales: Any, place: Any) -> Log:
        """Return the log of a forward from the flat arrays that it saved."""
        storage, bits = _storage(call, options)
        return cls(place.view(np.int32), rows, scales.view(np.float32), storage, bits, keeps_all(options))


def keeps_all(options: DeltaOptions) -> bool:
    """Return whether every overwritten row is logged.

    An inverted 16-bit row would be off by that dtype's rounding, so "hybrid" logs every row of a 16-bit state.
    """
    exact = options.state_dtype in ("float32", "float64")
    return options.restore == "snapshot" or (options.restore == "hybrid" and not exact)


def _storage(call: Call, options: DeltaOptions) -> tuple[int, int]:
    """Return the number of the storage in delta_log.cuh and its bits per column."""
    number, bits = shared_memory.LOG_STORAGE[options.snapshot_dtype or _NATIVE[call.state]]
    return number, 8 * call.dtype.itemsize if bits is None else bits


def open_log(call: Call, options: DeltaOptions, fix: str) -> Log:
    """Return an empty log of the right size for a forward; `fix` is what to do where memory does not suffice.

    A partial log has a size that depends on the decays: the host waits for it once, since the bound that needs no
    waiting is the size of a snapshot, which is what a partial log is there to save. A complete one waits for nothing.
    """
    storage, bits = _storage(call, options)
    writes = call.total * call.writes
    if writes >= 2**31:
        expected, got = "fewer than 2^31 writes B T H W in one call with gradients", str(writes)
        raise ValueRangeError(message("the cuda room", "write_slots", expected, got, "split the batch or the sequence"))
    if keeps_all(options):
        place, logged = cupy().arange(writes, dtype=np.int32), writes
    else:
        if launch.is_capturing():
            expected, got = "a log whose size is known, while capturing a graph", f"restore={options.restore!r}"
            raise BackendError(message("the cuda room", "restore", expected, got, 'pass restore="snapshot"'))
        place, logged = _planned(call, options)
        if not logged:
            place = cupy().empty((0,), np.int32)
    pitch = shared_memory.log_pitch(call.width, bits)
    rows = launch.empty((logged * pitch,), np.uint8, "the log of overwritten rows", fix)
    scaled = options.snapshot_dtype in _SCALED
    per_row = shared_memory.log_scales(call.width) if scaled else 0
    scales = launch.empty((logged * per_row,), np.float32, "the scales of the log", fix)
    return Log(place, rows, scales, storage, bits, keeps_all(options))


def _planned(call: Call, options: DeltaOptions) -> tuple[Any, int]:
    """Return the number in the log of each write, -1 where its row is inverted, and how many are logged."""
    check_numba(f"sparse_delta_rule with restore={options.restore!r}")
    from . import log_plan_numba, stream_numba

    x = call.inputs
    tau = math.inf if options.restore == "invert" else options.restore_tau
    return log_plan_numba.plan_log(
        cupy(), x.write_slots, x.write_weights, x.log_decay, x.beta, call.cu_seqlens, num_slots=call.slots,
        per_slot=call.per_slot, tau=tau, stream=stream_numba.current_stream(), to_numba=stream_numba.device_array,
    )  # fmt: skip
