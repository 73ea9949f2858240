"""The chunked (WY) form of the sparse delta rule: a second oracle, by matrices instead of a token loop.

Within a chunk, let span(s, t, u) <= 0 be the sum of slot u's log decays over its writes at tokens
s < r <= t, and span(t, u) that from the chunk's start. With K, Q [C, U] the weights spread over the U
slots that the chunk touches (zero elsewhere), M the rows at the chunk's start and delta [C, D]::

    A[t, s]  = sum_u K[t, u] K[s, u] exp(span(s, t, u))                       s < t
    (I + diag(beta) A) delta = diag(beta) (V - (K * exp(span)) M)             unit lower triangular
    P[t, s]  = sum_u Q[t, u] K[s, u] exp(span(s, t, u))                       s <= t
    Y        = (Q * exp(span)) M + P delta
    M[u]    <- exp(span(C, u)) M[u] + sum_s K[s, u] exp(span(s, C, u)) delta[s]

Spans are sums of their own terms and never differences of running totals, so only numbers <= 0 are
exponentiated and a log decay of -inf is an exact zero. Rule "shared" only.
"""

from __future__ import annotations

import numpy as np

from ..rooms import DeltaInputs


def sparse_delta_chunked(inputs: DeltaInputs, state: np.ndarray, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the readings and the final state of rule "shared", `chunk` tokens at a time.

    (I + tril(beta A, -1)) delta = beta (V - retrieved), solved once per chunk.

    Parameters
    ----------
    inputs : DeltaInputs
        The seven arrays, float32 or float64, and cu_seqlens.
    state : array [S, H, N, D] or [H, N, D], dtype of the inputs
        Initial memory; left as it is.
    chunk : int
        Tokens per chunk, at least 1.

    Returns
    -------
    readings : array [B, T, H, D]
    final_state : array [S, H, N, D]

    Examples
    --------
    >>> one = np.ones((1, 2, 1, 1))
    >>> slots = np.zeros((1, 2, 1, 1), dtype=np.int32)
    >>> inputs = DeltaInputs(one, slots, one, 0 * one, 0.5 * one[..., 0], slots, one)
    >>> sparse_delta_chunked(inputs, np.zeros((1, 1, 1)), chunk=2)[0].ravel()
    array([0.5 , 0.75])
    """
    batch, tokens, heads, _ = inputs.values.shape
    if inputs.cu_seqlens is None:
        edges = [(b, 0, tokens) for b in range(batch)]
    else:
        edges = [(0, *pair) for pair in np.stack([inputs.cu_seqlens[:-1], inputs.cu_seqlens[1:]], axis=1).tolist()]
    memory = np.array(np.broadcast_to(state, (len(edges), *state.shape[-3:])))
    readings = np.zeros_like(inputs.values)
    for s, (b, first, last) in enumerate(edges):
        for start in range(first, last, chunk):
            piece = slice(start, min(start + chunk, last))
            for h in range(heads):
                x = DeltaInputs(*(array[b, piece, h] for array in inputs[:7]))
                readings[b, piece, h] = _chunk_step(x, memory[s, h])
    return readings, memory


def _chunk_step(x: DeltaInputs, memory: np.ndarray) -> np.ndarray:
    """Run one chunk of one lane: return its readings [C, D] and bring `memory` [N, D] to its end."""
    tokens = len(x.values)
    touched = np.unique(np.concatenate([x.write_slots.ravel(), x.read_slots.ravel()]))
    write_weights = _spread(x.write_weights, x.write_slots, touched)
    read_weights = _spread(x.read_weights, x.read_slots, touched)
    log_decay = _spread(np.broadcast_to(x.log_decay, x.write_slots.shape), x.write_slots, touched)
    rows = memory[touched]

    from_start = np.exp(np.cumsum(log_decay, axis=0))
    retrieved = (write_weights * from_start) @ rows
    write_write = np.zeros((tokens, tokens), rows.dtype)
    read_write = np.zeros((tokens, tokens), rows.dtype)
    to_end = np.zeros_like(write_weights)
    for s in range(tokens):
        span = np.cumsum(np.where(np.arange(tokens)[s:, None] > s, log_decay[s:], 0), axis=0)
        written = write_weights[s] * np.exp(span)
        write_write[s:, s] = (write_weights[s:] * written).sum(axis=1)
        read_write[s:, s] = (read_weights[s:] * written).sum(axis=1)
        to_end[s] = written[-1]

    system = np.eye(tokens, dtype=rows.dtype) + np.tril(x.beta[:, None] * write_write, -1)
    delta = np.linalg.solve(system, x.beta[:, None] * (x.values - retrieved))
    readings = (read_weights * from_start) @ rows + read_write @ delta
    memory[touched] = from_start[-1][:, None] * rows + to_end.T @ delta
    return readings


def _spread(weights: np.ndarray, slots: np.ndarray, touched: np.ndarray) -> np.ndarray:
    """Return weights [C, W] at their slots' places among the touched ones: [C, U], zero elsewhere."""
    spread = np.zeros((len(slots), len(touched)), weights.dtype)
    np.put_along_axis(spread, np.searchsorted(touched, slots), weights, axis=1)
    return spread
