"""What a `MemoryState` owns, how far its numbers drift, and what its verbs cost: tables of docs/state.md.

python -m benchmarks.state_costs bytes      bytes owned after 100, 1,000, 10,000 tokens (a minute or two)
python -m benchmarks.state_costs drift      float32, bf16, fp16 against float64 over 10,000 tokens
python -m benchmarks.state_costs times      steps, prefill, fork and rollback at the 1.4B layer (a minute; g++, 5 GB)
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

import sdm_lite

from . import timing
from .peers import row_limit
from .shapes import Inputs, distinct_slots

PIECE = 100  # tokens of one call


def skewed_slots(rng: np.random.Generator, tokens: tuple[int, ...], count: int, num_slots: int) -> np.ndarray:
    """Return int32 [*tokens, count]: distinct, ascending, drawn by Zipf's law (slot i as often as 1 / (i + 1))."""
    steps = np.cumsum(1 / np.arange(1, num_slots + 1))
    rows = []
    for _ in range(int(np.prod(tokens))):
        row = np.empty(0, np.int64)
        while len(row) < count:
            drawn = np.searchsorted(steps, rng.uniform(0, steps[-1], 4 * count))
            row = np.concatenate([row, drawn])
            row = row[np.sort(np.unique(row, return_index=True)[1])]  # distinct, in the order drawn
        rows.append(np.sort(row[:count]))
    return np.array(rows, np.int32).reshape(*tokens, count)


SLOTS = {"skewed": skewed_slots, "uniform": distinct_slots}


