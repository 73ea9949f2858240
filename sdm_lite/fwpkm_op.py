"""`fwpkm`: a call of Fast-weight Product Key Memory for any kind of array, and its checks."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import arrays, rooms, validate
from .errors import DeviceError, DtypeError, ValueRangeError, message
from .fwpkm_chunks import StreamCall, StreamOptions
from .fwpkm_stream import stream_forward
from .placement import host_backend
from .product_key_memory import check_epsilon, check_number

__all__ = ["fwpkm"]

_MOST_TOKENS = 2**63 - 1  # an operand of a torch op is an int64
_RATE_FIX = "1.0 is the default"


def fwpkm(
    queries: Any,
    values: Any,
    gates: Any,
    state: Any,
    *,
    k: int = 8,
    chunk: int = 512,
    lookahead: int = 1,
    pairs: str = "drop",
    scale: str = "norm",
    value_rate: float = 1.0,
    key_rate: float = 1.0,
    epsilon: float = 1e-3,
    update: bool = True,
    mask: Any = None,
    detach_every: int | None = None,
    mse_to_keys: bool = False,
    backend: str | None = None,
) -> tuple[Any, Any]:
    """Read a stream from fast weights, and write each complete chunk into them (docs/fwpkm.md)::

        retrieved_t = sum_a w_ta V[slot_ta]            with the chunk's entry weights
        V_i += (value_rate / N_i) sum over reads of i of c_t g_t w_ta (v_{t + lookahead} - retrieved_t)
        K_j -= key_rate * gradient of sum_j p_j log p_j,   p the chunk's mean use of each half's sub-keys

    Chunks lie on the stream's own grid and both steps start from a chunk's entry weights, so the result does not
    depend on how the stream is cut into calls. Gradients flow through reads and writes of one call back to its
    start, and to the arrays that a state was made from in the first call after; between calls nothing flows.

    Parameters
    ----------
    queries : array [B, T, H, 2h], float
    values : array [B, T, D], float
        Read as targets by the writes.
    gates : array [B, T], float
        Strength g of each token's write.
    state : FwPKMState
        Left as it is.
    k, chunk, lookahead : int
        Slots per head; tokens of a chunk; how far ahead of a token its target lies, below `chunk`.
    pairs : {"drop", "carry", "wrap"}
        What a chunk's last `lookahead` tokens do: write nothing; write in the next chunk, towards its first tokens;
        or write towards the first tokens of their own chunk.
    scale : {"norm", "paper", "code"}
        Step factor c: 1 / sum_a w_a^2, 1, or H * k.
    value_rate, key_rate : float
        0 leaves values or keys as they are.
    epsilon : float
        Added to squared distances, > 0.
    update : bool
        False reads only: the tokens do not enter the stream.
    mask : bool array [B, T] or None
        False takes a token out of pairs, counts and the use of sub-keys; it is read all the same.
    detach_every : int or None
        Let no gradient flow back over more than this many chunk ends, counted from the call's first.
    mse_to_keys : bool
        An ablation: the key step also lowers the values' loss, sum over pairs of c_t g_t |target - retrieved|^2 / 2,
        through the weights.
    backend : str or None
        The room: "cpu" (default), "reference".

    Returns
    -------
    retrieved : array [B, T, D]
        In the dtype of `values`; arithmetic in the dtype of the state.
    state : FwPKMState
        After the last token; shares the rows that were not written.

    Raises
    ------
    ShapeError, ValueRangeError, DtypeError, DeviceError, BackendError
        Naming the argument, what was expected, what came, and the fix.

    Examples
    --------
    >>> import numpy as np
    >>> from sdm_lite import FwPKMState
    >>> keys = np.arange(4, dtype=np.float32).reshape(1, 2, 2, 1)
    >>> state = FwPKMState(keys, np.zeros((4, 1), np.float32))
    >>> queries = keys[0, :, 0].reshape(1, 1, 1, 2).repeat(2, axis=1)       # both tokens ask for slot 0
    >>> values = np.array([[[5], [7]]], np.float32)
    >>> _, state = fwpkm(queries, values, np.ones((1, 2), np.float32), state, k=1, chunk=2)
    >>> float(state.values[0, 0])                     # token 0 writes token 1's value; two tokens read the slot
    3.5
    """
    _check_state("fwpkm", state)
    rates = value_rate, key_rate, epsilon
    options = check_options("fwpkm", k, chunk, lookahead, pairs, scale, *rates, detach_every, mse_to_keys)
    after = state.fork()
    retrieved = after_call("fwpkm", (queries, values, gates), after, options, update, mask, backend)
    return retrieved, after


def _check_state(op: str, state: Any) -> None:
    from .fwpkm_state import FwPKMState

    if not isinstance(state, FwPKMState):
        fix = "make one with FwPKMState(keys, values)"
        raise DtypeError(message(op, "state", "an FwPKMState", type(state).__name__, fix))


def after_call(
    op: str, given: tuple[Any, Any, Any], state: Any, options: StreamOptions, update: Any, mask: Any, backend: Any
) -> Any:
    """Check a call, run it and bring `state` to its end; return the retrieved values. An error changes nothing."""
    update = check_flag(op, "update", update)
    named = dict(zip(("queries", "values", "gates"), given, strict=True))
    kind = arrays.common_kind(op, named)
    if kind == "dlpack":
        named = {name: arrays.to_numpy(op, name, x) for name, x in named.items()}
    queries, values, gates = named.values()
    keys, table = state.lane_shapes()
    validate.check_shape(op, "values", values, (None, None, table[1]), "[B, T, D]", "D follows the state's values")
    batch, tokens = values.shape[:2]
    fix = "H and h follow the state's keys, B and T follow values"
    validate.check_shape(op, "queries", queries, (batch, tokens, keys[0], 2 * keys[3]), "[B, T, H, 2h]", fix)
    validate.check_shape(op, "gates", gates, (batch, tokens), "[B, T]", "B and T follow values")
    for name, x in named.items():
        validate.check_dtype(op, name, x, arrays.FLOATS)
    validate.check_topk(op, options.k, keys[2] ** 2, "lower k or use more sub-keys")
    check_in_dtype(op, options, state.dtype.name)
    valid = _mask(op, mask, (batch, tokens))
    name = host_backend(op, kind, backend)
    rooms.room(name, op)
    bridge, dtype = _bridge(kind), state.dtype
    canonical = [bridge.canonical(x, dtype) for x in (queries, values, gates)]
    ends, retrieved = [], []
    lanes = state.lanes_for(op, batch, options, update)
    for number, lane in enumerate(lanes):
        part = slice(number, number + 1) if state.per_sequence else slice(None)
        pieces = canonical if len(lanes) == 1 else [x[part] for x in canonical]
        call, how = lane.call(pieces, valid[part], options, update, bridge.concatenate)
        reading, end = bridge.stream(call, lane, how, name, state.leaves)
        retrieved.append(reading)
        ends.append((bridge.arrays(call), *end))
    result = bridge.finish(retrieved, values)
    if update and tokens:
        state.commit(lanes, ends, options)
    return result


def check_options(
    op: str, k: Any, chunk: Any, lookahead: Any, pairs: Any, scale: Any, value_rate: Any, key_rate: Any, epsilon: Any,
    detach_every: Any, mse_to_keys: Any,
) -> StreamOptions:  # fmt: skip
    """Return the options of a call, or raise where one has a value that no stream knows."""
    counts = {"k": k, "chunk": chunk, "lookahead": lookahead}
    counts = {name: validate.whole_number(op, name, n) for name, n in counts.items()}
    if not 1 <= counts["chunk"] <= _MOST_TOKENS:
        got, fix = validate.count_text(counts["chunk"]), "512 is the default"
        raise ValueRangeError(message(op, "chunk", "1 to 2^63 - 1 tokens", got, fix))
    if not 0 <= counts["lookahead"] < max(counts["chunk"], 2):
        expected = f"0 to chunk - 1 = {counts['chunk'] - 1}"
        got = validate.count_text(counts["lookahead"])
        raise ValueRangeError(message(op, "lookahead", expected, got, "1 is the default"))
    for name, value, allowed in (
        ("pairs", pairs, ("drop", "carry", "wrap")),
        ("scale", scale, ("norm", "paper", "code")),
    ):
        if not isinstance(value, str) or value not in allowed:
            raise ValueRangeError(message(op, name, f"one of {list(allowed)}", repr(value), "name one of these"))
    rates = {"value_rate": value_rate, "key_rate": key_rate}
    rates = {name: check_number(op, name, rate, "float64", _RATE_FIX) for name, rate in rates.items()}
    epsilon = check_epsilon(op, epsilon, "float64")
    if detach_every is not None:
        detach_every = validate.whole_number(op, "detach_every", detach_every)
        if not 1 <= detach_every <= _MOST_TOKENS:
            expected, got = "1 to 2^63 - 1, or None", validate.count_text(detach_every)
            raise ValueRangeError(message(op, "detach_every", expected, got, "pass None"))
    mse_to_keys = check_flag(op, "mse_to_keys", mse_to_keys)
    whole = {**counts, **rates, "pairs": pairs, "scale": scale, "epsilon": epsilon}
    return StreamOptions(**whole, detach_every=detach_every, mse_to_keys=mse_to_keys)


def check_in_dtype(op: str, options: StreamOptions, dtype: str) -> None:
    """Raise ValueRangeError where a number of the options is lost in the state's dtype."""
    check_epsilon(op, options.epsilon, dtype)
    for name in ("value_rate", "key_rate"):
        check_number(op, name, getattr(options, name), dtype, _RATE_FIX)


