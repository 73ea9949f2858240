"""Measures the table of docs/benchmarks.md: ours against peers that run in turn with it, medians of clean rounds.

python -m benchmarks.report                      all of it, to the screen (about eight minutes on two idle cores)
python -m benchmarks.report --write              also into docs/benchmarks.md, between its two markers
python -m benchmarks.report --shapes small --sections forward gradients --rounds 3
"""

from __future__ import annotations

import argparse
import pathlib
import platform
import subprocess
import sys
from collections.abc import Callable

import numba
import numpy as np
import torch

import sdm_lite

from . import costs, fwpkm_cases, ours, parity
from .peers import dense_gdn, row_limit, torch_loop, torch_topk
from .shapes import SHAPES, Inputs, Shape, make_inputs
from .timing import Timings, interleave

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
# ratios to reach, per shape; None is reported only
TARGETS = {
    "limit": {"small": 0.6, "medium": 0.8, "large": 0.8},
    "loop": {"small": 45, "medium": 17, "large": 5},
    "hand": {"small": 25, "medium": 14, "large": 5},
    "autograd": {"small": 80, "medium": None, "large": None},
    "snapshot": {"small": 1.4, "medium": 1.4, "large": 1.4},
    "topk": 5,
}
# tokens that a slow peer runs, at least one; its time is taken per token
HAND_TOKENS, AUTOGRAD_TOKENS = 128, {"small": 64, "medium": 8, "large": 1}

Rows = dict[str, dict[str, str]]


class Report:
    """Collects cells of tables (row by column), prints progress, and knows the rounds' cleanliness."""

    def __init__(self, rounds: int, limit_s: float):
        self.rounds, self.limit_s = rounds, limit_s
        self.foreign: list[float] = []
        self.disturbed = self.clean = 0

    def run(self, what: str, candidates: dict[str, Callable[[], object]], **options) -> Timings:
        """Interleave the candidates and note how clean the rounds were."""
        options = {"rounds": self.rounds, "limit_s": self.limit_s, **options}
        timings = interleave(candidates, **options)
        self.foreign.append(timings.foreign_cores)
        self.clean += timings.clean_rounds
        self.disturbed += timings.disturbed_rounds
        medians = ", ".join(f"{name} {1e3 * timings.median(name):.3g} ms" for name in candidates)
        print(f"{what}: {medians}  [{timings.clean_rounds} clean rounds]", file=sys.stderr, flush=True)
        return timings


def verdict(timings: Timings, slow: str, fast: str, target: float | None, scale: float = 1.0) -> str:
    """Return a cell: the ratio slow / fast, and the target it meets or misses; no verdict from disturbed rounds."""
    value = scale * timings.ratio(slow, fast)
    text = f"{value:.2f}" if value < 10 else f"{value:.0f}"
    if not timings.is_clean:
        return f"{text} (disturbed)"
    if target is None:
        return text
    return f"**{text}** (>= {target:g})" if value >= target else f"{text} (missed: >= {target:g})"


def put(rows: Rows, row: str, column: str, cell: str) -> None:
    """Set one cell."""
    rows.setdefault(row, {})[column] = cell


