"""Calls of a MemoryState for tests."""

import numpy as np
from cases import distinct_slots


def token(rng, shape=(1, 2), slots=64, width=16, writes=4, reads=4, dtype=np.float32):
    """Return the seven arrays of one step (or of extend, with a longer shape)."""
    return [
        rng.standard_normal((*shape, width)).astype(dtype),
        distinct_slots(rng, shape, writes, slots),
        rng.standard_normal((*shape, writes)).astype(dtype),
        -rng.exponential(0.1, shape).astype(dtype),
        rng.uniform(0, 1, shape).astype(dtype),
        distinct_slots(rng, shape, reads, slots),
        rng.standard_normal((*shape, reads)).astype(dtype),
    ]
