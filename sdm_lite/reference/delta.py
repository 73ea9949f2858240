"""The sparse delta rule in NumPy: one function per equation, one loop over tokens, and its exact backward.

Shapes inside a token of one lane (one sequence and head): rows [W, D], write_weights k [W],
values v [D], beta a scalar, log_decay [1] (per head) or [W] (per written slot), read rows [R, D],
read_weights q [R]. With m~ the decayed rows and e the prediction error::

    m~_i = alpha M[i]                         i in the W written slots only; alpha = exp(log_decay) <= 1
    e    = v - sum_j k_j m~_j                 rule "shared": one prediction per token
    e_i  = v - m~_i                           rule "per_slot": one per written slot
    M[i] = m~_i + k_i beta e
    y    = sum_r q_r M[r]                     read after the token's own write

The backward walks the tokens in reverse and puts every overwritten row back from a full snapshot,
whatever `options.restore` and `options.snapshot_dtype` ask for: this room is the oracle for the
approximate ways. Sums over W or R run in the order of the slots given, sums over D in NumPy's
order, so that no result depends on how tokens are batched, packed or split.
"""

from __future__ import annotations

import numpy as np

from ..rooms import SAVED_ARRAYS, DeltaGradients, DeltaInputs, DeltaOptions


def values_are_fine(inputs: DeltaInputs, num_slots: int) -> bool:
    """Return whether each token's slots ascend within [0, num_slots) and its log decays are <= 0."""
    slots = [x for x in (inputs.write_slots, inputs.read_slots) if x.size]
    inside = all(((x >= 0) & (x < num_slots)).all() and (np.diff(x, axis=-1) > 0).all() for x in slots)
    return inside and bool((inputs.log_decay <= 0).all())


# ---- one token: the equations ---------------------------------------------------------------------------------


def decay(rows: np.ndarray, log_decay: np.ndarray) -> np.ndarray:
    """Return m~_i = exp(log_decay_i) M[i]."""
    return np.exp(log_decay)[:, None] * rows