def forward_section(report: Report, shape: Shape, inputs: Inputs, threads: int, ratios: Rows, times: Rows) -> None:
    """Forward: in place and functional, against the row limit, the torch loop and the chunked dense form."""
    loop_inputs = torch_loop.from_inputs(inputs, shape.N)
    table = torch.from_numpy(inputs.table()).view(-1, shape.D)
    dense = torch.zeros(shape.lanes, shape.W, shape.D)
    candidates = {"in place": ours.update(inputs, inputs.table()), "functional": ours.functional(inputs)}
    candidates["functional, final state"] = ours.functional(inputs, final=True)
    mover = row_limit.row_mover(inputs, inputs.table(), threads)
    if mover is not None:
        candidates["row limit"] = mover
    candidates["torch loop"] = lambda: torch_loop.forward(table, loop_inputs)
    candidates["dense GDN, chunked"] = lambda: dense_gdn.chunked(dense, loop_inputs)
    with torch.no_grad():
        timings = report.run(f"forward, {shape.name}", candidates)

    name = shape.name
    if mover is not None:
        share = verdict(timings, "row limit", "in place", TARGETS["limit"][name])
        put(ratios, "forward in place, share of the row read-modify-write limit", name, share)
    faster = verdict(timings, "torch loop", "in place", TARGETS["loop"][name])
    put(ratios, "forward in place, times as fast as the PyTorch loop", name, faster)
    if mover is not None:
        put(
            ratios,
            "the row limit itself, times as fast as the PyTorch loop",
            name,
            verdict(timings, "torch loop", "row limit", None),
        )
    faster = verdict(timings, "torch loop", "functional", None)
    put(ratios, "forward functional, times as fast as the PyTorch loop", name, faster)
    for label in ("in place", "functional", "functional, final state"):
        put(times, f"forward, {label}", name, f"{1e6 * timings.median(label) / shape.T:.3g} us")
    copy = timings.median("functional") - timings.median("in place")
    put(times, "of which copy of the touched rows (functional less in place)", name, f"{1e6 * copy / shape.T:.3g} us")
    speed = shape.forward_bytes() / timings.median("in place") / 1e9
    put(times, "forward in place, rows moved", name, f"{speed:.3g} GB/s")
    for label in ("row limit", "torch loop", "dense GDN, chunked"):
        if label in candidates:
            put(times, f"forward, peer: {label}", name, f"{1e6 * timings.median(label) / shape.T:.3g} us")


def gradients_section(report: Report, shape: Shape, inputs: Inputs, threads: int, ratios: Rows, times: Rows) -> None:
    """Forward + backward: restore modes, the hand-written torch backward, the chunked dense form."""
    name = shape.name
    hand_tokens = min(shape.T, HAND_TOKENS)
    hand_inputs = torch_loop.from_inputs(inputs.first_tokens(hand_tokens), shape.N)
    loop_inputs = torch_loop.from_inputs(inputs, shape.N)
    table = torch.from_numpy(inputs.table()).view(-1, shape.D)
    dtable = torch.zeros_like(table)
    dense = torch.zeros(shape.lanes, shape.W, shape.D)
    candidates = {restore: ours.gradients(inputs, restore=restore) for restore in ("hybrid", "snapshot", "invert")}
    candidates["hybrid, of the state too"] = ours.gradients(inputs, of_state=True)
    candidates["torch by hand"] = lambda: torch_loop.hand_gradients(table, dtable, hand_inputs)
    candidates["dense GDN, chunked"] = lambda: dense_gdn.chunked_gradients(dense, loop_inputs)
    mover = row_limit.row_mover(inputs, inputs.table(), threads)
    touched = _touched_rows(inputs, shape)
    copy = torch.empty(len(touched), shape.D)
    if mover is not None:
        candidates["row limit"] = mover
        candidates["copy"] = lambda: torch.index_select(table, 0, touched, out=copy)

    def prepare(candidate: str) -> None:
        if candidate == "torch by hand":
            dtable.zero_()

    timings = report.run(f"forward + backward, {name}", candidates, prepare=prepare)
    tokens = {candidate: shape.T for candidate in candidates if candidate not in ("row limit", "copy")}
    tokens["torch by hand"] = hand_tokens
    per_token = shape.T / hand_tokens
    row = "forward + backward, times as fast as a hand-written O(W D) PyTorch backward"
    put(ratios, row, name, verdict(timings, "torch by hand", "hybrid", TARGETS["hand"][name], per_token))
    moved = shape.forward_bytes() + shape.backward_bytes()
    if mover is not None:
        row = "the row limit for these bytes, times as fast as a hand-written backward"
        limit = verdict(timings, "torch by hand", "row limit", None, per_token * shape.forward_bytes() / moved)
        put(ratios, row, name, limit)
        floor = timings.median("row limit") * moved / shape.forward_bytes() + timings.median("copy")
        row = "the same with one copy of the rows touched, which the functional form cannot do without"
        put(ratios, row, name, f"{per_token * timings.median('torch by hand') / floor:.3g}")
    row = "forward + backward, hybrid: times as fast as snapshot"
    put(ratios, row, name, verdict(timings, "snapshot", "hybrid", TARGETS["snapshot"][name]))
    for label in tokens:
        own = label in ("hybrid", "snapshot", "invert", "hybrid, of the state too")
        title = f"forward + backward, {'' if own else 'peer: '}{label}"
        put(times, title, name, f"{1e6 * timings.median(label) / tokens[label]:.3g} us")
    put(times, "forward + backward (hybrid), rows moved", name, f"{moved / timings.median('hybrid') / 1e9:.3g} GB/s")
    put(times, "rows logged by hybrid, of those by snapshot", name, f"{_log_share(inputs):.2%}")


