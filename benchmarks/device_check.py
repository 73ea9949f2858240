"""On a machine with a GPU: are the kernels right, and how fast against what the memory allows? At most four minutes.

    python -m benchmarks.device_check --out device_check      # writes device_check.json and device_check.md

First parity (cuda against the reference and cpu rooms); on a difference nothing is timed. Then the bandwidth of a copy
and of random 64-byte rows; then forward, backward in each restore mode, decode, addressing, embedding bags and a
layer's training step, each beside its floor: the bytes of roofline.py over the measured bandwidth of random rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sdm_lite import cpu, cuda_kernels, reference
from sdm_lite.cuda_kernels import devices, launch
from sdm_lite.rooms import DeltaInputs, DeltaOptions, backends

from . import roofline
from .shapes import Shape, make_inputs

#: the same bounds as the tests' table for float32: order of sums, and exp(tau) = 10 times that where rows are inverted
PARITY = {"forward": 4e-6, "snapshot": 3e-6, "hybrid": 1e-5}
#: seconds after which nothing further is started; the rest of four minutes is for compiling and for what runs then
LIMIT_S = 180.0
ROUNDS = 7
#: small shapes for parity: odd sizes, several chunks
PARITY_SHAPES = (
    Shape("parity", B=2, T=40, H=2, N=96, D=72, W=6, R=5),
    Shape("one token", B=3, T=1, H=2, N=40, D=33, W=4, R=4),
)


class Check:
    """The running check: its device, its clock, and what it has found."""

    def __init__(self, limit_s: float = LIMIT_S, rounds: int = ROUNDS):
        self.cupy = devices.cupy()
        self.rounds, self.deadline = rounds, time.monotonic() + limit_s
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[str] = []

    def upload(self, x: Any) -> Any:
        """Return a host array on the device."""
        return None if x is None else self.cupy.asarray(x)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the median seconds of a call between two events of the stream; one call before them is not counted."""
        call()
        found = []
        for _ in range(self.rounds):
            start, stop = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            start.record()
            call()
            stop.record()
            stop.synchronize()
            found.append(self.cupy.cuda.get_elapsed_time(start, stop) / 1e3)
        return statistics.median(found)

    def time(self, name: str, shape: str, size: int, call: Callable[[], object], rate: float | None = None) -> float:
        """Time a call that moves `size` bytes, unless the time is up; return its bytes per second, 0 if skipped.

        `rate` is the bytes per second of its floor.
        """
        if time.monotonic() > self.deadline:
            self.skipped.append(f"{name} ({shape}): the time was up")
            return 0.0
        try:
            seconds = self.seconds(call)
        except MemoryError as error:
            self.skipped.append(f"{name} ({shape}): {error}")
            return 0.0
        floor = size / rate if rate else None
        self.rows.append({"name": name, "shape": shape, "seconds": seconds, "bytes": size, "floor": floor})
        return size / seconds if seconds > 0 else 0.0


def parity(check: Check) -> list[str]:
    """Return what differs between the cuda room and the reference (float64) and cpu rooms, empty where nothing does."""
    wrong = []
    for shape in PARITY_SHAPES:
        x = make_inputs(shape, decay="uniform")
        inputs = DeltaInputs(*x.call[:3], x.log_decay[..., None], *x.call[4:])
        wide = DeltaInputs(*(a if a.dtype == np.int32 else a.astype(np.float64) for a in inputs[:7]))
        exact = _in_room(
            reference, wide, x.state.astype(np.float64), x.dreadings.astype(np.float64), "float64", "snapshot"
        )
        for restore in ("snapshot", "hybrid"):
            on_device = DeltaInputs(*(check.upload(a) for a in inputs))
            state, dreadings = check.upload(x.state), check.upload(x.dreadings)
            got = [a.get() for a in _in_room(cuda_kernels, on_device, state, dreadings, "float32", restore)]
            own = _in_room(cpu, inputs, x.state, x.dreadings, "float32", restore)
            for i, (a, b, c) in enumerate(zip(got, own, exact)):
                bound = PARITY["forward" if i < 2 else restore]
                name = ("readings", "final state", *(f"d{f}" for f in _GRADIENTS))[i]
                for room, other, allowed in (("reference", c, bound), ("cpu", b, 2 * bound)):
                    error = float(np.abs(a - other).max() / max(np.abs(other).max(), 1e-30))
                    if not error <= allowed:
                        wrong.append(f"{shape.name}, {restore}: {name} off by {error:.1e} from {room}")
    scores = np.round(4 * np.random.default_rng(0).standard_normal((64, 48))).astype(np.float32) / 4
    got = cuda_kernels.product_key_topk_forward(check.upload(scores), (24, 24), 16)
    for name, a, b in zip(("values", "slots"), got, cpu.product_key_topk_forward(scores, (24, 24), 16)):
        if not np.array_equal(a.get(), b):
            wrong.append(f"product_key_topk: {name} differ")
    return wrong + _bag_parity(check)


