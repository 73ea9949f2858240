"""What the CUDA kernels should take, on paper: `python -m benchmarks.roofline`. An estimate; nothing here was measured.

For a device's published figures and a shape: bytes moved, operations, and the time of each of a kernel's resources.
The longest is the floor; the estimate adds a share of the others, since no overlap is perfect.

    memory    rows in and out, values, readings, at a share of the bandwidth (64-byte pieces of random rows)
    shared    bytes through a multiprocessor's 128 bytes a clock: rows staged, read, written, sums of groups
    issue     instructions of a token's loop, four schedulers
    latency   a token's chain: two barriers, three dependent passes over rows in shared memory
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from sdm_lite.cuda_kernels import devices, shared_memory, tiling
from sdm_lite.cuda_kernels.shared_memory import DeltaShape

from .shapes import Shape

#: bandwidth in bytes/s, clock in 1/s: published figures
FIGURES = {
    "A100": (2.04e12, 1.41e9),
    "H100": (3.35e12, 1.98e9),
    "H200": (4.8e12, 1.98e9),
    "B200": (8.0e12, 1.96e9),
    "RTX 4090": (1.01e12, 2.52e9),
    "RTX 5090": (1.79e12, 2.41e9),
}
#: assumed; the first is the weakest and is what benchmarks/device_check.py measures first
RANDOM_ROWS = 0.8  # of the bandwidth, for 64-byte pieces
SHARED_BYTES_PER_CLOCK = 128
BARRIER, SHARED_LATENCY, SHUFFLE, ARITHMETIC = 40, 33, 25, 4.5  # clocks
INSTRUCTIONS_PER_ROW, INSTRUCTIONS_PER_TOKEN = 14, 60  # of a warp; a row is used by an eighth of the warps' threads
HIDDEN = 0.65  # of all but the longest resource

#: the two tables of docs/kernels.md
SHAPES = (
    Shape("D = 2048", B=2, T=8192, H=1, N=262_144, D=2048),
    Shape("D = 768", B=2, T=8192, H=1, N=36_864, D=768),
)
STATE_BYTES = {"bf16": 2, "float": 4}


class Resources(NamedTuple):
    """Seconds of each resource, alone."""

    memory: float
    shared: float
    issue: float
    latency: float


@dataclass(frozen=True)
class Estimate:
    """What one kernel should take on one device."""

    device: str
    shape: Shape
    direction: str
    cut: tiling.Tiling
    row_bytes: int
    operations: int
    resources: Resources

    @property
    def floor(self) -> float:
        """Seconds that no schedule gets below: the longest resource."""
        return max(self.resources)

    @property
    def seconds(self) -> float:
        """The estimate."""
        return self.floor + (1 - HIDDEN) * (sum(self.resources) - self.floor)


def row_bytes(shape: Shape, direction: str, state_bytes: int, *, logged: float = 1.0) -> int:
    """Bytes of rows, values and readings, without what neighbouring tokens share (uniform slots share hardly any).

    Forward: rows (W + R) in, W out, and the share `logged` of W into the log. Backward: rows of M and float32 rows of
    G, (W + R) in and out, and the log in.
    """
    tokens, log = shape.lanes * shape.T, logged * shape.W * state_bytes
    if direction == "forward":
        return int(tokens * shape.D * ((2 * shape.W + shape.R) * state_bytes + log + 3 * 4))
    return int(tokens * shape.D * (2 * (shape.W + shape.R) * (state_bytes + 4) + log + 4 * 4))


def bag_bytes(tokens: int, bag: int, width: int, slots: int, part: str) -> int:
    """Bytes of an embedding bag's float32 rows, one of `width` a read; and what else a part reads or writes once.

    The readings (forward) or their gradient (of the weights) are a row a token; the gradient of the table is zeroed and
    written, its reads come from the upstream gradient, and slots, order and weights are 16 bytes a read.
    """
    reads = 4 * tokens * bag * width
    if part == "gradient of the table":
        return reads + 2 * 4 * slots * width + 16 * tokens * bag
    return reads + 4 * tokens * width + 8 * tokens * bag


def functional_bytes(shape: Shape, state_bytes: int, rows: int | None = None) -> int:
    """Bytes that the functional form moves beside `row_bytes`: its table, in and out, and in the backward M and G.

    Of the compact form's `rows` touched rows, or of the whole table where None: copied in the forward, copied and its
    gradient zeroed in the backward. The compact form zeroes the gradient of the state too, and scatters G's rows.
    """
    whole = shape.lanes * shape.N
    touched = whole if rows is None else rows
    moved = touched * shape.D * (4 * state_bytes + 4)
    return moved if rows is None else moved + 4 * shape.D * (whole + 2 * rows)


def operations(shape: Shape, direction: str) -> int:
    """Floating-point operations: forward 5 a written and 2 a read row and column, backward 20 and 4."""
    per_write, per_read = (5, 2) if direction == "forward" else (20, 4)
    return shape.lanes * shape.T * shape.D * (per_write * shape.W + per_read * shape.R)


def estimate(device: str, shape: Shape, direction: str, state: str, *, logged: float = 1.0) -> Estimate:
    """Return the estimate for one direction with a state of `state`, and a log of the share `logged` of its writes."""
    limits, state_bytes = devices.KNOWN[device], STATE_BYTES[state]
    bandwidth, clock = FIGURES[device]

    def size(tile: int, rows: int, tokens: int) -> int:
        sizes = (shape.W, shape.R, 1, rows, tokens, 8 * state_bytes if logged else None)
        block = DeltaShape(tile, state_bytes, 4, *sizes)
        if direction == "forward":
            return shared_memory.forward_bytes(block)
        return shared_memory.backward_bytes(block, per_slot=False)

    cut = tiling.choose(limits, shape.lanes, shape.D, shape.W + shape.R, size)
    assert cut is not None, "these shapes fit every device in FIGURES"
    blocks = shape.lanes * -(-shape.D // cut.tile)
    per_multiprocessor = -(-blocks // limits.multiprocessors)
    passes = 1 if direction == "forward" else 2  # backward: M and G, and twice the work on each
    rows = shape.W + shape.R

    staged = (rows + shape.W) * cut.tile * state_bytes
    touched = (2 * shape.W + shape.R) * cut.tile * state_bytes
    if direction == "backward":
        staged += 2 * rows * cut.tile * 4
        touched += (2 * shape.W + 2 * shape.R) * cut.tile * 4 + shape.W * cut.tile * state_bytes
    sums = 2 * cut.tile * 4 * 8 * 2
    warps = 4 * cut.tile // 32
    instructions = passes * (INSTRUCTIONS_PER_ROW * rows / 8 + INSTRUCTIONS_PER_TOKEN)
    chain = passes * (2 * BARRIER + 3 * (SHARED_LATENCY + rows / 16 * ARITHMETIC) + 2 * SHUFFLE)

    moved = row_bytes(shape, direction, state_bytes, logged=logged)
    resources = Resources(
        memory=moved / (RANDOM_ROWS * bandwidth),
        shared=per_multiprocessor * shape.T * (staged + touched + sums) / SHARED_BYTES_PER_CLOCK / clock,
        issue=per_multiprocessor * shape.T * instructions * warps / 4 / clock,
        latency=math.ceil(per_multiprocessor / tiling.resident(cut.tile)) * shape.T * chain / clock,
    )
    return Estimate(device, shape, direction, cut, moved, operations(shape, direction), resources)


def table(state: str = "bf16") -> str:
    """Return the Markdown table of both shapes on all devices."""
    lines = [
        "| shape | device | kernel | tile x rows | GB | GFLOP | memory ms | shared | issue | latency | floor |"
        " estimate |\n",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
    ]
    for shape in SHAPES:
        for device in FIGURES:
            for direction in ("forward", "backward"):
                e = estimate(device, shape, direction, state)
                milliseconds = " | ".join(f"{1e3 * s:.1f}" for s in (*e.resources, e.floor, e.seconds))
                size = f"{e.cut.tile} x {e.cut.row_budget} | {e.row_bytes / 1e9:.1f} | {e.operations / 1e9:.0f}"
                lines.append(f"| {shape.name} | {device} | {direction} | {size} | {milliseconds} |\n")
    return "".join(lines)


if __name__ == "__main__":
    print(table(), end="")