def _touched_rows(inputs: Inputs, shape: Shape) -> torch.Tensor:
    """Return the rows of the flat table [B H N, D] that a call writes or reads."""
    both = np.concatenate([inputs.write_slots, inputs.read_slots], axis=-1).astype(np.int64)
    lane = np.arange(shape.lanes).reshape(shape.B, 1, shape.H, 1)
    return torch.from_numpy(np.unique(both + lane * shape.N))


def autograd_section(report: Report, shape: Shape, inputs: Inputs, threads: int, ratios: Rows, times: Rows) -> None:
    """Forward + backward against torch's autograd through the loop: a whole table of work per token."""
    tokens = AUTOGRAD_TOKENS[shape.name]
    loop_inputs = torch_loop.from_inputs(inputs.first_tokens(tokens), shape.N)
    table = torch.from_numpy(inputs.table()).view(-1, shape.D)
    candidates = {
        "hybrid": ours.gradients(inputs),
        "autograd": lambda: torch_loop.autograd_gradients(table, loop_inputs),
    }
    timings = report.run(f"autograd through the loop, {shape.name}", candidates, rounds=min(3, report.rounds))
    row = "forward + backward, times as fast as PyTorch autograd through the loop"
    target = TARGETS["autograd"][shape.name]
    put(ratios, row, shape.name, verdict(timings, "autograd", "hybrid", target, shape.T / tokens))
    put(
        times,
        "forward + backward, peer: torch autograd",
        shape.name,
        f"{1e6 * timings.median('autograd') / tokens:.3g} us",
    )


def decode_section(report: Report, shape: Shape, inputs: Inputs, threads: int, ratios: Rows, times: Rows) -> None:
    """One token per call, as in generation."""
    one = inputs.first_tokens(1)
    loop_inputs = torch_loop.from_inputs(one, shape.N)
    table = torch.from_numpy(inputs.table()).view(-1, shape.D)
    tensors, state = [torch.from_numpy(x) for x in one.call], torch.from_numpy(inputs.table())
    calls = {
        "NumPy": ours.update(one, inputs.table()),
        "torch": lambda: sdm_lite.sparse_delta_rule_(*tensors, state),
        "torch loop": lambda: torch_loop.forward(table, loop_inputs),
    }
    # the same rows each time, so they stay in cache: this is the cost of a call, not of memory
    candidates = {name: (lambda call=call: [call() for _ in range(50)]) for name, call in calls.items()}
    with torch.no_grad():
        timings = report.run(f"one token, {shape.name}", candidates)
    for name in calls:
        label = "peer: torch loop" if name == "torch loop" else f"{name} arrays"
        put(times, f"one token in place, {label}", shape.name, f"{1e6 * timings.median(name) / 50:.3g} us")


def _log_share(inputs: Inputs) -> float:
    return ours.logged_rows(inputs) / inputs.write_slots.size


