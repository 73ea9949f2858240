"""The named shapes, their seeded inputs, and the formulas that the measurements are held against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sdm_lite.cpu import memory


@dataclass(frozen=True)
class Shape:
    """Sizes of a sparse delta call: B sequences of T tokens, H heads, N slots of width D, W written and R read."""

    name: str
    B: int
    T: int
    H: int
    N: int
    D: int
    W: int = 64
    R: int = 64

    @property
    def lanes(self) -> int:
        """Independent recurrences: one per sequence and head."""
        return self.B * self.H

    def forward_bytes(self) -> int:
        """Bytes of rows moved by a float32 forward: W rows in, W out, R in per lane and token."""
        return 4 * self.lanes * self.T * self.D * (2 * self.W + self.R)

    def backward_bytes(self) -> int:
        """Bytes of rows moved by a float32 backward without a log: rows and their gradients, in and out.

        Rows of M: R in (dq), W in and W out (undo). Rows of G: R in and out, W in and W out.
        """
        return 4 * self.lanes * self.T * self.D * (3 * self.R + 4 * self.W)


#: small fits a core's cache, medium the last level, large is the layer of a 1.4B model (D = 1920 / 2 heads)
SHAPES = {
    "small": Shape("small", B=4, T=512, H=2, N=1024, D=64),
    "medium": Shape("medium", B=1, T=1024, H=2, N=16384, D=256),
    "large": Shape("large", B=1, T=512, H=2, N=57600, D=960),
}


@dataclass
class Inputs:
    """The arrays of a call in the op's order, the state [B, H, N, D], and an upstream gradient for the readings."""

    values: np.ndarray
    write_slots: np.ndarray
    write_weights: np.ndarray
    log_decay: np.ndarray
    beta: np.ndarray
    read_slots: np.ndarray
    read_weights: np.ndarray
    state: np.ndarray
    dreadings: np.ndarray

    @property
    def call(self) -> tuple[np.ndarray, ...]:
        """The seven arrays in the op's order."""
        return (
            self.values,
            self.write_slots,
            self.write_weights,
            self.log_decay,
            self.beta,
            self.read_slots,
            self.read_weights,
        )

    def table(self) -> np.ndarray:
        """Return a copy of the state; a large one begins on a cache line, as in torch and not in NumPy."""
        copy = memory.empty(self.state.shape, self.state.dtype)
        copy[...] = self.state
        return copy

    def first_tokens(self, count: int) -> Inputs:
        """Return the same inputs cut to `count` tokens; the state is shared."""
        cut = {name: np.ascontiguousarray(array[:, :count]) for name, array in vars(self).items() if name != "state"}
        return Inputs(**cut, state=self.state)


def make_inputs(shape: Shape, seed: int = 0, decay: str = "typical") -> Inputs:
    """Return seeded float32 inputs: random distinct ascending slots, unit write weights, softmax read weights.

    `decay`: "typical" (alpha about 0.95) or "uniform" (alpha in 0.3 to 1).
    """
    rng = np.random.default_rng(seed)
    tokens = (shape.B, shape.T, shape.H)
    write_weights = rng.standard_normal((*tokens, shape.W), dtype=np.float32)
    write_weights /= np.linalg.norm(write_weights, axis=-1, keepdims=True)
    read_weights = np.exp(rng.standard_normal((*tokens, shape.R), dtype=np.float32))
    read_weights /= read_weights.sum(axis=-1, keepdims=True)
    if decay == "typical":
        log_decay = -np.log1p(np.exp(-2.944 - 0.5 * rng.standard_normal(tokens)))  # alpha = sigmoid(logit(0.95) + z/2)
    else:
        log_decay = np.log(rng.uniform(0.3, 1.0, tokens))
    state = rng.standard_normal((shape.B, shape.H, shape.N, shape.D), dtype=np.float32)
    state *= np.float32(0.1)
    return Inputs(
        values=rng.standard_normal((*tokens, shape.D), dtype=np.float32),
        write_slots=distinct_slots(rng, tokens, shape.W, shape.N),
        write_weights=write_weights,
        log_decay=log_decay.astype(np.float32),
        beta=rng.uniform(0.1, 0.9, tokens).astype(np.float32),
        read_slots=distinct_slots(rng, tokens, shape.R, shape.N),
        read_weights=read_weights,
        state=state,
        dreadings=rng.standard_normal((*tokens, shape.D), dtype=np.float32),
    )


def distinct_slots(rng: np.random.Generator, tokens: tuple[int, ...], count: int, num_slots: int) -> np.ndarray:
    """Return int32 [*tokens, count]: distinct, ascending, uniform. (Sorting N random numbers a token would be slow.)"""
    rows = [rng.choice(num_slots, count, replace=False, shuffle=False) for _ in range(int(np.prod(tokens)))]
    return np.sort(np.array(rows, np.int32).reshape(*tokens, count), axis=-1)


def touched_rows(inputs: Inputs, num_slots: int) -> int:
    """Rows that the tokens write or read, summed over lanes."""
    both = np.concatenate([inputs.write_slots, inputs.read_slots], axis=-1)
    batch, _, heads, _ = both.shape
    count = 0
    for b in range(batch):
        for h in range(heads):
            seen = np.zeros(num_slots, bool)
            seen[both[b, :, h]] = True
            count += int(seen.sum())
    return count