def _bag_parity(check: Check) -> list[str]:
    """Return which of embedding_bag's results have other bits than in the cpu room."""
    rng = np.random.default_rng(0)
    values, dreadings = (rng.standard_normal((n, 130), np.float32) for n in (40, 64))
    slots = np.where(rng.random((64, 5)) < 0.3, 0, rng.integers(0, 40, (64, 5))).astype(np.int32)
    weights = rng.standard_normal((64, 5), np.float32)

    def results(room: Any, up: Callable[[Any], Any]) -> dict[str, Any]:
        v, s, w, dy = (up(x) for x in (values, slots, weights, dreadings))
        return {
            "readings": room.embedding_bag_forward(v, s, w),
            "dvalues": room.embedding_bag_backward(dy, s, w, len(values)),
            "dweights": room.embedding_bag_weights_backward(dy, v, s),
        }

    got, want = results(cuda_kernels, check.upload), results(cpu, np.asarray)
    return [f"embedding_bag: {name} differ" for name in want if not np.array_equal(got[name].get(), want[name])]


_GRADIENTS = ("values", "write_weights", "log_decay", "beta", "read_weights", "initial_state")


def _in_room(room: Any, inputs: DeltaInputs, state: Any, dreadings: Any, dtype: str, restore: str) -> list[Any]:
    """Return readings, final state and the gradients, of one room."""
    options = DeltaOptions(restore=restore, state_dtype=dtype)
    readings, final, saved = room.sparse_delta_forward(inputs, state, options, save=True, final=True)
    return [readings, final, *room.sparse_delta_backward(inputs, options, saved, dreadings, None, state.shape)]


