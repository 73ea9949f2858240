"""Multi-query associative recall: n pairs "key value", then the n keys in another order; name each value.

A row has T = 3 n tokens: k_1 v_1 .. k_n v_n, then the keys shuffled. The target at a query is that
key's value; no answer is ever fed back. Keys are distinct within a row, values are not. Tokens
0..keys-1 are keys, keys..keys+values-1 are values; chance is 1 / values.
"""

from __future__ import annotations

import numpy as np


def recall_batch(
    pairs: int, rows: int, keys: int, values: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids int64 [rows, 3 pairs] and the targets of the queries int64 [rows, pairs].

    >>> ids, targets = recall_batch(2, 1, keys=8, values=4, generator=np.random.default_rng(0))
    >>> ids.shape, targets.shape
    ((1, 6), (1, 2))
    >>> value_of = dict(zip(ids[0, 0:4:2].tolist(), ids[0, 1:4:2].tolist()))
    >>> [value_of[key] for key in ids[0, 4:].tolist()] == targets[0].tolist()
    True
    """
    drawn_keys = generator.permuted(np.tile(np.arange(keys), (rows, 1)), axis=1)[:, :pairs]
    drawn_values = generator.integers(keys, keys + values, size=(rows, pairs))
    order = generator.permuted(np.tile(np.arange(pairs), (rows, 1)), axis=1)
    facts = np.stack([drawn_keys, drawn_values], axis=2).reshape(rows, 2 * pairs)
    ids = np.concatenate([facts, np.take_along_axis(drawn_keys, order, axis=1)], axis=1)
    return ids.astype(np.int64), np.take_along_axis(drawn_values, order, axis=1).astype(np.int64)


def training_batch(
    sizes: tuple[int, ...], tokens: int, max_rows: int, keys: int, values: int, seed: int, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the batch of `step`: a number of pairs drawn from `sizes`, as many rows as fit in `tokens`."""
    generator = np.random.default_rng([seed, step])
    pairs = int(generator.choice(sizes))
    rows = max(1, min(max_rows, tokens // (3 * pairs)))
    return recall_batch(pairs, rows, keys, values, generator)