def decay_backward(ddecayed: np.ndarray, rows: np.ndarray, log_decay: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return drows = alpha dm~ and dlog_decay = alpha <dm~, M[i]>, summed over i for a decay per head.

    A product, never a quotient: it is exactly 0 where alpha is 0.
    """
    alpha = np.exp(log_decay)
    dlog_decay = alpha * (ddecayed * rows).sum(axis=1)
    if len(log_decay) == 1:
        dlog_decay = dlog_decay.sum(keepdims=True)
    return alpha[:, None] * ddecayed, dlog_decay


def residual_shared(values: np.ndarray, weights: np.ndarray, decayed: np.ndarray) -> np.ndarray:
    """Return e = v - sum_j k_j m~_j, shape [D]."""
    return values - (weights[:, None] * decayed).sum(axis=0)


def residual_per_slot(values: np.ndarray, weights: np.ndarray, decayed: np.ndarray) -> np.ndarray:
    """Return e_i = v - m~_i, shape [W, D]; the weights play no part here."""
    return values - decayed


def write(decayed: np.ndarray, weights: np.ndarray, beta: np.floating, error: np.ndarray) -> np.ndarray:
    """Return M[i] = m~_i + k_i delta with delta = beta e."""
    return decayed + weights[:, None] * (beta * error)


def write_shared_backward(drows, decayed, weights, beta, error):
    """Return (dv, dk, dbeta, dm~) of residual_shared and write together; drows is g.

    ddelta = sum_i k_i g_i;  dv = beta ddelta;  dk_i = <g_i, beta e> - beta <ddelta, m~_i>;
    dbeta = <ddelta, e>;  dm~_i = g_i - beta k_i ddelta
    """
    ddelta = (weights[:, None] * drows).sum(axis=0)
    dweights = (drows * (beta * error)).sum(axis=1) - beta * (ddelta * decayed).sum(axis=1)
    return beta * ddelta, dweights, (ddelta * error).sum(), drows - beta * weights[:, None] * ddelta


def write_per_slot_backward(drows, decayed, weights, beta, error):
    """Return (dv, dk, dbeta, dm~) of residual_per_slot and write together; drows is g.

    dv = beta sum_i k_i g_i;  dk_i = <g_i, beta e_i>;  dbeta = sum_i k_i <g_i, e_i>;  dm~_i = (1 - beta k_i) g_i
    """
    inner = (drows * error).sum(axis=1)
    dvalues = beta * (weights[:, None] * drows).sum(axis=0)
    return dvalues, beta * inner, (weights * inner).sum(), (1 - beta * weights)[:, None] * drows


def read(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return y = sum_r q_r M[r]."""
    return (weights[:, None] * rows).sum(axis=0)


def read_backward(dreading: np.ndarray, rows: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return dM[r] = q_r dy and dq_r = <M[r], dy>."""
    return weights[:, None] * dreading, (rows * dreading).sum(axis=1)


RULES = {
    "shared": (residual_shared, write_shared_backward),
    "per_slot": (residual_per_slot, write_per_slot_backward),
}


# ---- how rows are stored --------------------------------------------------------------------------------------


def decode_rows(stored: np.ndarray, state_dtype: str, dtype: np.dtype) -> np.ndarray:
    """Return stored rows as a new array of the compute dtype; 16-bit states are stored as their bits (uint16).

    >>> decode_rows(np.array([0x3F80], dtype=np.uint16), "bfloat16", np.dtype(np.float32))
    array([1.], dtype=float32)
    """
    if state_dtype == "bfloat16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(dtype)
    if state_dtype == "float16":
        return stored.view(np.float16).astype(dtype)
    return stored.astype(dtype)


def encode_rows(rows: np.ndarray, state_dtype: str) -> np.ndarray:
    """Return rows rounded to the state's dtype (to nearest, ties to even), 16-bit ones as their bits (uint16).

    >>> [hex(bits) for bits in encode_rows(np.array([257, 259, np.nan], dtype=np.float32), "bfloat16")]
    ['0x4380', '0x4382', '0x7fc0']
    """
    if state_dtype == "bfloat16":
        bits = rows.astype(np.float32).view(np.uint32)
        high = bits >> np.uint32(16)
        # half of the last kept bit, less one where that bit is even: a carry then rounds half to even
        rounded = (bits + np.uint32(0x7FFF) + (high & np.uint32(1))) >> np.uint32(16)
        # the carry could turn a NaN into an infinity or a zero; keep it a (quiet) NaN
        return np.where(np.isnan(rows), high | np.uint32(0x40), rounded).astype(np.uint16)
    if state_dtype == "float16":
        with np.errstate(over="ignore"):  # beyond 65504 a half is inf, as IEEE 754 has it
            return rows.astype(np.float16).view(np.uint16)
    return rows.astype(state_dtype)


# ---- the doors ------------------------------------------------------------------------------------------------


def sparse_delta_forward(
    inputs: DeltaInputs, state: np.ndarray, options: DeltaOptions, *, save: bool = False, final: bool = False
) -> tuple[np.ndarray, np.ndarray | None, tuple[np.ndarray, ...] | None]:
    """Run the recurrence over all tokens of all sequences and leave `state` as it is.

    M[i] = m~_i + k_i beta e for the written slots, then y = sum_r q_r M[r], token after token.

    Parameters
    ----------
    inputs : DeltaInputs
        The seven arrays in the compute dtype (float32 or float64), and cu_seqlens.
    state : array [S, H, N, D], or [H, N, D] shared by all sequences
        Initial memory in its own dtype; uint16 bits for bfloat16 and float16.
    options : DeltaOptions
        `rule` and `state_dtype` are used; the backward is exact whatever the others say.
    save : bool
        Keep what the backward needs.
    final : bool
        Return the memory after the last token.

    Returns
    -------
    readings : array [B, T, H, D], compute dtype
    final_state : array [S, H, N, D] in the state's dtype, or None
    saved : tuple of SAVED_ARRAYS arrays, or None
        The final table [S, H, N, D], the overwritten rows [B, T, H, W, D], empty arrays.

    Examples
    --------
    >>> one = np.ones((1, 1, 1, 1))
    >>> slots = np.zeros((1, 1, 1, 1), dtype=np.int32)
    >>> inputs = DeltaInputs(8 * one, slots, one, np.log(0.5 * one), 0.5 * one[..., 0], slots, one)
    >>> sparse_delta_forward(inputs, 4 * one, DeltaOptions(state_dtype="float64"))[0].item()
    5.0
    """
    sequences = len(_spans(inputs))
    table = np.array(np.broadcast_to(state, (sequences, *state.shape[-3:])), order="C")
    batch, tokens, heads, width = inputs.values.shape
    writes = inputs.write_slots.shape[3]
    overwritten = np.empty((batch, tokens, heads, writes, width), table.dtype) if save else None
    readings = _run(inputs, table, options, overwritten)
    saved = None
    if overwritten is not None:
        padding = (np.empty(0, inputs.values.dtype),) * (SAVED_ARRAYS - 2)
        saved = (table, overwritten, *padding)
    # the caller may write on the final state, the saved table has to stay
    final_state = (table.copy() if save else table) if final else None
    return readings, final_state, saved


def sparse_delta_update(inputs: DeltaInputs, state: np.ndarray, options: DeltaOptions) -> np.ndarray:
    """Run the recurrence in place on `state` [S, H, N, D] and return the readings [B, T, H, D].

    Parameters and dtypes are those of :func:`sparse_delta_forward`; only written rows are touched.
    """
    return _run(inputs, state, options, None)


def sparse_delta_backward(
    inputs: DeltaInputs,
    options: DeltaOptions,
    saved: tuple[np.ndarray, ...],
    dreadings: np.ndarray,
    dfinal: np.ndarray | None,
    state_shape: tuple[int, ...] | None,
) -> DeltaGradients:
    """Return the gradients of the inputs and of the initial state, in the compute dtype.

    G = dL/dM starts as `dfinal` (or zero); each token, last to first, adds its reading's part to G,
    passes G of its written rows through the write, and puts the overwritten rows back.

    Parameters
    ----------
    inputs, options
        As given to :func:`sparse_delta_forward`.
    saved : tuple of arrays
        From the forward; left as it is, so that a second backward gives the same numbers.
    dreadings : array [B, T, H, D]
        Gradient of the readings.
    dfinal : array [S, H, N, D] or None
        Gradient of the final state.
    state_shape : tuple of int or None
        Shape of the initial state, (S, H, N, D) or (H, N, D): the shape of its gradient, which for a shared
        state is summed over the sequences in ascending order. None where that gradient is not wanted.
    """
    dtype = inputs.values.dtype
    spans = _spans(inputs)
    memory = decode_rows(saved[0], options.state_dtype, dtype)
    dstate = np.zeros(memory.shape, dtype) if dfinal is None else np.array(dfinal, dtype, order="C")
    grads = DeltaGradients(
        values=np.zeros_like(inputs.values),
        write_weights=np.zeros_like(inputs.write_weights),
        log_decay=np.zeros_like(inputs.log_decay),
        beta=np.zeros_like(inputs.beta),
        read_weights=np.zeros_like(inputs.read_weights),
        initial_state=dstate,
    )
    for s, (b, start, stop) in enumerate(spans):
        for t in reversed(range(start, stop)):
            for h in range(inputs.values.shape[2]):
                rows = decode_rows(saved[1][b, t, h], options.state_dtype, dtype)
                _token_backward(inputs, (b, t, h), options.rule, memory[s, h], dstate[s, h], rows, dreadings, grads)
    if state_shape is None:
        return grads._replace(initial_state=None)
    if len(state_shape) == 3:
        total = np.zeros(state_shape, dtype)
        for s in range(len(spans)):
            total += dstate[s]
        grads = grads._replace(initial_state=total)
    return grads


# ---- the loops ------------------------------------------------------------------------------------------------


def _spans(inputs: DeltaInputs) -> list[tuple[int, int, int]]:
    """Return (batch row, first token, end) of each sequence."""
    batch, tokens = inputs.values.shape[:2]
    if inputs.cu_seqlens is None:
        return [(b, 0, tokens) for b in range(batch)]
    edges = inputs.cu_seqlens.tolist()
    return [(0, start, stop) for start, stop in zip(edges[:-1], edges[1:], strict=True)]


def _token(inputs: DeltaInputs, at: tuple[int, int, int]) -> DeltaInputs:
    """Return the seven arrays of one token of one head: at is (b, t, h)."""
    return DeltaInputs(*(array[at] for array in inputs[:7]))


def _run(inputs: DeltaInputs, table: np.ndarray, options: DeltaOptions, overwritten: np.ndarray | None) -> np.ndarray:
    """Run all tokens on `table` [S, H, N, D] in place, log the rows they overwrite, return the readings."""
    dtype, stored_as = inputs.values.dtype, options.state_dtype
    residual, _ = RULES[options.rule]
    readings = np.zeros_like(inputs.values)
    for s, (b, start, stop) in enumerate(_spans(inputs)):
        for t in range(start, stop):
            for h in range(inputs.values.shape[2]):
                x, memory = _token(inputs, (b, t, h)), table[s, h]
                stored = memory[x.write_slots]
                if overwritten is not None:
                    overwritten[b, t, h] = stored
                decayed = decay(decode_rows(stored, stored_as, dtype), x.log_decay)
                error = residual(x.values, x.write_weights, decayed)
                memory[x.write_slots] = encode_rows(write(decayed, x.write_weights, x.beta, error), stored_as)
                readings[b, t, h] = read(decode_rows(memory[x.read_slots], stored_as, dtype), x.read_weights)
    return readings


def _token_backward(
    inputs: DeltaInputs,
    at: tuple[int, int, int],
    rule: str,
    memory: np.ndarray,
    dmemory: np.ndarray,
    overwritten: np.ndarray,
    dreadings: np.ndarray,
    grads: DeltaGradients,
) -> None:
    """Undo one token on `memory` [N, D] (after it, before it), and take `dmemory` [N, D] back across it."""
    x = _token(inputs, at)
    residual, write_backward = RULES[rule]
    dread_rows, grads.read_weights[at] = read_backward(dreadings[at], memory[x.read_slots], x.read_weights)
    dmemory[x.read_slots] += dread_rows

    decayed = decay(overwritten, x.log_decay)
    error = residual(x.values, x.write_weights, decayed)
    dvalues, dweights, dbeta, ddecayed = write_backward(dmemory[x.write_slots], decayed, x.write_weights, x.beta, error)
    grads.values[at], grads.write_weights[at], grads.beta[at] = dvalues, dweights, dbeta
    dmemory[x.write_slots], grads.log_decay[at] = decay_backward(ddecayed, overwritten, x.log_decay)
    memory[x.write_slots] = overwritten
