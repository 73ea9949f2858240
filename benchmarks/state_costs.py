"""What a `MemoryState` owns, and how far its numbers drift: tables of docs/state.md, no timing.

python -m benchmarks.state_costs bytes      bytes owned after 100, 1,000, 10,000 tokens (a minute or two)
python -m benchmarks.state_costs drift      float32, bf16, fp16 against float64 over 10,000 tokens
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import torch

import sdm_lite

from .shapes import distinct_slots

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
    slots: str, tokens: int, heads: int, num_slots: int, width: int, count: int, alpha: float = 0.95
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the seven arrays of calls of PIECE tokens of one sequence, float64; decays about `alpha`."""
    rng, draw = np.random.default_rng(0), SLOTS[slots]
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


def main(table: str) -> None:
    """Print one table as Markdown."""
    marks = (100, 1_000, 10_000)
    if table == "bytes":
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
