"""Retrieval by distance and the step of the keys, in NumPy: one function per equation (docs/fwpkm.md).

Shapes: queries [n, H, 2h], keys [H, 2, m, h]; q(m) is half m of a query. For token t, head a, half m
and sub-key j::

    u = epsilon + |q(m) - K[a, m, j]|^2        by direct differences, never by |q|^2 - 2 q K + |K|^2
    s = -log u                                 slot (i, j) has the score s(0)_i + s(1)_j
    w = softmax of the selected scores over a token's H k slots

The selection is that of `product_key_topk_forward`: exact, ties to the lower column and slot, NaN last.
"""

from __future__ import annotations

import numpy as np

from ..rooms import Lookup
from .addressing import product_key_topk_forward, ranked_columns


def idw_product_key_topk_forward(queries: np.ndarray, keys: np.ndarray, k: int, epsilon: float) -> Lookup:
    """Return the k nearest slots of each head and their weights, inverse in the squared distances.

    w_a = prod of 1/u over the halves, normalised over all heads' slots of the token.

    Parameters
    ----------
    queries : array [n, H, 2h], float32 or float64
    keys : array [H, 2, m, h], dtype of `queries`
    k : int
        Slots per head, at most m * m.
    epsilon : float
        Added to each squared distance.

    Returns
    -------
    Lookup

    Examples
    --------
    >>> keys = np.array([[[[0.0], [1.0]], [[0.0], [2.0]]]])
    >>> found = idw_product_key_topk_forward(np.array([[[0.0, 0.0]]]), keys, 2, 1.0)
    >>> found.slots.tolist(), found.weights.round(3).tolist()
    ([[[0, 2]]], [[[0.667, 0.333]]])
    """
    tokens, heads, sub_keys = len(queries), keys.shape[0], keys.shape[2]
    u = all_distances(queries, keys, epsilon)
    with np.errstate(invalid="ignore", divide="ignore"):
        scores = -np.log(u)
    flat = scores.reshape(tokens * heads, 2 * sub_keys)
    values, slots = product_key_topk_forward(flat, (sub_keys, sub_keys), k)
    with np.errstate(invalid="ignore"):
        weights = softmax_of_token(values.reshape(tokens, heads * k)).reshape(tokens, heads, k)
    by_half = np.where(np.isnan(scores), scores.dtype.type(-np.inf), scores).reshape(-1, sub_keys)
    columns = np.sort(ranked_columns(by_half, k)[1], axis=1).astype(np.int32)
    columns = columns.reshape(tokens, heads, 2, min(k, sub_keys))
    return Lookup(weights, slots.reshape(tokens, heads, k), columns, np.take_along_axis(u, columns, axis=3))


def all_distances(queries: np.ndarray, keys: np.ndarray, epsilon: float) -> np.ndarray:
    """Return u = epsilon + |q - K|^2 of every sub-key, [n, H, 2, m]."""
    u = np.empty((len(queries), *keys.shape[:3]), queries.dtype)
    halves = queries.reshape(len(queries), keys.shape[0], 2, keys.shape[3])
    for t in range(len(queries)):
        u[t] = epsilon + np.square(halves[t, :, :, None] - keys).sum(axis=-1)
    return u


def softmax_of_token(scores: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis."""
    shifted = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def differences(queries: np.ndarray, keys: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return q(m) - K[a, m, j] for the columns j given, [n, H, 2, c, h]."""
    head, half = np.indices(keys.shape[:2])[:, None, :, :, None]
    return queries.reshape(len(queries), keys.shape[0], 2, 1, keys.shape[3]) - keys[head, half, columns]


def _add_to_keys(keys: np.ndarray, columns: np.ndarray, terms: np.ndarray) -> np.ndarray:
    """Add terms [n, H, 2, c, h] to the sub-keys that `columns` name, in the order of the tokens; return `keys`."""
    head, half = np.indices(keys.shape[:2])[:, :, :, None]
    for t in range(len(columns)):
        keys[head, half, columns[t]] += terms[t]  # a token's columns are distinct
    return keys


def distances_backward(
    ddistances: np.ndarray, queries: np.ndarray, keys: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return dq = sum_j 2 du_j (q - K_j) and dK_j = -sum_t 2 du_tj (q_t - K_j).

    Parameters
    ----------
    ddistances : array [n, H, 2, c]
        Gradient of u at the columns given.
    queries, keys : as in the forward
    columns : array [n, H, 2, c], int32

    Returns
    -------
    dqueries : array [n, H, 2h]
    dkeys : array [H, 2, m, h]
    """
    terms = 2 * ddistances[..., None] * differences(queries, keys, columns)
    return terms.sum(axis=3).reshape(queries.shape), _add_to_keys(np.zeros_like(keys), columns, -terms)


def key_step_forward(rates: np.ndarray, queries: np.ndarray, keys: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return K_j - sum_t rate_tj (q_t - K_j), all differences from the keys given; [H, 2, m, h]."""
    return _add_to_keys(keys.copy(), columns, -rates[..., None] * differences(queries, keys, columns))


def key_step_backward(
    dkeys: np.ndarray, rates: np.ndarray, queries: np.ndarray, keys: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the step's gradients, given G = dL/dK after it.

    drate_tj = -<G_j, q_t - K_j>,  dq_t = -sum_j rate_tj G_j,  dK_j = (1 + sum_t rate_tj) G_j
    """
    head, half = np.indices(keys.shape[:2])[:, None, :, :, None]
    upstream = dkeys[head, half, columns]
    drates = -(upstream * differences(queries, keys, columns)).sum(axis=-1)
    terms = rates[..., None] * upstream
    dqueries = -terms.sum(axis=3).reshape(queries.shape)
    return drates, dqueries, _add_to_keys(dkeys.copy(), columns, terms)
