"""One sparse delta call as the launches see it: sizes, names of types, offsets of packed sequences, and its plan."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..errors import ValueRangeError, message
from ..rooms import DeltaInputs, DeltaOptions
from . import launch
from .devices import cupy

#: the C++ names of the state dtypes
STATES = {"float32": "float", "float64": "double", "bfloat16": "bf16", "float16": "fp16"}
_PLAN_THREADS = 256
PLAN_ROWS = f"plan_rows<{_PLAN_THREADS}>"
_PLAN_SHARED = 48 << 10  # what every device gives a block without being asked
_FIX = "split the sequence"


class Call(NamedTuple):
    """Sizes as in docs/spec.md; `total` is B T H, `lanes` sequences times heads."""

    inputs: DeltaInputs
    state: str  # C++ name of the state dtype
    real: str  # and of the compute dtype
    per_slot: bool
    slots: int
    lanes: int
    heads: int
    tokens: int
    total: int
    width: int
    writes: int
    reads: int
    decays: int
    cu_seqlens: Any  # int64 on the device, within [0, T] and not decreasing, or None
    row_start: Any  # int64 [L] on the device: where each lane's rows begin in the table

    @property
    def rows_per_token(self) -> int:
        """Rows that one token uses at most."""
        return self.writes + self.reads

    @property
    def dtype(self) -> np.dtype:
        """The compute dtype."""
        return self.inputs.values.dtype

    def numbers(self, *names: str) -> tuple[np.int32, ...]:
        """Return sizes as the int32 scalars that kernels take."""
        return tuple(np.int32(getattr(self, name)) for name in names)

    def empty(self, shape: tuple[int, ...], what: str, fix: str = _FIX) -> Any:
        """Return an uninitialised array of the compute dtype."""
        return launch.empty(shape, self.dtype, what, fix)


def open_call(inputs: DeltaInputs, options: DeltaOptions, slots: int) -> Call:
    """Return the call, or raise ValueRangeError where a size is beyond what the kernels count with."""
    batch, tokens, heads, width = inputs.values.shape
    writes, reads = inputs.write_slots.shape[-1], inputs.read_slots.shape[-1]
    sequences = batch if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    if tokens >= 2**31:
        raise ValueRangeError(message("the cuda room", "values", "fewer than 2^31 tokens", str(tokens), _FIX))
    if not writes + reads:
        raise ValueRangeError(message("the cuda room", "write_slots", "a write or a read", "none", "use the cpu room"))
    return Call(
        inputs,
        STATES[options.state_dtype],
        "double" if options.state_dtype == "float64" else "float",
        options.rule == "per_slot",
        slots,
        sequences * heads,
        heads,
        tokens,
        batch * tokens * heads,
        width,
        writes,
        reads,
        inputs.log_decay.shape[-1],
        _offsets(inputs.cu_seqlens, tokens),
        cupy().arange(sequences * heads, dtype=np.int64) * np.int64(slots),
    )


def _offsets(cu_seqlens: Any, tokens: int) -> Any:
    """Return offsets that stay within the arrays whatever they are: without a check nobody has looked at them."""
    if cu_seqlens is None:
        return None
    safe = launch.empty(cu_seqlens.shape, np.int64, "cu_seqlens", _FIX)
    sizes = (np.int32(cu_seqlens.shape[0]), np.int64(tokens))
    launch.launch("check_values.cu", "safe_offsets", (1,), 32, (cu_seqlens, *sizes, safe))
    return safe


class Plan(NamedTuple):
    """The arrays of plan.cuh in the order of the kernels' parameters."""

    rows: Any
    row_count: Any
    chunk_start: Any
    chunks: Any
    place_w: Any
    place_r: Any
    row_stride: np.int32


def make_plan(call: Call, row_budget: int) -> Plan:
    """Return the plan of a call, made on the device; nothing waits for it."""
    stride = -(-call.rows_per_token // 2) * 2
    window = plan_window(call.rows_per_token, call.tokens)
    windows = -(-call.tokens // window)

    def array(shape: tuple[int, ...], dtype: Any) -> Any:
        return launch.empty(shape, dtype, "the plan of a call", _FIX)

    rows, rows_from = array((call.total * stride,), np.uint64), array((call.total,), np.int32)
    row_count, chunk_start = array((call.total,), np.int32), array((call.total + call.lanes,), np.int32)
    chunks = array((call.lanes,), np.int32)
    place_w = array((call.total, call.writes), np.uint16)
    place_r = array((call.total, call.reads), np.uint16)
    cu, windowed = call.cu_seqlens, (np.int32(window), np.int32(windows))
    sizes = call.numbers("tokens", "heads")
    launch.launch(
        "plan.cu", PLAN_ROWS, (call.lanes * windows,), _PLAN_THREADS,
        (call.inputs.write_slots, call.inputs.read_slots, cu, *sizes, *call.numbers("writes", "reads"), *windowed,
         np.int32(row_budget), np.int32(stride), rows, rows_from, place_w, place_r),
        plan_shared_bytes(call.rows_per_token, window),
    )  # fmt: skip
    lane_arguments = (rows_from, cu, *sizes, row_count, chunk_start, chunks)
    launch.launch("plan.cu", f"plan_chunks<{_PLAN_THREADS}>", (call.lanes,), _PLAN_THREADS, lane_arguments)
    launch.launch(
        "plan.cu", f"plan_links<{_PLAN_THREADS}>", (call.lanes * windows,), _PLAN_THREADS,
        (rows, row_count, chunk_start, chunks, cu, *sizes, *windowed, np.int32(stride)),
    )  # fmt: skip
    return Plan(rows, row_count, chunk_start, chunks, place_w, place_r, np.int32(stride))


def plan_window(rows_per_token: int, tokens: int) -> int:
    """Return how many tokens a block of plan_rows takes: a power of two, as many as its shared memory holds."""
    window = 1
    while window < min(tokens, 64) and plan_shared_bytes(rows_per_token, 2 * window) <= _PLAN_SHARED:
        window *= 2
    return window


def plan_shared_bytes(rows_per_token: int, window: int) -> int:
    """Return the shared bytes of plan_rows, by the formula of plan.cu."""
    uses = 1 << (window * rows_per_token - 1).bit_length()
    return 8 * uses + -(-4 * uses // 16) * 16 + 3 * (-(-4 * window // 16) * 16)


def rows_of(shape: tuple[int, ...]) -> int:
    """Return the product of all axes but the last."""
    return math.prod(shape[:-1])
