"""States of fast weights in mid-stream, and what they answer."""

from __future__ import annotations

import numpy as np
from fwpkm_cases import make_stream

from sdm_lite import FwPKMState, fwpkm

SMALL = {"k": 3, "chunk": 4, "pairs": "carry"}


def begun(per_sequence=True, tokens=6, **changes):
    """Return a stream and a state in the middle of its second chunk."""
    x = make_stream(B=3, T=12, m=6, dtype=np.float32, **changes)
    state = FwPKMState(x.keys, x.table, per_sequence=per_sequence)
    state.extend(*x.tokens(0, tokens), **SMALL)
    return x, state


def goes_on(state, x, rows=slice(None)):
    """Return the bits of what the state answers to the stream's last tokens, itself left as it is."""
    readings, after = fwpkm(*(a[rows] for a in x.tokens(6, 12)), state, **SMALL)
    return readings.tobytes(), after.values.tobytes(), after.keys.tobytes()