def topk_lines(report: Report) -> list[str]:
    """Selection of 64 of 57,600 slots for 4,096 rows, one thread and two."""
    scores, k = np.random.default_rng(0).standard_normal((4096, 480), dtype=np.float32), 64
    parity.check_topk(scores, k)
    tensor, ranks = torch.from_numpy(scores), torch_topk.staircase_ranks(k)
    lines = ["| product_key_topk, n = 240, k = 64, 4,096 rows | 1 thread | 2 threads |", "|---|---|---|"]
    cells: Rows = {}
    for threads in (1, 2):
        ours.set_threads(threads)
        candidates = {
            "ours": ours.topk(scores, k),
            "outer": lambda: torch_topk.outer_sum(tensor, k),
            "staircase": lambda: torch_topk.staircase(tensor, k, ranks),
        }
        timings = report.run(f"top-k, {threads} threads", candidates)
        column = str(threads)
        put(cells, "ours", column, f"{1e6 * timings.median('ours') / 4096:.3g} us a row")
        against = verdict(timings, "outer", "ours", TARGETS["topk"])
        put(cells, "times as fast as the torch pipeline (top-k, outer sum, top-k, sort)", column, against)
        against = verdict(timings, "staircase", "ours", None)
        put(cells, "times as fast as the same with only the pairs that can be needed", column, against)
    return [*lines, *(f"| {row} | {found['1']} | {found['2']} |" for row, found in cells.items())]


def fwpkm_lines(report: Report) -> list[str]:
    """Fast-weight product keys and weighted sums of rows at 262,144 slots of width 512, against torch."""
    sizes, targets = fwpkm_cases.Sizes(), fwpkm_cases.TARGETS
    fwpkm_cases.check_all(fwpkm_cases.Sizes(m=64, half=32, D=64, C=128))
    x = fwpkm_cases.make_inputs(sizes)
    comparisons: dict[tuple[str, str], Callable[[], dict[str, Callable[[], object]]]] = {
        ("retrieval of 8 of 512 x 512 slots", "retrieval"): lambda: fwpkm_cases.retrieval(x, sizes.k),
        ("a chunk's read and write", "chunk"): lambda: fwpkm_cases.chunk(x, sizes),
        ("embedding_bag, forward", "bag"): lambda: fwpkm_cases.bag(x),
        ("embedding_bag, forward + backward, dense gradient", "bag dense"): lambda: fwpkm_cases.bag(
            x, gradient="dense"
        ),
        ("embedding_bag, forward + backward, coalesced gradient", "bag coalesced"): lambda: fwpkm_cases.bag(
            x, gradient="coalesced"
        ),
    }
    lines = ["| 512 tokens, 262,144 slots, D = 512, k = 8 | ours | times as fast as torch |", "|---|---|---|"]
    for (title, name), candidates in comparisons.items():
        timings = report.run(f"fwpkm, {name}", candidates())
        ratio = verdict(timings, "torch", "ours", targets[name])
        lines.append(f"| {title} | {1e3 * timings.median('ours'):.3g} ms | {ratio} |")
    return lines


def accuracy_lines() -> list[str]:
    """Gradients at T = 8192 in float32 with the default restore, against float64 with a full snapshot."""
    lines = [
        "| gradients at T = 8192, N = 1024, D = 64, one lane | rows logged | worst gradient, of its largest entry |",
        "|---|---|---|",
    ]
    for decay, label in (("typical", "alpha about 0.95"), ("uniform", "alpha uniform in (0.3, 1)")):
        inputs = make_inputs(Shape("accuracy", B=1, T=8192, H=1, N=1024, D=64), seed=3, decay=decay)
        exact = Inputs(**{n: x.astype(np.float64) if x.dtype == np.float32 else x for n, x in vars(inputs).items()})
        want = ours.gradients(exact, restore="snapshot", of_state=True)()
        got = ours.gradients(inputs, of_state=True)()
        errors = {name: parity.relative_error(got[name], want[name]) for name in want}
        worst = max(errors, key=lambda name: errors[name])
        lines.append(f"| {label} | {_log_share(inputs):.2%} of a snapshot's | {errors[worst]:.1e} ({worst}) |")
    return lines


