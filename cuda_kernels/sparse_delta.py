"""The CUDA room's doors of the sparse delta rule: sizes to launches.

The functional form works on a copy (what it then saves for the backward): of the rows that its slots name where that is
surely smaller and no final state is wanted (compact.py), else of the whole table. The in-place form works on the
caller's own. Few tokens are worked on where their rows lie (decode_step.cu), sequences are staged
(sparse_delta_forward.cu); the bits are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import arrays
from ..errors import BackendError, ValueRangeError, message
from ..rooms import SAVED_ARRAYS, DeltaGradients, DeltaInputs, DeltaOptions
from . import call as calls
from . import compact as compacts
from . import launch, modules, shared_memory, tiling
from .call import Call
from .compact import Compact
from .devices import cupy, limits_of
from .log import Log, open_log
from .shared_memory import DeltaShape

#: up to so many tokens of a sequence, planning and staging cost more than the latency that they hide
FEW_TOKENS = 4
_PARTIAL_COLUMNS = 32
_IN_PLACE = "use sparse_delta_rule_, which works in place"
_OTHER_RESTORE = 'pass restore="invert" (no log), or snapshot_dtype="bf16", "fp8" or "int4"'


def sparse_delta_forward(
    inputs: DeltaInputs, state: Any, options: DeltaOptions, *, save: bool = False, final: bool = False
) -> tuple[Any, Any | None, tuple[Any, ...] | None]:
    """Return readings, final state and what the backward needs; `state` is left as it is.

    `saved` is the table after the last token, the prediction errors, the log, and the compact form's numbering, empty
    for the whole table's; all of them flat.
    """
    with launch.on_device_of(inputs.values):
        call = calls.open_call(inputs, options, state.shape[-2])
        compact = None
        if not final and _is_compact(call, state):
            compact = compacts.number_rows(call)
            call = compact.applied(call)
            table = compacts.gather(compact, state, "a copy of the touched rows", _IN_PLACE)
        else:
            table = _own_table(call, state)
        error = log = None
        if save:
            error = call.empty((0 if call.per_slot else call.total, call.width), "saved prediction errors")
            log = open_log(call, options, _OTHER_RESTORE)
        readings = _run_forward(call, table, error, log)
        final_state = None
        if final:
            final_state = table
            if save:  # the backward's table must stay what it is, whatever the caller does with his
                final_state = launch.empty(table.shape, table.dtype, "the final state", "pass output_final_state=False")
                final_state[...] = table
        if not save:
            return readings, final_state, None
        kept = [x.reshape(-1) for x in (table, error, log.rows, log.scales, log.place)]  # type: ignore[union-attr]
        if compact is not None:
            kept += compact.to_saved()
        nothing = cupy().empty((0,), np.float32)
        return readings, final_state, (*kept, *[nothing] * (SAVED_ARRAYS - len(kept)))


def sparse_delta_update(inputs: DeltaInputs, state: Any, options: DeltaOptions) -> Any:
    """Return readings; `state` [S, H, N, D] ends as after the last token."""
    with launch.on_device_of(inputs.values):
        call = calls.open_call(inputs, options, state.shape[-2])
        if state.flags.c_contiguous:
            return _run_forward(call, state, None, None)
        table = _own_table(call, state)
        readings = _run_forward(call, table, None, None)
        state[...] = table
        return readings


def sparse_delta_backward(
    inputs: DeltaInputs,
    options: DeltaOptions,
    saved: tuple[Any, ...],
    dreadings: Any,
    dfinal: Any | None,
    state_shape: tuple[int, ...] | None,
) -> DeltaGradients:
    """Return the gradients; `saved` is left as it is, so that a second backward gives the same numbers.

    The walk needs the gradient of the saved table's rows in any case, in float32; it is not returned where
    `state_shape` is None.
    """
    with launch.on_device_of(inputs.values):
        rows = saved[0].view(_state_dtype(options))
        batch, _, heads, width = inputs.values.shape
        sequences = batch if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
        slots = rows.size // max(sequences * heads * width, 1) if state_shape is None else state_shape[-2]
        call = calls.open_call(inputs, options, slots)
        compact = Compact.from_saved(call, *saved[5:8])
        shape: tuple[int, ...] = (sequences, heads, slots, width)
        if compact is not None:
            assert dfinal is None, "a final state is the whole form's"
            call, shape = compact.applied(call), (compact.rows.size, width)
        log = Log.restored(call, options, saved[2], saved[3], saved[4])
        table, call = _table_to_undo(call, rows.reshape(shape), log, options)
        grad = launch.zeros(shape, call.dtype, "the gradient of the state", "lower slots or batch")
        if dfinal is not None:
            grad[...] = dfinal
        target = inputs.values if call.per_slot else saved[1].view(call.dtype)
        found = _run_backward(call, table, grad, target, dreadings, log)
        if state_shape is None:
            return found
        if compact is not None:
            return found._replace(initial_state=compacts.scatter(compact, call, grad, state_shape))
        return found._replace(initial_state=grad.sum(axis=0) if len(state_shape) == 3 else grad)


def _is_compact(call: Call, state: Any) -> bool:
    """Return whether a call copies the touched rows alone; a graph's capture may not wait for their number."""
    uses = call.total * call.rows_per_token
    smaller = compacts.is_smaller(call.lanes, call.slots, uses, call.width, state.dtype.itemsize)
    return smaller and state.flags.c_contiguous and not launch.is_capturing()


