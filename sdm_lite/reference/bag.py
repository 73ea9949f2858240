"""Weighted sums of table rows in NumPy, and their derivatives (an embedding bag with a weight per read).

    y_t     = sum_a w_ta V[slot_ta]
    dV[i]   = sum over the reads (t, a) of slot i of w_ta dy_t        t ascending, then a
    dw_ta   = <V[slot_ta], dy_t>

A token may name a slot twice: both reads count.
"""

from __future__ import annotations

import numpy as np


def embedding_bag_forward(values: np.ndarray, slots: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return y_t = sum_a w_ta V[slot_ta], a ascending.

    Parameters
    ----------
    values : array [S, D], float32 or float64
    slots : array [n, K], int32
    weights : array [n, K], dtype of `values`

    Returns
    -------
    array [n, D], dtype of `values`

    Examples
    --------
    >>> embedding_bag_forward(np.array([[1.0], [10.0]]), np.array([[0, 1]]), np.array([[2.0, 0.5]]))
    array([[7.]])
    """
    readings = np.zeros((len(slots), values.shape[1]), values.dtype)
    for a in range(slots.shape[1]):
        readings += weights[:, a, None] * values[slots[:, a]]
    return readings


def embedding_bag_backward(dreadings: np.ndarray, slots: np.ndarray, weights: np.ndarray, num_slots: int) -> np.ndarray:
    """Return dV [num_slots, D]: each row the sum of its reads, in their order; zero where no token reads."""
    dvalues = np.zeros((num_slots, dreadings.shape[1]), dreadings.dtype)
    for t in range(len(slots)):
        for a in range(slots.shape[1]):
            dvalues[slots[t, a]] += weights[t, a] * dreadings[t]
    return dvalues


def embedding_bag_weights_backward(dreadings: np.ndarray, values: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Return dw [n, K] = <V[slot_ta], dy_t>."""
    dweights = np.empty(slots.shape, dreadings.dtype)
    for a in range(slots.shape[1]):
        dweights[:, a] = (values[slots[:, a]] * dreadings).sum(axis=1)
    return dweights


def number_slots(slots: np.ndarray, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct slots [U], ascending, and the place of each slot among them [n, K]; both int32.

    Examples
    --------
    >>> number_slots(np.array([[7, 3], [3, 9]]), 10)
    (array([3, 7, 9], dtype=int32), array([[1, 0], [0, 2]], dtype=int32))
    """
    rows, places = np.unique(slots, return_inverse=True)
    return rows.astype(np.int32), places.reshape(slots.shape).astype(np.int32)
