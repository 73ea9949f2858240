"""What metadata cannot show of a sparse delta call, looked at in one pass: slots and decays.

Bytes per token: 4 (W + R) for the slots and the decays' own, each read once, in order.
"""

from __future__ import annotations

import numpy as np

from ..rooms import DeltaInputs
from . import memory, pool
from .compile import inlined, kernel, same_types
from .vector import borrowed

_PER_NUMBER = 4  # slots that cost what a number moved costs


def values_are_fine(inputs: DeltaInputs, num_slots: int) -> bool:
    """Return whether each token's slots ascend within [0, num_slots) and its log decays are <= 0."""
    flat = [memory.for_kernels(x) for x in (inputs.write_slots, inputs.read_slots, inputs.log_decay)]
    tokens = inputs.beta.size
    writes, reads, decays = (x.reshape(tokens, x.shape[-1]) for x in flat)
    bad: list[int] = []
    kernel = same_types(_count_bad, decays.dtype)

    def job(lo: int, hi: int) -> None:
        bad.append(kernel(lo, hi, writes, reads, decays, num_slots))

    pool.run(tokens, job, sum(x.size for x in flat) // _PER_NUMBER)
    return not any(bad)


@kernel
def _count_bad(lo, hi, write_slots, read_slots, log_decay, num_slots):
    """Return how many slots and decays of the tokens [lo, hi) are not certainly right."""
    write_slots, read_slots, log_decay = borrowed(write_slots), borrowed(read_slots), borrowed(log_decay)
    bad = np.int64(0)
    for token in range(lo, hi):
        bad += bad_slots(write_slots[token], num_slots) + bad_slots(read_slots[token], num_slots)
        for decay in log_decay[token]:
            bad += not decay <= 0  # a NaN is not
    return bad


@inlined
def bad_slots(slots, num_slots):
    """Return how many of a token's slots do not ascend or lie outside of [0, num_slots)."""
    count = slots.shape[0]
    if count == 0:
        return np.int32(0)
    bad = np.int32(np.int32(slots[0] < 0) + np.int32(slots[count - 1] >= num_slots))
    for i in range(1, count):  # no early end, so that the loop is one of vectors
        bad = np.int32(bad + np.int32(slots[i] <= slots[i - 1]))
    return bad
