"""The small equations of Fast-weight Product Key Memory: weights, steps and their derivatives (docs/fwpkm.md).

Everything here is O(tokens x slots read) or O(tokens x D) and the same for every room; what touches rows
of the table or the sub-keys goes through a room's doors (:mod:`sdm_lite.rooms`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .rooms import Lookup

ENTROPY_FLOOR = 1e-8  # e, added to a marginal before its logarithm is taken

# ---- retrieval --------------------------------------------------------------------------------------------------


def distances_of_weights(dweights: np.ndarray, found: Lookup, sub_keys: int) -> np.ndarray:
    """Return du [n, H, 2, c] from the gradient of the weights [n, H, k].

    dscore_a = w_a (dw_a - sum_b w_b dw_b) over all heads' slots; each score passes it to both its
    columns, and ds/du = -1/u.
    """
    weights = found.weights
    mean = (weights * dweights).sum(axis=(1, 2), keepdims=True)
    dscores = weights * (dweights - mean)
    du = np.zeros_like(found.distances)
    for half, column in enumerate((found.slots // sub_keys, found.slots % sub_keys)):
        chosen = found.columns[:, :, half, :, None] == column[:, :, None, :]  # [n, H, c, k]
        du[:, :, half] = np.where(chosen, dscores[:, :, None, :], 0).sum(axis=-1)
    return -du / found.distances


# ---- value step -------------------------------------------------------------------------------------------------


def step_factor(weights: np.ndarray, scale: str) -> np.ndarray:
    """Return c_t [n] for weights [n, K]: 1 ("paper"), K ("code") or 1 / sum_a w_a^2 ("norm")."""
    if scale == "norm":
        return 1 / np.square(weights).sum(axis=1)
    return np.full(len(weights), 1 if scale == "paper" else weights.shape[1], weights.dtype)


class ValueStep(NamedTuple):
    """One chunk's pairs, ready for the value write: step_t = rate c_t g_t (target_t - retrieved_t)."""

    factor: np.ndarray  # [n] rate c_t
    gates: np.ndarray  # [n]
    error: np.ndarray  # [n, D]

    @property
    def step(self) -> np.ndarray:
        """Return what each pair adds to its slots, before weights and counts; [n, D]."""
        return (self.factor * self.gates)[:, None] * self.error