def cost_lines(shapes: list[str]) -> list[str]:
    """First calls cold and cached; peak memory against the formula."""
    cold, cached = costs.first_calls(cached=False), costs.first_calls(cached=True)
    lines = ["| first calls in a fresh process (s) | nothing cached | cached on disk |", "|---|---|---|"]
    lines += [f"| {name} | {cold[name]:.2f} | {cached[name]:.2f} |" for name in cold]
    lines += [
        "",
        "| peak memory of forward + backward | measured (MB) | formula (MB) | rows logged |",
        "|---|---|---|---|",
    ]
    for shape in shapes:
        for restore in ("hybrid", "snapshot"):
            found = costs.peak_memory(shape, restore)
            cells = (found["peak"], found["formula"], found["logged_rows"])
            lines.append(f"| {shape}, {restore} | {cells[0] / 1e6:.0f} | {cells[1] / 1e6:.0f} | {cells[2]:,} |")
    return lines


def table_lines(title: str, rows: Rows, columns: list[str]) -> list[str]:
    """Return a markdown table."""
    lines = [f"| {title} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    return [*lines, *(f"| {row} | {' | '.join(cells.get(c, '') for c in columns)} |" for row, cells in rows.items())]


def machine_line(threads: int) -> str:
    """Return what the figures depend on."""
    processor = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        processor = names[0] if names else processor
    vectors = torch.backends.cpu.get_cpu_capability()
    compiler = "none"
    if row_limit.library() is not None:
        compiler = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    versions = f"numpy {np.__version__}, numba {numba.__version__}, torch {torch.__version__}, g++ {compiler}"
    return (
        f"Machine: {processor} ({vectors}), {threads} threads for every candidate. Python {platform.python_version()}, "
        f"{versions}, sdm-lite {sdm_lite.__version__}."
    )


SECTIONS = {
    "forward": forward_section,
    "gradients": gradients_section,
    "autograd": autograd_section,
    "decode": decode_section,
}


def measure(arguments: argparse.Namespace) -> list[str]:
    """Run the sections asked for and return the page's lines."""
    report = Report(arguments.rounds, arguments.limit)
    ratios: Rows = {}
    times: Rows = {}
    threads = arguments.threads
    for name in arguments.shapes:
        ours.set_threads(threads)
        shape = SHAPES[name]
        parity.check_delta(shape)
        parity.check_gdn(shape)
        inputs = make_inputs(shape)
        for section, function in SECTIONS.items():
            if section in arguments.sections:
                function(report, shape, inputs, threads, ratios, times)
    blocks = []
    if ratios:
        blocks.append(table_lines("ratio (target)", ratios, arguments.shapes))
    if times:
        blocks.append(table_lines("per token, all lanes", times, arguments.shapes))
    if "topk" in arguments.sections:
        blocks.append(topk_lines(report))
    ours.set_threads(threads)
    if "fwpkm" in arguments.sections:
        blocks.append(fwpkm_lines(report))
    if "accuracy" in arguments.sections:
        blocks.append(accuracy_lines())
    if "costs" in arguments.sections:
        blocks.append(cost_lines([name for name in arguments.shapes if name != "small"]))
    rounds = f"{report.clean} clean rounds, {report.disturbed} set aside because other processes ran"
    if report.foreign:
        rounds += f"; those used at most {max(report.foreign):.2f} cores in a round that counts"
    head = [machine_line(threads), "", f"Command: `python -m benchmarks.report {' '.join(sys.argv[1:])}`; {rounds}."]
    return [*head, *(line for block in blocks for line in ("", *block))]


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = [*SECTIONS, "topk", "fwpkm", "accuracy", "costs"]
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--sections", nargs="+", choices=sections, default=sections)
    parser.add_argument("--rounds", type=int, default=7, help="clean rounds per comparison")
    parser.add_argument(
        "--limit", type=float, default=40.0, help="seconds after which a comparison stops waiting for clean rounds"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="put the result into docs/benchmarks.md")
    arguments = parser.parse_args()
    text = "\n".join(measure(arguments))
    print(text)
    if arguments.write:
        page = PAGE.read_text()
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