def bandwidth(check: Check, slots: int, row_bytes: int = 64) -> float:
    """Measure a copy and random rows (a fresh draw, distinct); return the lower of gather's and scatter's bytes/s."""
    table = check.cupy.zeros((slots * row_bytes,), np.uint8)
    rows = check.cupy.zeros((slots * row_bytes,), np.uint8)
    index = check.upload(np.random.default_rng(0).permutation(slots).astype(np.int32))
    check.time("copy", f"{table.nbytes:,} bytes", 2 * table.nbytes, lambda: rows.__setitem__(slice(None), table))
    pieces = slots * row_bytes // 16
    arguments = (table, rows, index, np.int64(pieces), np.int32(row_bytes // 16))
    found = []
    for name, scatter in (("gather of random rows", "false"), ("scatter of random rows", "true")):

        def move(scatter: str = scatter) -> None:
            launch.launch("row_bandwidth.cu", f"move_rows<{scatter}>", launch.over(pieces, 256), 256, arguments)

        found.append(check.time(name, f"{slots:,} of {row_bytes} bytes", slots * (2 * row_bytes + 4), move))
    return min(found)


def delta(check: Check, shape: Shape, rate: float) -> None:
    """Time forward, backward in each restore mode, decode, and forward with backward of one shape, bf16 state."""
    x = make_inputs(Shape(shape.name, shape.B, shape.T, shape.H, max(shape.W, shape.R), 1, shape.W, shape.R))
    rng = np.random.default_rng(1)
    slots = [_slots(rng, shape, count) for count in (shape.W, shape.R)]
    token = (shape.B, shape.T, shape.H)
    values = check.upload(rng.standard_normal((*token, shape.D), np.float32))
    weights = (check.upload(x.write_weights), check.upload(x.log_decay[..., None]), check.upload(x.beta))
    inputs = DeltaInputs(values, check.upload(slots[0]), *weights, check.upload(slots[1]), check.upload(x.read_weights))
    state = check.cupy.zeros((shape.B, shape.H, shape.N, shape.D), np.uint16)
    dreadings = check.upload(rng.standard_normal((*token, shape.D), np.float32))

    plain = DeltaOptions(state_dtype="bfloat16")
    one = DeltaInputs(*(None if a is None else check.cupy.ascontiguousarray(a[:, :1]) for a in inputs))
    for name, call, tokens in (("forward in place", inputs, shape.T), ("decode, one token", one, 1)):
        size = roofline.row_bytes(shape, "forward", 2, logged=0) // shape.T * tokens

        def update(call: DeltaInputs = call) -> None:
            cuda_kernels.sparse_delta_update(call, state, plain)

        check.time(name, shape.name, size, update, rate)
    for restore in ("snapshot", "hybrid", "invert"):
        options, logged = DeltaOptions(restore=restore, state_dtype="bfloat16"), float(restore != "invert")
        both = sum(roofline.row_bytes(shape, d, 2, logged=logged) for d in ("forward", "backward"))

        def step(options: DeltaOptions = options) -> None:
            saved = cuda_kernels.sparse_delta_forward(inputs, state, options, save=True)[2]
            cuda_kernels.sparse_delta_backward(inputs, options, saved, dreadings, None, state.shape)

        check.time(f"forward and backward, {restore}", shape.name, both, step, rate)
        try:
            saved = cuda_kernels.sparse_delta_forward(inputs, state, options, save=True)[2]
        except MemoryError as error:
            check.skipped.append(f"backward, {restore} ({shape.name}): {error}")
            continue
        size = roofline.row_bytes(shape, "backward", 2, logged=logged)

        def back(options: DeltaOptions = options, saved: Any = saved) -> None:
            cuda_kernels.sparse_delta_backward(inputs, options, saved, dreadings, None, state.shape)

        check.time(f"backward, {restore}", shape.name, size, back, rate)
        del saved


def _slots(rng: np.random.Generator, shape: Shape, count: int) -> np.ndarray:
    """Return uniform distinct ascending slots: one draw in each of `count` equal parts of the table (fast at any N)."""
    part = shape.N // count
    offsets = rng.integers(0, part, (shape.B, shape.T, shape.H, count))
    return (offsets + part * np.arange(count)).astype(np.int32)


def addressing(check: Check, shape: Shape) -> None:
    """Time the selection of W slots of N, and its gradient; their floor is that the scores are read once."""
    columns = int(shape.N**0.5)
    rows = shape.B * shape.T * shape.H
    scores = check.upload(np.random.default_rng(2).standard_normal((rows, 2 * columns), np.float32))
    size = scores.nbytes + 8 * rows * shape.W
    widths = (columns, columns)
    check.time("addressing", shape.name, size, lambda: cuda_kernels.product_key_topk_forward(scores, widths, shape.W))
    values, slots = cuda_kernels.product_key_topk_forward(scores, widths, shape.W)
    back = lambda: cuda_kernels.product_key_topk_backward(values, slots, widths)  # noqa: E731
    check.time("addressing, gradient", shape.name, size, back)


def bag(check: Check, shape: Shape, rate: float) -> None:
    """Time an embedding bag of W rows a token of a float32 table, and its gradients; no state, and no heads."""
    tokens = shape.B * shape.T
    rng = np.random.default_rng(3)
    one_head = Shape(shape.name, shape.B, shape.T, 1, shape.N, shape.D, shape.W, shape.R)
    slots = check.upload(_slots(rng, one_head, shape.W).reshape(tokens, shape.W))
    weights = check.upload(rng.standard_normal((tokens, shape.W), np.float32))
    dreadings = check.upload(rng.standard_normal((tokens, shape.D), np.float32))
    values = check.cupy.zeros((shape.N, shape.D), np.float32)
    for part, call in (
        ("forward", lambda: cuda_kernels.embedding_bag_forward(values, slots, weights)),
        ("gradient of the table", lambda: cuda_kernels.embedding_bag_backward(dreadings, slots, weights, shape.N)),
        ("gradient of the weights", lambda: cuda_kernels.embedding_bag_weights_backward(dreadings, values, slots)),
    ):
        size = roofline.bag_bytes(tokens, shape.W, shape.D, shape.N, part)
        check.time(f"embedding bag, {part}", shape.name, size, call, rate)


def layer(check: Check, shape: Shape, rate: float) -> None:
    """Time a training step of the torch layer: forward, backward, projections and addressing included."""
    name = "layer, forward and backward"
    if importlib.util.find_spec("torch") is None:
        check.skipped.append(f"{name} ({shape.name}): torch is not installed")
        return
    import torch

    if not torch.cuda.is_available():
        check.skipped.append(f"{name} ({shape.name}): this torch has no CUDA")
        return
    from sdm_lite.nn import SparseDeltaMemory

    sizes = {"slots_per_head": shape.N, "num_heads": shape.H, "num_writes": shape.W, "num_reads": shape.R}
    module = SparseDeltaMemory(shape.H * shape.D, **sizes).cuda()
    x = torch.randn(shape.B, shape.T, shape.H * shape.D, device="cuda", requires_grad=True)
    size = sum(roofline.row_bytes(shape, d, 4, logged=0) for d in ("forward", "backward"))

    def step() -> None:
        with torch.cuda.stream(torch.cuda.default_stream()):
            module(x)[0].sum().backward()
        x.grad = None

    check.time(name, shape.name, size, step, rate)


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a Markdown table; floors are bytes over the measured bandwidth of random rows."""
    lines = [
        f"{report['device']}, {report['versions']}\n\n",
        "| what | shape | ms | floor ms | times the floor | GB/s |\n|---|---|--:|--:|--:|--:|\n",
    ]
    for row in report["rows"]:
        floor, seconds = row["floor"], row["seconds"]
        cells = ["", ""] if floor is None else [f"{1e3 * floor:.3f}", f"{seconds / floor:.2f}"]
        rate = f"{row['bytes'] / seconds / 1e9:.0f}" if seconds > 0 else ""
        lines.append(f"| {row['name']} | {row['shape']} | {1e3 * seconds:.3f} | {' | '.join(cells)} | {rate} |\n")
    lines += [f"\nNot run: {text}\n" for text in report["skipped"]]
    return "".join(lines)


def run(out: pathlib.Path, shapes: tuple[Shape, ...] = roofline.SHAPES, row_slots: int = 2**24, **options: Any) -> int:
    """Run everything and write the two files; return 0, or 1 where parity failed or there is no GPU."""
    state = backends()["cuda"]
    if state != "ready":
        print(f"the cuda room is not ready: {state}", file=sys.stderr)
        return 1
    check = Check(**options)
    wrong = parity(check)
    if not wrong:
        rate = bandwidth(check, row_slots)
        for shape in shapes:
            delta(check, shape, rate)
            addressing(check, shape)
            bag(check, shape, rate)
            layer(check, shape, rate)
    limits = devices.limits_of(check.cupy.cuda.Device().id)
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("cupy", "numpy", "torch")}
    report = {
        "device": limits.name, "limits": limits._asdict(), "versions": versions, "parity": wrong or "agrees",
        "rows": check.rows, "skipped": check.skipped,
    }  # fmt: skip
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    text = "\n".join(f"WRONG {line}" for line in wrong) + "\n" if wrong else markdown(report)
    out.with_suffix(".md").write_text(text)
    print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("device_check"))
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="start nothing after this long")
    arguments = parser.parse_args()
    sys.exit(run(arguments.out, limit_s=arguments.seconds))
