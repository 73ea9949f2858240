"""One prompt, three continuations, and tokens tried and taken back: a memory of 64 MB that copies only rows written.

Run it: python examples/fork_and_rollback.py   (NumPy and numba only, a few seconds after the first call has compiled)
"""

import numpy as np

import sdm_lite

HEADS, SLOTS, WIDTH, WRITES = 1, 65_536, 256, 16
rng = np.random.default_rng(0)
initial = rng.standard_normal((HEADS, SLOTS, WIDTH), dtype=np.float32)


def tokens(batch, count):
    """Return the seven arrays of `count` tokens of each sequence: random ones stand in for a layer's."""
    shape = (batch, count, HEADS)
    scores = rng.standard_normal((*shape, 2 * 256), dtype=np.float32)
    top, slots = sdm_lite.product_key_topk(scores, WRITES)
    weights = top / np.linalg.norm(top, axis=-1, keepdims=True)
    values = rng.standard_normal((*shape, WIDTH), dtype=np.float32)
    log_decay, beta = np.full(shape, -0.05, np.float32), np.full(shape, 0.5, np.float32)
    return values, slots, weights, log_decay, beta, slots, weights


def show(what, state):
    """Print the bytes of a state."""
    shared, owned = state.nbytes()
    print(f"{what:<34} shared {shared / 1e6:5.1f} MB, owned {owned / 1e6:5.2f} MB, tokens {state.tokens.tolist()}")


state = sdm_lite.MemoryState(initial, 1)
state.extend(*tokens(1, 100))
show("a prompt of 100 tokens", state)

beams = state.fork([0, 0, 0])
show("three forks of it", beams)
beams.extend(*tokens(3, 10))
show("after 10 tokens each", beams)

before, mark = beams.dense(), beams.mark()
beams.extend(*tokens(3, 5))
show("5 tokens tried", beams)
beams.rollback(mark)
show("and taken back", beams)
print("the same bits as before:", np.array_equal(beams.dense(), before))

beams.release(mark)
beams.reorder([2, 2, 0])
show("the best kept, twice", beams)