def pieces(
    slots: str, tokens: int, heads: int, num_slots: int, width: int, count: int, alpha: float = 0.95, seed: int = 0
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the seven arrays of calls of PIECE tokens of one sequence, float64; decays about `alpha`."""
    rng, draw = np.random.default_rng(seed), SLOTS[slots]
    logit = np.log(alpha / (1 - alpha))
    for _ in range(tokens // PIECE):
        shape = (1, PIECE, heads)
        weights = rng.standard_normal((*shape, count))
        queries = np.exp(rng.standard_normal((*shape, count)))
        yield (
            rng.standard_normal((*shape, width)),
            draw(rng, shape, count, num_slots),
            weights / np.linalg.norm(weights, axis=-1, keepdims=True),
            -np.log1p(np.exp(-logit - 0.5 * rng.standard_normal(shape))),
            rng.uniform(0.1, 0.9, shape),
            draw(rng, shape, count, num_slots),
            queries / queries.sum(axis=-1, keepdims=True),
        )


def bytes_owned(
    slots: str, marks: tuple[int, ...], heads: int = 2, num_slots: int = 57600, width: int = 960, count: int = 64
) -> list[int]:
    """Return the bytes owned after so many tokens of one sequence."""
    state, found = sdm_lite.MemoryState((heads, num_slots, width), 1), []
    for call in pieces(slots, max(marks), heads, num_slots, width, count):
        state.extend(*(x if x.dtype == np.int32 else x.astype(np.float32) for x in call))
        if state.tokens[0] in marks:
            found.append(state.nbytes().owned)
    return found


def drift(
    dtype: torch.dtype, marks: tuple[int, ...], alpha: float, num_slots: int = 1024, width: int = 64, count: int = 32
) -> list[float]:
    """Return the largest error of the readings of the PIECE tokens before each mark, relative to the largest reading.

    Both start from zeros and get the same numbers, rounded to float32; the reference computes in float64.
    """
    shape, found = (1, num_slots, width), []
    state = sdm_lite.MemoryState(shape, 1, dtype=dtype)
    exact = sdm_lite.MemoryState(shape, 1, dtype=torch.float64)
    for call in pieces("skewed", max(marks), 1, num_slots, width, count, alpha):
        single = [torch.from_numpy(x if x.dtype == np.int32 else x.astype(np.float32)) for x in call]
        readings = state.extend(*single)
        single[0] = single[0].double()
        want = exact.extend(*single)
        if exact.tokens[0] in marks:
            found.append(float((readings - want).abs().max() / want.abs().max()))
    return found


def seconds(call: Callable[[], object], rounds: int, before: Callable[[], object] = lambda: None) -> float:
    """Return the median time of a call."""
    found = []
    for _ in range(rounds):
        before()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return float(np.median(found))


def each(calls: list[Callable[[], object]]) -> float:
    """Return the median time of calls that run one after the other."""
    marks = [time.perf_counter()]
    for call in calls:
        call()
        marks.append(time.perf_counter())
    return float(np.median(np.diff(marks)))


def single(slots: str, tokens: int, num_slots: int, width: int, seed: int = 0) -> list[tuple[np.ndarray, ...]]:
    """Return calls of PIECE tokens of one sequence with two heads and 64 slots a token, float32."""
    calls = pieces(slots, tokens, 2, num_slots, width, 64, seed=seed)
    return [tuple(x if x.dtype == np.int32 else x.astype(np.float32) for x in call) for call in calls]


def prefill(batch: int, num_slots: int = 57600, width: int = 960) -> tuple[float, float]:
    """Return the time of a prompt of PIECE tokens, and its ratio to the op's without gradients, in turn with it."""
    call = [np.repeat(x, batch, axis=0) for x in single("uniform", PIECE, num_slots, width)[0]]
    initial = np.random.default_rng(0).standard_normal((2, num_slots, width), dtype=np.float32)
    candidates = {
        "op": lambda: sdm_lite.sparse_delta_rule(*call, initial),
        "extend": lambda: sdm_lite.MemoryState(initial, batch).extend(*call),
    }
    found = timing.interleave(candidates, rounds=9)
    return found.median("extend"), found.ratio("extend", "op")


def decode(batch: int, rounds: int = 30, tokens: int = 64) -> tuple[float, list[float], list[float]]:
    """Return the time of a step, of the row limit on one thread and on two, and the shares of both, in turn.

    `tokens` steps each, median over rounds. The steps' rows are owned already, as in a sequence that has run for a
    while; the limit has dense memories. A step of one sequence takes one thread: waking another costs as much.
    """
    initial = np.random.default_rng(0).standard_normal((2, 57600, 960), dtype=np.float32)
    drawn = [single("uniform", PIECE, 57600, 960, seed)[0] for seed in range(batch)]
    call = [np.concatenate([one[i][:, :tokens] for one in drawn]) for i in range(7)]
    state = sdm_lite.MemoryState(initial, batch)
    state.extend(*call)
    table = np.repeat(initial[None], batch, axis=0)
    steps: list[Callable] = []
    limits: dict[int, list[Callable]] = {1: [], 2: []}
    for t in range(tokens):
        one = Inputs(*(np.ascontiguousarray(x[:, t : t + 1]) for x in call), initial, call[0][:0])
        steps.append(functools.partial(state.step, *(x[:, 0] for x in list(vars(one).values())[:7])))
        for threads, calls in limits.items():
            calls.append(row_limit.row_mover(one, table, threads))
    turns = [(each(steps), *(each(calls) for calls in limits.values())) for _ in range(rounds)]
    took = np.array(turns)[1:]  # the first round warms up
    step, *limit = np.median(took, axis=0)
    return step, limit, np.median(took[:, 1:] / took[:, :1], axis=0).tolist()


def after_history(num_slots: int, slots_used: int = 7200, width: int = 16) -> sdm_lite.MemoryState:
    """Return a state after 2,000 tokens of the same slots, whatever N is."""
    state = sdm_lite.MemoryState((2, num_slots, width), 1)
    for piece in single("skewed", 2_000, slots_used, width):
        state.extend(*piece)
    return state


def rollback(state: sdm_lite.MemoryState, count: int, slots_used: int = 7200, width: int = 16) -> float:
    """Return the time to take back so many tokens."""
    call = single("skewed", PIECE, slots_used, width)[0]
    mark = state.mark()

    def advance() -> None:
        for t in range(count):
            state.step(*(x[:, t] for x in call))

    took = seconds(lambda: state.rollback(mark), 50, advance)
    state.release(mark)
    return took


def times() -> None:
    """Print the times of prefill and of steps, of forks for two N, and of rollbacks for several k."""
    for batch in (1, 8):
        took, ratio = prefill(batch)
        print(f"prefill of {PIECE} tokens, B = {batch}: {1e3 * took:.1f} ms, {ratio:.2f} times the op's")
        step, limits, shares = decode(batch)
        found = ", ".join(
            f"row limit on {threads} thread{'s'[: threads - 1]} {1e6 * limit:.0f} us: share {share:.2f}"
            for threads, limit, share in zip((1, 2), limits, shares)
        )
        print(f"step, B = {batch}: {1e6 * step:.0f} us; {found}")
    for num_slots in (7200, 57600):
        state = after_history(num_slots)
        took, rows = seconds(lambda state=state: state.fork([0]), 200), state.nbytes().owned // 64
        print(f"fork after 2,000 tokens, N = {num_slots}: {1e6 * took:.0f} us, {rows} rows owned")
    for count in (1, 4, 16, 64):
        print(f"rollback of {count} tokens: {1e6 * rollback(state, count):.0f} us")


def main(table: str) -> None:
    """Print one table as Markdown."""
    marks = (100, 1_000, 10_000)
    if table == "times":
        times()
    elif table == "bytes":
        dense = 2 * 57600 * 960 * 4
        print("| writes | 100 tokens | 1,000 tokens | 10,000 tokens |\n|---|---|---|---|")
        for slots in SLOTS:
            owned = bytes_owned(slots, marks)
            print("|", slots, "|", " | ".join(f"{n / 1e6:.1f} MB ({n / dense:.1%})" for n in owned), "|")
    else:
        print("| memory | decay | 100 tokens | 1,000 tokens | 10,000 tokens |\n|---|---|---|---|---|")
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for alpha in (0.95, 0.999):
                errors = " | ".join(f"{error:.1e}" for error in drift(dtype, marks, alpha))
                print(f"| {str(dtype).rpartition('.')[2]} | about {alpha} | {errors} |")


if __name__ == "__main__":
    main(sys.argv[1])
