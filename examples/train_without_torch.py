"""Train a sparse-memory layer on associative recall with NumPy alone: torch is not imported.

Each sequence states PAIRS facts "key k has value v", then asks for the keys in another order: only the memory can
tell the answers. A guess costs log(VALUES) = 2.77.
"""

import numpy as np

import sdm_lite
from sdm_lite.autograd import Tensor, cross_entropy, embedding, exp, rms_norm, sigmoid, softmax, softplus

KEYS, VALUES, PAIRS, BATCH, DIM, COLUMNS, SLOTS = 64, 16, 16, 16, 32, 16, 4


def make_parameters(rng):
    score = rng.standard_normal((DIM, 2 * COLUMNS)) / np.sqrt(DIM)  # for reads and writes: a key finds what it wrote
    start = {"key": rng.standard_normal((KEYS, DIM)), "value": rng.standard_normal((VALUES + 1, DIM)) / 2}
    start |= {"write": score, "read": score.copy(), "into": rng.standard_normal((DIM, DIM)) / np.sqrt(DIM)}
    start |= {"decay": np.zeros((DIM, 1)), "dt_bias": np.full(1, -5), "A_log": np.zeros(1), "beta": np.zeros((DIM, 1))}
    start |= {"memory": np.zeros((1, COLUMNS**2, DIM)), "gain": np.ones(DIM), "out": np.zeros((DIM, VALUES))}
    return {name: Tensor(array.astype(np.float32), requires_grad=True) for name, array in start.items()}


def layer(p, x):
    write_scores, write_slots = sdm_lite.product_key_topk(x @ p["write"], SLOTS, factors=(COLUMNS, COLUMNS))
    read_scores, read_slots = sdm_lite.product_key_topk(x @ p["read"], SLOTS, factors=(COLUMNS, COLUMNS))
    values, log_decay = x @ p["into"], -exp(p["A_log"]) * softplus(x @ p["decay"] + p["dt_bias"])
    writes = values[:, :, None], write_slots[:, :, None], softmax(write_scores)[:, :, None]
    gates, reads = (log_decay, sigmoid(x @ p["beta"])), (read_slots[:, :, None], softmax(read_scores)[:, :, None])
    readings, _ = sdm_lite.sparse_delta_rule(*writes, *gates, *reads, p["memory"])
    return rms_norm(readings[:, :, 0], p["gain"]) @ p["out"]


def make_batch(rng):
    keys = np.argsort(rng.random((BATCH, KEYS)))[:, :PAIRS]
    values, order = rng.integers(VALUES, size=keys.shape), np.argsort(rng.random(keys.shape))
    asked, none = np.take_along_axis(values, order, 1), np.full(keys.shape, VALUES)  # a question has no value
    keys = np.concatenate([keys, np.take_along_axis(keys, order, 1)], 1)
    return keys, np.concatenate([values, none], 1), np.concatenate([0 * none - 100, asked], 1)  # -100: no target


def train(steps, rate=1e-2, seed=0):
    rng = np.random.default_rng(seed)
    p = make_parameters(rng)
    first, second = ({name: np.zeros_like(t.data) for name, t in p.items()} for _ in range(2))
    for step in range(1, steps + 1):
        keys, values, targets = make_batch(rng)
        loss = cross_entropy(layer(p, embedding(p["key"], keys) + embedding(p["value"], values)), targets)
        loss.backward()
        for name, t in p.items():  # Adam
            first[name] += 0.1 * (t.grad - first[name])
            second[name] += 0.01 * (t.grad**2 - second[name])
            t.data -= rate * first[name] / (1 - 0.9**step) / (np.sqrt(second[name] / (1 - 0.99**step)) + 1e-8)
            t.grad = None
        if step == 1 or step % 25 == 0:
            print(f"step {step:3d}   loss {loss.item():.3f}")


if __name__ == "__main__":
    train(100)