def value_step_backward(
    step: ValueStep, dstep: np.ndarray, weights: np.ndarray, scale: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (derror [n, D], dgates [n], dweights [n, K] through c_t) from dstep [n, D].

    derror = c g dstep,  dg = c <dstep, error>;  norm: dw = -2 c^2 rate g <dstep, error> w
    """
    along = (dstep * step.error).sum(axis=1)
    derror = (step.factor * step.gates)[:, None] * dstep
    if scale != "norm":
        return derror, step.factor * along, np.zeros_like(weights)
    # factor = rate / sum w^2, so that dfactor/dw = -2 w factor / sum w^2
    dfactor = step.gates * along
    through = -2 * dfactor * step.factor * step_factor(weights, "norm")
    return derror, step.factor * along, through[:, None] * weights


# ---- key step ---------------------------------------------------------------------------------------------------


def half_softmax(distances: np.ndarray) -> np.ndarray:
    """Return P, the softmax of -log u within each half's nearest columns: 1/u, normalised."""
    nearest = distances.min(axis=-1, keepdims=True, initial=np.inf) / distances
    return nearest / nearest.sum(axis=-1, keepdims=True)


def sum_by_column(numbers: np.ndarray, columns: np.ndarray, sub_keys: int) -> np.ndarray:
    """Return the sum over tokens of numbers [n, H, 2, c] at their columns: [H, 2, m], in the order of the tokens."""
    heads = columns.shape[1]
    table = np.arange(2 * heads).reshape(heads, 2, 1) * sub_keys
    flat = np.bincount((table + columns).ravel(), numbers.ravel(), 2 * heads * sub_keys)
    return flat.reshape(heads, 2, sub_keys).astype(numbers.dtype)


def at_columns(table: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return table [H, 2, m] at columns [n, H, 2, c]."""
    head, half = np.indices(table.shape[:2])[:, None, :, :, None]
    return table[head, half, columns]


def entropy_slope(marginal: np.ndarray) -> np.ndarray:
    """Return a = d/dp of p log(p + e) = log(p + e) + p / (p + e)."""
    return np.log(marginal + ENTROPY_FLOOR) + marginal / (marginal + ENTROPY_FLOOR)


def key_rates(distances: np.ndarray, columns: np.ndarray, sub_keys: int, rate: float) -> np.ndarray:
    """Return the rates [n, H, 2, c] of the key step K_j -= sum_t rates_tj (q_t - K_j).

    The address loss is the sum over heads, halves and sub-keys of p log(p + e), p = mean_t P_t::

        r_tj = P_tj (a_j - sum_l P_tl a_l) / M,   rates = 2 rate r / u
    """
    chosen = half_softmax(distances)
    slope = at_columns(entropy_slope(sum_by_column(chosen, columns, sub_keys) / len(columns)), columns)
    centred = slope - (chosen * slope).sum(axis=-1, keepdims=True)
    return (2 * rate / len(columns)) * chosen * centred / distances


def key_rates_backward(
    drates: np.ndarray, distances: np.ndarray, columns: np.ndarray, sub_keys: int, rate: float
) -> np.ndarray:
    """Return du [n, H, 2, c] from the gradient of `key_rates`."""
    chosen = half_softmax(distances)
    marginal = sum_by_column(chosen, columns, sub_keys) / len(columns)
    slope = at_columns(entropy_slope(marginal), columns)
    centred = slope - (chosen * slope).sum(axis=-1, keepdims=True)
    dr = (2 * rate / len(columns)) * drates / distances  # of P (a - sum P a)
    flow = (dr * chosen).sum(axis=-1, keepdims=True)
    dchosen = dr * centred - slope * flow
    floored = marginal + ENTROPY_FLOOR
    curvature = 1 / floored + ENTROPY_FLOOR / np.square(floored)
    dmarginal = sum_by_column(chosen * (dr - flow), columns, sub_keys) * curvature
    dchosen += at_columns(dmarginal, columns) / len(columns)
    dscores = chosen * (dchosen - (chosen * dchosen).sum(axis=-1, keepdims=True))
    return -(dscores + dr * chosen * centred) / distances


def memory_rates(slopes: np.ndarray, found: Lookup, sub_keys: int, rate: float) -> np.ndarray:
    """Return the rates [n, H, 2, c] that the values' loss L adds to the key step, from its slopes dL/dw [n, H, k].

    dL/dscore = w (slopes - sum_b w_b slopes_b) for both columns of a slot,   rates = 2 rate dL/dscore / u
    """
    return -2 * rate * distances_of_weights(slopes, found, sub_keys)


def memory_rates_backward(
    drates: np.ndarray, slopes: np.ndarray, found: Lookup, sub_keys: int, rate: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (dslopes [n, H, k], dweights [n, H, k], du [n, H, 2, c]) from the gradient of `memory_rates`."""
    over, weights = 2 * rate * drates / found.distances, found.weights
    dscores = np.zeros_like(weights)  # of dL/dscore
    for half, column in enumerate((found.slots // sub_keys, found.slots % sub_keys)):
        chosen = found.columns[:, :, half, :, None] == column[:, :, None, :]  # [n, H, c, k]
        dscores += np.where(chosen, over[:, :, half, :, None], 0).sum(axis=2)
    mean, flow = ((weights * x).sum(axis=(1, 2), keepdims=True) for x in (slopes, dscores))
    ddistances = -drates * memory_rates(slopes, found, sub_keys, rate) / found.distances
    return weights * (dscores - flow), dscores * (slopes - mean) - slopes * flow, ddistances