def _own_table(call: Call, state: Any) -> Any:
    """Return a copy [S, H, N, D] of a state, or of one memory shared by all sequences."""
    shape = (call.lanes // max(call.heads, 1), call.heads, call.slots, call.width)
    table = launch.empty(shape, state.dtype, "a copy of the state", _IN_PLACE)
    table[...] = state
    return table


def _state_dtype(options: DeltaOptions) -> np.dtype:
    half = options.state_dtype in ("bfloat16", "float16")
    return np.dtype(np.uint16 if half else options.state_dtype)


def _table_to_undo(call: Call, rows: Any, log: Log, options: DeltaOptions) -> tuple[Any, Call]:
    """Return a copy of the saved table, and the call over it: rows of a 16-bit state that are inverted need float32."""
    what, fix = "a copy of the table for the backward", "shorten the batch"
    state = _undone_state(call, log)
    if state == call.state:
        table = launch.empty(rows.shape, rows.dtype, what, fix)
        table[...] = rows
        return table, call
    table = launch.empty(rows.shape, np.float32, what, 'pass restore="snapshot", which keeps a 16-bit table')
    table[...] = arrays.widen_state(rows, options.state_dtype)
    return table, call._replace(state=state)


def _undone_state(call: Call, log: Log) -> str:
    """Return the C++ name of the state that the backward works on: rows that are inverted are no 16-bit numbers."""
    return call.state if log.is_complete or call.real == "double" else "float"


def _run_forward(call: Call, table: Any, error: Any | None, log: Log | None) -> Any:
    readings = call.empty(call.inputs.values.shape, "readings")
    if not readings.size:
        return readings
    cut = None if call.tokens <= FEW_TOKENS and log is None else _cut_forward(call, log)
    if cut is None and log is not None:
        raise _too_many_rows(call, "a forward whose gradients are wanted")
    if cut is None:
        _decode(call, table, readings)
        return readings
    if log is not None:
        _prepare_training(call, log, cut)
    x = call.inputs
    launch.launch(
        "sparse_delta_forward.cu", _kernel("sparse_delta_forward", call, cut.tile), _grid(call, cut), 4 * cut.tile,
        (table, call.row_start, x.values, x.write_weights, decay_factors(call), x.beta, x.read_weights, readings,
         None if error is None or call.per_slot else error, *_log_arguments(log),
         *calls.make_plan(call, cut.row_budget), *_budgets(cut), call.cu_seqlens,
         *call.numbers("heads", "tokens", "width", "writes", "reads", "decays")),
        cut.shared_bytes,
    )  # fmt: skip
    return readings


def _prepare_training(call: Call, log: Log, forward: tiling.Tiling) -> None:
    """Compile what forward and backward will launch: all of it is known here, and compiles side by side."""
    undone = call._replace(state=_undone_state(call, log))
    backward = _cut_backward(undone, log)
    if backward is None:
        return  # the backward says why
    rule = _c(call.per_slot)
    wanted = [
        ("sparse_delta_forward.cu", _kernel("sparse_delta_forward", call, forward.tile)),
        ("sparse_delta_backward.cu", _kernel("sparse_delta_backward", undone, backward.tile)),
        ("sparse_delta_gates.cu", f"decay_factors<{call.real}>"),
        ("sparse_delta_gates.cu", f"undo_factors<{call.real}, {rule}>"),
        ("sum_partials.cu", f"sum_partials<{call.real}, {rule}>"),
        ("plan.cu", calls.PLAN_ROWS),
    ]
    modules.prepare(wanted, cupy().cuda.Device().id)


def _decode(call: Call, table: Any, readings: Any) -> None:
    x, tile = call.inputs, tiling.TILES[-1]
    launch.launch(
        "decode_step.cu", _kernel("decode_step", call, tile), (call.lanes, -(-call.width // tile)), 4 * tile,
        (table, call.row_start, x.values, x.write_slots, x.write_weights, x.log_decay, x.beta, x.read_slots,
         x.read_weights, readings, call.cu_seqlens,
         *call.numbers("heads", "tokens", "width", "writes", "reads", "decays")),
        shared_memory.decode_bytes(_shape(call, tile, 0, 0, None)),
    )  # fmt: skip


def _run_backward(call: Call, table: Any, grad: Any, target: Any, dreadings: Any, log: Log) -> DeltaGradients:
    x = call.inputs
    dvalues, dk, dq = (call.empty(a.shape, "gradients") for a in (x.values, x.write_weights, x.read_weights))
    ddecay, dbeta = call.empty(x.log_decay.shape, "gradients"), call.empty(x.beta.shape, "gradients")
    if not dvalues.size:
        for gradient in (dk, dq, ddecay, dbeta):
            gradient.fill(0)
        return DeltaGradients(dvalues, dk, ddecay, dbeta, dq, None)
    cut = _cut_backward(call, log)
    if cut is None:
        raise _too_many_rows(call, "the backward")
    blocks = -(-call.width // _PARTIAL_COLUMNS)
    dk_parts, ddecay_parts, dq_parts = (
        call.empty((blocks, call.total, n), "partial sums of gradients") for n in (call.writes, call.writes, call.reads)
    )
    dbeta_parts = None if call.per_slot else call.empty((blocks, call.total), "partial sums of gradients")
    alpha = decay_factors(call)
    launch.launch(
        "sparse_delta_backward.cu", _kernel("sparse_delta_backward", call, cut.tile), _grid(call, cut), 4 * cut.tile,
        (table, grad, call.row_start, target, dreadings, x.write_weights, alpha, _undo_factors(call, alpha),
         x.beta, x.read_weights, dvalues, dk_parts, ddecay_parts, dbeta_parts, dq_parts, *_log_arguments(log),
         *calls.make_plan(call, cut.row_budget), *_budgets(cut), call.cu_seqlens, np.int64(call.total),
         *call.numbers("heads", "tokens", "width", "writes", "reads", "decays")),
        cut.shared_bytes,
    )  # fmt: skip
    launch.launch(
        "sum_partials.cu", f"sum_partials<{call.real}, {_c(call.per_slot)}>", launch.over(call.total, 4), 128,
        (dk_parts, ddecay_parts, dbeta_parts, dq_parts, x.beta, x.write_weights, dk, ddecay, dbeta, dq,
         np.int64(call.total), np.int32(blocks), *call.numbers("writes", "reads", "decays")),
    )  # fmt: skip
    return DeltaGradients(dvalues, dk, ddecay, dbeta, dq, None)


def decay_factors(call: Call) -> Any:
    """Return exp(log_decay)."""
    log_decay = call.inputs.log_decay
    alpha = call.empty(log_decay.shape, "decays")
    arguments = (log_decay, alpha, np.int64(alpha.size))
    launch.launch("sparse_delta_gates.cu", f"decay_factors<{call.real}>", launch.over(alpha.size, 256), 256, arguments)
    return alpha


def _undo_factors(call: Call, alpha: Any) -> Any:
    x = call.inputs
    inverse = call.empty(x.write_weights.shape if call.per_slot else alpha.shape, "inverses of decays")
    launch.launch(
        "sparse_delta_gates.cu", f"undo_factors<{call.real}, {_c(call.per_slot)}>",
        launch.over(inverse.size, 256), 256,
        (alpha, x.beta, x.write_weights, inverse, np.int64(inverse.size), *call.numbers("writes", "decays")),
    )  # fmt: skip
    return inverse


def _cut_forward(call: Call, log: Log | None) -> tiling.Tiling | None:
    bits = None if log is None or log.is_empty else log.bits
    return _cut(call, lambda tile, rows, tokens: shared_memory.forward_bytes(_shape(call, tile, rows, tokens, bits)))


def _cut_backward(call: Call, log: Log) -> tiling.Tiling | None:
    bits = None if log.is_empty else log.bits

    def size(tile: int, rows: int, tokens: int) -> int:
        return shared_memory.backward_bytes(_shape(call, tile, rows, tokens, bits), per_slot=call.per_slot)

    return _cut(call, size)


def _cut(call: Call, size: Any) -> tiling.Tiling | None:
    limits = limits_of(cupy().cuda.Device().id)
    tiles = tiling.TILES[-1:] if call.state == "double" else tiling.TILES
    most = min(tiling.MOST_ROWS, call.tokens * call.rows_per_token)
    return tiling.choose(limits, call.lanes, call.width, call.rows_per_token, size, tiles=tiles, most_rows=most)


def _shape(call: Call, tile: int, row_budget: int, token_budget: int, log_bits: int | None) -> DeltaShape:
    state_bytes = {"float": 4, "double": 8}.get(call.state, 2)
    sizes = (call.writes, call.reads, call.decays, row_budget, token_budget)
    return DeltaShape(tile, state_bytes, call.dtype.itemsize, *sizes, log_bits)


def _budgets(cut: tiling.Tiling) -> tuple[np.int32, np.int32]:
    return np.int32(cut.row_budget), np.int32(cut.token_budget)


def _grid(call: Call, cut: tiling.Tiling) -> tuple[int, int]:
    return call.lanes, -(-call.width // cut.tile)


def _kernel(name: str, call: Call, tile: int) -> str:
    return f"{name}<{call.state}, {tile}, {_c(call.per_slot)}>"


def _c(flag: bool) -> str:
    return "true" if flag else "false"


def _log_arguments(log: Log | None) -> tuple[Any, Any, Any, np.int32]:
    if log is None or log.is_empty:
        return None, None, None, np.int32(0)
    return log.place, log.rows, log.scales if log.scales.size else None, np.int32(log.storage)


def _too_many_rows(call: Call, what: str) -> ValueRangeError:
    expected = f"W + R rows of 32 columns that fit in shared memory twice, for {what}"
    got = f"W + R = {call.rows_per_token} rows of {call.state}"
    return ValueRangeError(
        message("sparse_delta_rule", "write_slots", expected, got, "lower W and R, or use the cpu room")
    )


def values_are_fine(inputs: DeltaInputs, num_slots: int) -> bool:
    """Return whether slots, log decays and offsets are what the kernels require; waits for the device once."""
    with launch.on_device_of(inputs.values):
        if launch.is_capturing():
            expected, got = "a call outside of graph capture", "a check, which waits for the device"
            raise BackendError(message("the cuda room", "check", expected, got, "pass check=False while capturing"))
        bad = launch.zeros((1,), np.int32, "a flag", "free some memory")
        for slots in (inputs.write_slots, inputs.read_slots):
            tokens = calls.rows_of(slots.shape)
            sizes = (np.int64(tokens), np.int32(slots.shape[-1]), np.int32(num_slots))
            launch.launch("check_values.cu", "check_slots", launch.over(tokens, 4), 128, (slots, *sizes, bad))
        decays, real = inputs.log_decay, "double" if inputs.log_decay.dtype == np.float64 else "float"
        grid = launch.over(decays.size, 128)
        launch.launch("check_values.cu", f"check_decays<{real}>", grid, 128, (decays, np.int64(decays.size), bad))
        if inputs.cu_seqlens is not None:
            count, tokens = inputs.cu_seqlens.shape[0], inputs.values.shape[1]
            arguments = (inputs.cu_seqlens, np.int32(count - 1), np.int64(tokens), bad)
            launch.launch("check_values.cu", "check_offsets", launch.over(count, 128), 128, arguments)
        return not bad.item()
