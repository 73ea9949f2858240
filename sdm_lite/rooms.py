"""What a room is: the canonical form of a call, and the doors that every room has.

A *room* is one implementation of the operations: ``reference`` (NumPy, reads like the equations),
``cpu`` (Numba), ``cuda`` (raw CUDA and Numba CUDA). The public functions of :mod:`sdm_lite.ops`
check a call, bring it into the canonical form below and walk through one room's door. Rooms never
import each other, and a room that cannot serve a call raises.

Doors (the same names, parameters and defaults in every room; a test compares them)::

    product_key_topk_forward(scores [n, sum(widths)], widths, k) -> values [n, k], slots [n, k] int32
    product_key_topk_backward(dvalues [n, k], slots [n, k], widths) -> dscores [n, sum(widths)]
    hash_slots_forward(ids [n] int64, num_slots, k, seed) -> slots [n, k] int32
    values_are_fine(inputs, num_slots) -> whether slots ascend in range and decays are <= 0; if not, it may be right yet
    sparse_delta_forward(inputs, state, options, *, save=False, final=False)
        -> readings [B, T, H, D], final_state or None, saved or None       state is left as it is
    sparse_delta_update(inputs, state, options) -> readings                state [S, H, N, D] in place
    sparse_delta_backward(inputs, options, saved, dreadings, dfinal, state_shape) -> DeltaGradients
        dfinal is None where the final state has no gradient; state_shape is None where none is wanted for the state
    idw_product_key_topk_forward(queries [n, H, 2h], keys [H, 2, m, h], k, epsilon) -> Lookup
    distances_backward(ddistances [n, H, 2, c], queries, keys, columns) -> dqueries, dkeys
    key_step_forward(rates [n, H, 2, c], queries, keys, columns) -> keys after the step
    key_step_backward(dkeys, rates, queries, keys, columns) -> drates, dqueries, dkeys before the step
    embedding_bag_forward(values [S, D], slots [n, K], weights [n, K]) -> readings [n, D]
    embedding_bag_backward(dreadings [n, D], slots, weights, num_slots) -> dvalues [num_slots, D]
    embedding_bag_weights_backward(dreadings, values, slots) -> dweights [n, K]
    number_slots(slots [n, K], num_slots) -> the distinct slots [U] int32, ascending, and each slot's place there

:class:`sdm_lite.MemoryState` is no door: an index of rows, their pages and the kernels over both belong together, and
exist in the cpu room alone (cpu/overlay.py, cpu/paged.py).
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import compile_notice
from .errors import BackendError, message

#: arrays in `saved`, whatever the room (a room pads with empty arrays), so that a caller which can
#: carry only a flat list of arrays knows its length
SAVED_ARRAYS = 8


class DeltaInputs(NamedTuple):
    """The seven arrays of a sparse delta call, checked, in the compute dtype (float32 or float64).

    C-contiguous; slots are int32; `log_decay` is [B, T, H, 1] (a decay per head) or [B, T, H, W]
    (a decay per written slot). `cu_seqlens` is int64 [S + 1], or None for S = B sequences of T tokens.
    """

    values: Any
    write_slots: Any
    write_weights: Any
    log_decay: Any
    beta: Any
    read_slots: Any
    read_weights: Any
    cu_seqlens: Any = None


class DeltaGradients(NamedTuple):
    """Gradients of a sparse delta call, in the compute dtype; `initial_state` has the state's shape, or is None."""

    values: Any
    write_weights: Any
    log_decay: Any
    beta: Any
    read_weights: Any
    initial_state: Any


class Lookup(NamedTuple):
    """What a retrieval by distance found for n tokens (docs/fwpkm.md); floats in the compute dtype.

    `columns` are the c = min(k, m) nearest sub-keys of each half, ascending, and `distances` their
    epsilon + |q - K|^2; the slots are made of these columns alone.
    """

    weights: Any  # [n, H, k], summing to 1 over a token's H k slots
    slots: Any  # [n, H, k] int32, ascending
    columns: Any  # [n, H, 2, c] int32
    distances: Any  # [n, H, 2, c]

    def of(self, tokens: Any) -> Lookup:
        """Return what was found for these tokens alone."""
        return Lookup._make(x[tokens] for x in self)


@dataclass(frozen=True)
class DeltaOptions:
    """How a sparse delta call is computed; the fields are those of the public op.

    `state_dtype` is "float64", "float32", "bfloat16" or "float16". A 16-bit state is handed to a
    room as its bits (uint16); written rows are rounded to it at every token.
    """

    rule: str = "shared"
    restore: str = "hybrid"
    restore_tau: float = math.log(10.0)
    snapshot_dtype: str | None = None
    state_dtype: str = "float32"


_ROOMS = {"reference": "sdm_lite.reference", "cpu": "sdm_lite.cpu", "cuda": "sdm_lite.cuda_kernels"}


def backends() -> dict[str, str]:
    """Return, for each room, ``"ready"`` or the reason why it is not.

    >>> backends()["reference"]
    'ready'
    """
    return {name: _load(name).unavailable() or "ready" for name in _ROOMS}


def room(name: str, op: str) -> Any:
    """Return the module that serves room `name`, or raise BackendError with what it needs."""
    if name not in _ROOMS:
        raise BackendError(message(op, "backend", f"one of {sorted(_ROOMS)}", repr(name), "name one of these, or None"))
    module = _load(name)
    reason = module.unavailable()
    if reason:
        raise BackendError(
            message(op, "backend", "a room that is ready", f"{name!r} ({reason})", "name one of sdm_lite.backends()")
        )
    return module


def _load(name: str) -> Any:
    if name == "cpu":
        compile_notice.listen()
    return importlib.import_module(_ROOMS[name])