def check_flag(op: str, name: str, value: Any) -> bool:
    """Return an argument that is True or False, or raise DtypeError."""
    if not isinstance(value, (bool, np.bool_)):
        raise DtypeError(message(op, name, "True or False", f"{value!r:.40}", "pass a bool"))
    return bool(value)


def _mask(op: str, mask: Any, shape: tuple[int, int]) -> np.ndarray:
    if mask is None:
        return np.ones(shape, np.bool_)
    kind = arrays.kind_of(op, "mask", mask)
    validate.check_shape(op, "mask", mask, shape, "[B, T]", "B and T follow values")
    validate.check_dtype(op, "mask", mask, ("bool",))
    if kind == "torch":
        if mask.device.type != "cpu":
            got, fix = f"one on {mask.device}", "call .cpu()"
            raise DeviceError(message(op, "mask", "a tensor on cpu", got, fix))
        mask = mask.detach().numpy()
    return np.array(arrays.to_numpy(op, "mask", mask))


class _Numpy:
    """What `after_call` needs of a kind of array; the tape and torch have modules with the same functions."""

    @staticmethod
    def canonical(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return x in the dtype of the state, plain."""
        return arrays.to_float(x, dtype)

    @staticmethod
    def concatenate(parts: list[np.ndarray]) -> np.ndarray:
        """Return the parts joined along the tokens, past ones first."""
        return np.concatenate(parts, axis=1)

    @staticmethod
    def stream(call: StreamCall, lane: Any, options: StreamOptions, name: str, leaves: Any) -> tuple[np.ndarray, tuple]:
        """Return the retrieved values [P, T, D], and (keys, slots, rows) after the call."""
        room = rooms.room(name, "fwpkm")
        retrieved, keys, table, _ = stream_forward(call, lane.keys, lane.table, options, room)
        return retrieved, (keys, *table.owned())

    @staticmethod
    def arrays(call: StreamCall) -> StreamCall:
        """Return the call with plain arrays, for the state to keep."""
        return call

    @staticmethod
    def finish(retrieved: list[np.ndarray], values: np.ndarray) -> np.ndarray:
        """Return the sequences' readings as one array, in the dtype of the values."""
        joined = retrieved[0] if len(retrieved) == 1 else np.concatenate([*retrieved, np.empty((0, *values.shape[1:]))])
        return arrays.from_float(joined, values.dtype)


def _bridge(kind: str) -> Any:
    """Return the functions for a kind of array."""
    if kind == "torch":
        from . import torch_product_keys

        return torch_product_keys
    if kind == "tape":
        from .autograd import product_key_ops

        return product_key_ops
    return _Numpy
