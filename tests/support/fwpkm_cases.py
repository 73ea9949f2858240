"""Seeded streams for the tests of fast-weight product keys."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Stream(NamedTuple):
    """A call's arrays and the start of its memory."""

    queries: np.ndarray
    values: np.ndarray
    gates: np.ndarray
    keys: np.ndarray
    table: np.ndarray

    def astype(self, dtype) -> Stream:
        return Stream(*(x.astype(dtype) for x in self))

    @property
    def call(self) -> tuple:
        return self[:3]

    def tokens(self, start: int, stop: int) -> tuple:
        return tuple(x[:, start:stop] for x in self.call)


def make_stream(seed=0, B=2, T=11, H=2, m=4, half=3, D=5, dtype=np.float64) -> Stream:
    """Return a stream drawn in float64 and rounded."""
    rng = np.random.default_rng([7, seed])
    return Stream(
        rng.standard_normal((B, T, H, 2 * half)),
        rng.standard_normal((B, T, D)),
        rng.uniform(0.2, 0.9, (B, T)),
        rng.standard_normal((H, 2, m, half)),
        rng.standard_normal((m * m, D)),
    ).astype(dtype)


def make_mask(shape, seed=0, share=0.2) -> np.ndarray:
    """Return a mask that is False in about `share` of the tokens."""
    return np.random.default_rng([8, seed]).random(shape) >= share
