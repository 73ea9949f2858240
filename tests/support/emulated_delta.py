"""Drives the sparse delta kernels under the emulator from a case's arrays, with a plan made in NumPy."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from emulated_cuda.run import Launch, several

from sdm_lite.arrays import widen_state
from sdm_lite.cpu import plan as cpu_plan
from sdm_lite.cuda_kernels import shared_memory
from sdm_lite.cuda_kernels.shared_memory import DeltaShape
from sdm_lite.rooms import DeltaGradients, DeltaInputs

ENTRY = np.dtype([("slot", "u4"), ("from_", "u2"), ("to", "u2")])
NO_PLACE = 0xFFFF
STATES = {"float32": "float", "float64": "double", "bfloat16": "bf16", "float16": "fp16"}

#: what the tests use of each file, so that it is compiled once
SERVED = {
    "sparse_delta_forward.cu": [
        "sparse_delta_forward<float, 32, false>", "sparse_delta_forward<float, 64, false>",
        "sparse_delta_forward<float, 32, true>", "sparse_delta_forward<bf16, 32, false>",
        "sparse_delta_forward<fp16, 32, true>", "sparse_delta_forward<double, 32, false>",
    ],
    "sparse_delta_backward.cu": [
        "sparse_delta_backward<float, 32, false>", "sparse_delta_backward<float, 64, false>",
        "sparse_delta_backward<float, 32, true>", "sparse_delta_backward<bf16, 32, false>",
        "sparse_delta_backward<double, 32, false>",
    ],
    "sparse_delta_gates.cu": [
        "decay_factors<float>", "decay_factors<double>", "undo_factors<float, false>", "undo_factors<float, true>",
        "undo_factors<double, false>",
    ],
    "sum_partials.cu": ["sum_partials<float, false>", "sum_partials<float, true>", "sum_partials<double, false>"],
    "decode_step.cu": ["decode_step<float, 32, true>", "decode_step<bf16, 32, false>"],
}  # fmt: skip


class HostPlan(NamedTuple):
    """The arrays of plan.cuh."""

    rows: np.ndarray
    row_count: np.ndarray
    chunk_start: np.ndarray
    chunks: np.ndarray
    place_w: np.ndarray
    place_r: np.ndarray
    row_stride: int


class Setting(NamedTuple):
    """How a call is launched; none of it may change a bit of the results."""

    tile: int = 32
    row_budget: int = 0  # 0: the least that works
    token_budget: int = 3
    build: str = "plain"
    schedule: tuple = (("schedule", "forward"),)

    def run(self, file: str, kernel: str, grid, block: int, args: list, shared_bytes: int = 0) -> None:
        """Launch one kernel, if its grid has any block."""
        if grid == 0:
            return
        serve = SERVED.get(file, ()) if self.build == "plain" else ()
        options = {"build": self.build, **dict(self.schedule)}
        several(file, [Launch(kernel, grid, block, args, shared_bytes)], serve=serve, **options)


def make_plan(inputs: DeltaInputs, lanes: cpu_plan.Lanes, row_budget: int) -> HostPlan:
    """Return the plan of a call by the definition of plan.cuh, lane by lane."""
    writes, reads = inputs.write_slots.shape[-1], inputs.read_slots.shape[-1]
    tokens = math.prod(inputs.values.shape[:3])
    write_slots = inputs.write_slots.reshape(tokens, writes)
    read_slots = inputs.read_slots.reshape(tokens, reads)
    stride = -(-(writes + reads) // 2) * 2
    plan = HostPlan(
        np.zeros((tokens, stride), ENTRY), np.zeros(tokens, np.int32), np.zeros(tokens + len(lanes.first), np.int32),
        np.zeros(len(lanes.first), np.int32), np.zeros((tokens, writes), np.uint16),
        np.zeros((tokens, reads), np.uint16), stride,
    )  # fmt: skip
    base = 0
    for lane, (first, count) in enumerate(zip(lanes.first, lanes.tokens, strict=True)):
        numbers = first + lanes.stride * np.arange(count)
        _plan_lane(plan, lane, base, write_slots[numbers], read_slots[numbers], row_budget)
        base += count
    return plan


def _plan_lane(plan, lane, base, write_slots, read_slots, row_budget) -> None:
    if not len(write_slots):
        return
    starts, begin = [0], 0
    for t in range(1, len(write_slots)):
        used = np.concatenate([write_slots[begin : t + 1].ravel(), read_slots[begin : t + 1].ravel()])
        if len(np.unique(used)) > row_budget:
            starts.append(t)
            begin = t
    edges = [*starts, len(write_slots)]
    spans = list(zip(edges[:-1], edges[1:], strict=True))
    plan.chunks[lane] = len(spans)
    rows = plan.rows.reshape(-1)
    lists = []
    for c, (start, end) in enumerate(spans):
        used = np.concatenate([write_slots[start:end].ravel(), read_slots[start:end].ravel()])
        distinct = np.unique(used)
        plan.row_count[base + c] = len(distinct)
        plan.place_w[base + start : base + end] = np.searchsorted(distinct, write_slots[start:end])
        plan.place_r[base + start : base + end] = np.searchsorted(distinct, read_slots[start:end])
        entries = rows[(base + start) * plan.row_stride :][: len(distinct)]
        written = np.isin(distinct, write_slots[start:end])
        entries["slot"] = distinct | np.where(written, np.uint32(1 << 31), 0).astype(np.uint32)
        lists.append((distinct, entries))
    plan.chunk_start[base + lane : base + lane + len(edges)] = edges
    for (before, entries_before), (after, entries_after) in zip(lists[:-1], lists[1:], strict=True):
        entries_after["from_"] = _places(after, before)
        entries_before["to"] = _places(before, after)
    lists[0][1]["from_"] = NO_PLACE
    lists[-1][1]["to"] = NO_PLACE


def _places(slots, among) -> np.ndarray:
    at = np.minimum(np.searchsorted(among, slots), len(among) - 1)
    return np.where(among[at] == slots, at, NO_PLACE)


class Emulated:
    """One call of the kernels: inputs in the canonical form, a state [S, H, N, D] in its dtype's bits."""

    def __init__(self, inputs: DeltaInputs, state_dtype: str, rule: str, setting: Setting):
        self.inputs, self.state_dtype, self.setting = inputs, state_dtype, setting
        self.per_slot = rule == "per_slot"
        batch, self.tokens, self.heads, self.width = inputs.values.shape
        self.writes, self.reads = inputs.write_slots.shape[-1], inputs.read_slots.shape[-1]
        self.decays = inputs.log_decay.shape[-1]
        self.real = np.dtype(np.float64 if state_dtype == "float64" else np.float32)
        self.lanes = cpu_plan.make_lanes(batch, self.tokens, self.heads, inputs.cu_seqlens, False)
        self.count = batch * self.tokens * self.heads
        self.is_16_bit = state_dtype in ("bfloat16", "float16")

    def grid(self) -> tuple[int, int]:
        """Return the grid of the kernels over lanes and tiles."""
        return len(self.lanes.first), -(-self.width // self.setting.tile)

    def shape(self, state_dtype: str, log_bits: int | None = None) -> DeltaShape:
        """Return what the shared memory depends on."""
        state_bytes = {"float": 4, "double": 8, "bf16": 2, "fp16": 2}[STATES[state_dtype]]
        budget = max(self.setting.row_budget, self.writes + self.reads)
        return DeltaShape(
            self.setting.tile, state_bytes, self.real.itemsize, self.writes, self.reads, self.decays, budget,
            self.setting.token_budget, log_bits,
        )  # fmt: skip

    def kernel(self, name: str, state_dtype: str | None = None) -> str:
        """Return the kernel's name in C++."""
        per_slot = str(self.per_slot).lower()
        return f"{name}<{STATES[state_dtype or self.state_dtype]}, {self.setting.tile}, {per_slot}>"

    def row_start(self, slots: int) -> np.ndarray:
        """Return where each lane's rows begin in a table [S, H, N, D]."""
        return np.arange(len(self.lanes.first), dtype=np.int64) * slots

    def alpha(self) -> np.ndarray:
        """Return exp(log_decay), as sparse_delta_gates.cu makes it."""
        alpha = np.full_like(self.inputs.log_decay, np.nan)
        c = "double" if self.real.itemsize == 8 else "float"
        if alpha.size:
            self.setting.run(
                "sparse_delta_gates.cu",
                f"decay_factors<{c}>",
                -(-alpha.size // 256),
                256,
                [self.inputs.log_decay, alpha, np.int64(alpha.size)],
            )
        return alpha

    def plan_args(self, slots_plan: HostPlan, shape: DeltaShape) -> list:
        """Return the plan's arguments of a launch."""
        return [
            *slots_plan[:6], np.int32(slots_plan.row_stride), np.int32(shape.row_budget), np.int32(shape.token_budget),
        ]  # fmt: skip

    def sizes(self) -> list:
        """Return the last arguments of every kernel over tokens."""
        return [np.int32(n) for n in (self.heads, self.tokens, self.width, self.writes, self.reads, self.decays)]

    def forward(self, table: np.ndarray, *, log: Log | None = None, error: np.ndarray | None = None) -> np.ndarray:
        """Run the staged kernel in place on `table`, a state's bits; return the readings."""
        x, readings = self.inputs, np.full_like(self.inputs.values, np.nan)
        if 0 in self.grid() or not self.tokens:
            return readings
        shape = self.shape(self.state_dtype, None if log is None else log.bits)
        plan = make_plan(x, self.lanes, shape.row_budget)
        args = [
            table, self.row_start(table.shape[-2]), x.values, x.write_weights, self.alpha(), x.beta, x.read_weights,
            readings, error, *_log_args(log), *self.plan_args(plan, shape), x.cu_seqlens, *self.sizes(),
        ]  # fmt: skip
        name = self.kernel("sparse_delta_forward")
        self.setting.run(
            "sparse_delta_forward.cu",
            name,
            self.grid(),
            4 * self.setting.tile,
            args,
            shared_memory.forward_bytes(shape),
        )
        return readings

    def decode(self, table: np.ndarray) -> np.ndarray:
        """Run the kernel without staging in place on `table`; return the readings."""
        x, readings = self.inputs, np.full_like(self.inputs.values, np.nan)
        args = [
            table, self.row_start(table.shape[-2]), x.values, x.write_slots, x.write_weights, x.log_decay, x.beta,
            x.read_slots, x.read_weights, readings, x.cu_seqlens, *self.sizes(),
        ]  # fmt: skip
        shared = shared_memory.decode_bytes(self.shape(self.state_dtype))
        self.setting.run("decode_step.cu", self.kernel("decode_step"), self.grid(), 4 * self.setting.tile, args, shared)
        return readings

    def backward(self, table, grad, log: Log | None, error, dreadings, table_dtype: str) -> tuple[np.ndarray, ...]:
        """Run the backward in place on `table` (bits of `table_dtype`) and `grad`; return its gradients."""
        x, real = self.inputs, self.real
        c = "double" if real.itemsize == 8 else "float"
        dvalues, blocks = np.full_like(x.values, np.nan), -(-self.width // shared_memory.SCALED_COLUMNS)
        dk, ddecay, dq = (
            np.full((blocks, self.count, n), np.nan, real) for n in (self.writes, self.writes, self.reads)
        )
        dbeta = np.full((blocks, self.count), np.nan, real)
        alpha = self.alpha()
        per_slot = str(self.per_slot).lower()
        inverse = np.full_like(x.write_weights if self.per_slot else alpha, np.nan)
        undo = [
            alpha,
            x.beta,
            x.write_weights,
            inverse,
            np.int64(inverse.size),
            np.int32(self.writes),
            np.int32(self.decays),
        ]
        self.setting.run("sparse_delta_gates.cu", f"undo_factors<{c}, {per_slot}>", -(-inverse.size // 256), 256, undo)

        shape = self.shape(table_dtype, None if log is None else log.bits)
        plan = make_plan(x, self.lanes, shape.row_budget)
        args = [
            table, grad, self.row_start(table.shape[-2]), x.values if self.per_slot else error, dreadings,
            x.write_weights, alpha, inverse, x.beta, x.read_weights, dvalues, dk, ddecay, dbeta, dq, *_log_args(log),
            *self.plan_args(plan, shape), x.cu_seqlens, np.int64(self.count), *self.sizes(),
        ]  # fmt: skip
        shared = shared_memory.backward_bytes(shape, per_slot=self.per_slot)
        self.setting.run(
            "sparse_delta_backward.cu",
            self.kernel("sparse_delta_backward", table_dtype),
            self.grid(),
            4 * self.setting.tile,
            args,
            shared,
        )

        like = (x.write_weights, x.log_decay, x.beta, x.read_weights)
        sums = [np.full_like(a, np.nan) for a in like]
        args = [
            dk, ddecay, None if self.per_slot else dbeta, dq, x.beta, x.write_weights, *sums, np.int64(self.count),
            *(np.int32(n) for n in (blocks, self.writes, self.reads, self.decays)),
        ]  # fmt: skip
        self.setting.run("sum_partials.cu", f"sum_partials<{c}, {per_slot}>", -(-self.count // 4), 128, args)
        return (dvalues, *sums)


class Log(NamedTuple):
    """A log of overwritten rows (delta_log.cuh), as codes."""

    place: np.ndarray  # int32 [B, T, H, W]
    codes: np.ndarray  # uint8 [logged, pitch]
    scales: np.ndarray  # float32 [logged, ceil(D / 32)]
    storage: int
    bits: int


def make_log(place: np.ndarray, rows: int, width: int, storage: str | None, state_bytes: int) -> Log:
    """Return an empty log for a plan of it."""
    number, bits = shared_memory.LOG_STORAGE[storage]
    bits = bits or 8 * state_bytes
    codes = np.full((max(rows, 1), shared_memory.log_pitch(width, bits)), 0xFF, np.uint8)
    return Log(place, codes, np.full((max(rows, 1), shared_memory.log_scales(width)), np.nan, np.float32), number, bits)


def _log_args(log: Log | None) -> list:
    if log is None:
        return [None, None, None, np.int32(0)]
    return [log.place, log.codes, log.scales, np.int32(log.storage)]


def forward_backward(case, state_dtype="float32", rule="shared", restore="hybrid", storage=None, setting=None):
    """Return (readings, final state's bits, gradients) of a case, whose state is [S, H, N, D]."""
    call, state = Emulated(case.inputs, state_dtype, rule, setting or Setting()), case.state_bits(state_dtype).copy()
    place, rows = log_places(call, state.shape[-2], restore)
    table_dtype = state_dtype
    if call.is_16_bit and restore == "invert":  # inverted rows are no 16-bit numbers
        table_dtype, storage = "float32", {"bfloat16": "bf16", "float16": "fp16"}[state_dtype]
    log = make_log(place, rows, call.width, storage, state.itemsize) if rows else None
    error = None if call.per_slot else np.full_like(case.inputs.values, np.nan)
    readings = call.forward(state, log=log, error=error)
    table = state.copy() if table_dtype == state_dtype else widen_state(state, state_dtype)
    grad = case.dfinal.copy()
    gradients = call.backward(table, grad, log, error, case.dreadings, table_dtype)
    return readings, state, DeltaGradients(*gradients, grad)


def log_places(call: Emulated, num_slots: int, restore: str) -> tuple[np.ndarray, int]:
    """Return (log_place, rows logged) of a restore mode, as the CPU room plans it."""
    x = call.inputs
    tau = {"hybrid": math.log(10), "invert": math.inf, "snapshot": cpu_plan.LOG_ALL}[restore]
    if restore == "hybrid" and call.is_16_bit:
        tau = cpu_plan.LOG_ALL
    compact = cpu_plan.compact(x.write_slots, x.read_slots, call.lanes, num_slots)
    return cpu_plan.plan_log(
        compact.write_places, x.write_weights, x.log_decay, x.beta, call.lanes, compact.row_start, call.per_slot, tau
    )
