"""The CPU room's doors of the sparse delta rule: arrays in, lanes and tables, kernels over the pool, arrays out.

The functional form works on a compact table of the rows that a sequence touches (float32 for 16-bit states), forward
and backward; the in-place form works on the caller's own table where its layout allows, else on a compact one too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..rooms import DeltaGradients, DeltaInputs, DeltaOptions
from . import backward, forward, memory, overlay, paged, plan, pool, snapshot, tables
from .compile import same_types
from .forward import ROUND_BF16, ROUND_FP16, Saved, Tokens

_ROUNDING = {"bfloat16": ROUND_BF16, "float16": ROUND_FP16}
_PER_SLOT = {"shared": None, "per_slot": True}


def sparse_delta_forward(
    inputs: DeltaInputs, state: np.ndarray, options: DeltaOptions, *, save: bool = False, final: bool = False
) -> tuple[np.ndarray, np.ndarray | None, tuple[np.ndarray, ...] | None]:
    """Return readings, final state and what the backward needs; `state` is left as it is."""
    lanes = _lanes(inputs, state.ndim == 3)
    compact = plan.compact(inputs.write_slots, inputs.read_slots, lanes, state.shape[-2])
    table, source = tables.open_table(state, compact, lanes, options.state_dtype)
    inputs = inputs._replace(write_slots=compact.write_places, read_slots=compact.read_places)
    saved, codes = _plan(inputs, lanes, compact.row_start, options) if save else (_nothing_of(inputs), None)
    readings = _run_forward(inputs, options, lanes, compact.row_start, table, saved, codes, source)
    final_state = None
    if final:
        sequences = len(lanes.first) // max(lanes.stride, 1)
        whole = np.broadcast_to(state, (sequences, *state.shape)) if state.ndim == 3 else state
        final_state = np.array(whole, order="C")
        tables.scatter(final_state, table, compact, lanes.of_own_state(), options.state_dtype)
    if not save:
        return readings, final_state, None
    kept = (table, compact.row_start, compact.row_slots, compact.write_places, compact.read_places)
    log = saved.log if codes is None else codes
    return readings, final_state, (*kept, saved.error, log, saved.log_place)


def sparse_delta_update(inputs: DeltaInputs, state: np.ndarray, options: DeltaOptions) -> np.ndarray:
    """Return readings; `state` [S, H, N, D] ends as after the last token."""
    lanes = _lanes(inputs, False)
    if state.flags.c_contiguous and state.flags.aligned and options.state_dtype in ("float32", "float64"):
        slots, width = state.shape[2:]
        table = state.reshape(math.prod(state.shape[:3]), width)
        row_start = np.arange(len(lanes.first) + 1, dtype=np.int64) * slots
        return _run_forward(inputs, options, lanes, row_start, table, _nothing_of(inputs))
    compact = plan.compact(inputs.write_slots, inputs.read_slots, lanes, state.shape[-2])
    table = tables.gather(state, compact, lanes, options.state_dtype)
    inputs = inputs._replace(write_slots=compact.write_places, read_slots=compact.read_places)
    readings = _run_forward(inputs, options, lanes, compact.row_start, table, _nothing_of(inputs))
    tables.scatter(state, table, compact, lanes, options.state_dtype)
    return readings


class PagedCall(NamedTuple):
    """What the shapes of a call on a copy-on-write memory settle: calls of one token come again and again."""

    sizes: tuple[int, int, int]  # B, T, H
    tile_columns: int
    jobs: int
    work: int
    nothing: Saved
    per_slot: bool | None
    rounding: int | None
    kernel: Callable


def paged_call(x: Tokens, sizes: tuple[int, int, int], pages: paged.Paged, options: DeltaOptions) -> PagedCall:
    """Return what arrays like these settle; the n = B T H tokens lie flat, in arrays as arrays.plain has them."""
    lanes, width = sizes[0] * sizes[2], x.values.shape[1]
    tile_columns, work = _tiles(x, lanes, snapshot.NATIVE)
    nothing = _nothing(width, x.write_slots.shape[1], x.values.dtype)
    per_slot = _PER_SLOT[options.rule]
    whole_rows = pages.origin.flags.c_contiguous  # so where D = 1
    kernel = same_types(paged.sparse_delta_paged, x.values.dtype, options.state_dtype, per_slot, whole_rows)
    jobs = _jobs(lanes, width, tile_columns)
    return PagedCall(sizes, tile_columns, jobs, work, nothing, per_slot, _ROUNDING.get(options.state_dtype), kernel)


def sparse_delta_paged(
    call: PagedCall, x: Tokens, places: overlay.Places, pages: paged.Paged, num_slots: int
) -> np.ndarray:
    """Return readings [n, D]; the rows that :func:`overlay.resolve` gave these tokens end as after the last one."""
    readings = memory.empty(x.values.shape, x.values.dtype)
    _, tokens, heads = call.sizes

    def job(lo: int, hi: int) -> None:
        call.kernel(
            lo, hi, call.tile_columns, heads, tokens, num_slots, pages, x, places, call.nothing, readings,
            call.per_slot, call.rounding,
        )  # fmt: skip

    pool.run(call.jobs, job, call.work)
    return readings


def sparse_delta_backward(
    inputs: DeltaInputs,
    options: DeltaOptions,
    saved: tuple[np.ndarray, ...],
    dreadings: np.ndarray,
    dfinal: np.ndarray | None,
    state_shape: tuple[int, ...] | None,
) -> DeltaGradients:
    """Return the gradients; `saved` is left as it is, so that a second backward gives the same numbers.

    The state's own gradient, as large as the state, is left out (None) where `state_shape` is None.
    """
    rows, row_start, row_slots, write_places, read_places, error, log, log_place = saved
    lanes = _lanes(inputs, state_shape is not None and len(state_shape) == 3)
    compact = plan.Compact(write_places, read_places, row_start, row_slots)
    rows, grad = memory.for_kernels(rows), _first_gradient(rows, dfinal, compact, lanes)
    inputs = inputs._replace(write_slots=write_places, read_slots=read_places)
    x = _tokens(inputs)
    storage = _storage(options)
    codes = None if storage == snapshot.NATIVE else log
    kept = Saved(error, log if codes is None else rows[:0], log_place)

    width = rows.shape[1]
    tile_columns, work = _tiles(inputs, len(lanes.first), storage)
    group_columns = forward.group_width(width)
    parts = 1 if tile_columns >= width else -(-width // group_columns)
    partials = _partials(inputs, parts, rows.dtype)
    dvalues = memory.empty(inputs.values.shape, inputs.values.dtype)
    flat_dreadings, flat_dvalues, per_slot = _flat(dreadings), _flat(dvalues), _PER_SLOT[options.rule]
    table, spare = memory.empty(rows.shape, rows.dtype), np.zeros((1 + len(lanes.first), width), rows.dtype)
    start = memory.origin(width, rows.dtype)
    rows_at, grad_at, zero_at = (memory.elements_to(array, start) for array in (rows, grad, spare))
    where = backward.Where(start, memory.elements_to(table, start), grad_at, zero_at + width)
    now = np.empty((max(1, -(-width // tile_columns)), len(rows), 2), np.int64)
    each = np.arange(len(rows)) * width
    now[..., 0], now[..., 1] = each + rows_at, zero_at if dfinal is None else each + grad_at
    known = plan.known_rows(write_places, read_places, lanes)
    keep = state_shape is not None
    whole_rows = start.flags.c_contiguous  # so where D = 1
    kernel = same_types(backward.sparse_delta_backward, rows.dtype, per_slot, codes is None, whole_rows)

    def job(lo: int, hi: int) -> None:
        kernel(
            lo, hi, tile_columns, group_columns, lanes.first, lanes.tokens, lanes.stride, row_start, where, now, known,
            keep, x, kept, codes, storage, flat_dreadings, flat_dvalues, partials, per_slot,
        )  # fmt: skip

    pool.run(_jobs(len(lanes.first), width, tile_columns), job, work)
    dstate = None if state_shape is None else tables.state_gradient(grad, dfinal, compact, lanes, state_shape)
    return _gradients(inputs, dvalues, partials, dstate)


def _first_gradient(
    rows: np.ndarray, dfinal: np.ndarray | None, compact: plan.Compact, lanes: plan.Lanes
) -> np.ndarray:
    """Return the table of the rows' gradients as it stands behind the last token; not filled where it is zero."""
    if dfinal is None:
        return memory.empty(rows.shape, rows.dtype)
    return tables.gather(dfinal, compact, lanes.of_own_state(), "float32")


def _partials(inputs: DeltaInputs, parts: int, dtype: np.dtype) -> backward.Partials:
    """Return room for the sums over the columns that each of `parts` tiles sees: dk, dlog_decay, dbeta, dq."""
    sizes = (inputs.write_weights.shape[-1], inputs.log_decay.shape[-1], 1, inputs.read_weights.shape[-1])
    partials = backward.Partials(*(memory.empty((parts, inputs.beta.size, n), dtype) for n in sizes))
    if not inputs.values.shape[-1]:  # no tile comes by to fill them
        for partial in partials:
            partial[:] = 0
    return partials


def _gradients(
    inputs: DeltaInputs, dvalues: np.ndarray, partials: backward.Partials, dstate: np.ndarray | None
) -> DeltaGradients:
    """Return the gradients in the shapes of their inputs, summed over the tiles in a fixed order."""
    dk, ddecay, dbeta, dq = (tables.sum_parts(partial) for partial in partials)
    return DeltaGradients(
        dvalues,
        dk.reshape(inputs.write_weights.shape),
        ddecay.reshape(inputs.log_decay.shape),
        dbeta.reshape(inputs.beta.shape),
        dq.reshape(inputs.read_weights.shape),
        dstate,
    )


def _lanes(inputs: DeltaInputs, shared_state: bool) -> plan.Lanes:
    return plan.make_lanes(*inputs.values.shape[:3], inputs.cu_seqlens, shared_state)


def _tokens(inputs: DeltaInputs) -> Tokens:
    return Tokens(
        *(_flat(x) for x in inputs[:4]), memory.for_kernels(inputs.beta).reshape(-1), *(_flat(x) for x in inputs[5:7])
    )


def _flat(x: np.ndarray) -> np.ndarray:
    return memory.for_kernels(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _storage(options: DeltaOptions) -> int:
    """Return how logged rows are stored: as asked, else exactly."""
    if options.snapshot_dtype is None and options.state_dtype == "bfloat16":
        return snapshot.BF16
    return snapshot.STORAGE[options.snapshot_dtype]


def _nothing_of(inputs: DeltaInputs) -> Saved:
    return _nothing(inputs.values.shape[-1], inputs.write_slots.shape[-1], inputs.values.dtype)


@functools.lru_cache(maxsize=64)  # nobody can write where there are no rows
def _nothing(width: int, writes: int, dtype: np.dtype) -> Saved:
    return Saved(np.empty((0, width), dtype), np.empty((0, width), dtype), np.empty((0, writes), np.int32))


def _plan(
    inputs: DeltaInputs, lanes: plan.Lanes, row_start: np.ndarray, options: DeltaOptions
) -> tuple[Saved, np.ndarray | None]:
    """Plan the log and allocate it once, at its exact size; return it with its codes where it is not NATIVE.

    An inverted 16-bit row would be off by that dtype's rounding, so "hybrid" logs every row of a 16-bit state.
    """
    nothing, storage, width = _nothing_of(inputs), _storage(options), inputs.values.shape[-1]
    exact = options.state_dtype in ("float32", "float64")
    log_all = options.restore == "snapshot" or (options.restore == "hybrid" and not exact)
    tau = plan.LOG_ALL if log_all else math.inf if options.restore == "invert" else options.restore_tau
    per_slot = options.rule == "per_slot"
    places, weights = inputs.write_slots, inputs.write_weights
    log_place, rows = plan.plan_log(places, weights, inputs.log_decay, inputs.beta, lanes, row_start, per_slot, tau)
    saved = nothing._replace(log_place=_flat(log_place))
    if not per_slot:
        saved = saved._replace(error=memory.empty((inputs.beta.size, width), inputs.values.dtype))
    if storage == snapshot.NATIVE:
        return saved._replace(log=memory.empty((rows, width), inputs.values.dtype)), None
    return saved, memory.empty((rows, snapshot.row_bytes(width, storage)), np.uint8)


def _tiles(inputs: DeltaInputs | Tokens, count: int, storage: int) -> tuple[int, int]:
    """Return (columns of a tile, numbers moved): whole rows stream best, columns are cut only to feed the threads."""
    width = inputs.values.shape[-1]
    work = (2 * inputs.write_slots.size + inputs.read_slots.size) * width
    threads = pool.threads_for(work)
    columns = forward.group_width(width)
    whole_rows = storage in (snapshot.FP8, snapshot.INT4)  # one scale per row: its tile must see all of it
    if whole_rows or count % threads == 0 or count >= 4 * threads:
        return max(width, columns), work
    groups = -(-width // columns)
    return columns * -(-groups // min(groups, threads)) if groups else columns, work


def _jobs(lanes: int, width: int, tile_columns: int) -> int:
    return lanes * -(-width // tile_columns)


def _run_forward(
    inputs: DeltaInputs,
    options: DeltaOptions,
    lanes: plan.Lanes,
    row_start: np.ndarray,
    table: np.ndarray,
    saved: Saved,
    codes: np.ndarray | None = None,
    source: tables.Source | None = None,
) -> np.ndarray:
    if source is None:
        source = tables.no_source(table.shape[1], table.dtype)
    readings, storage = memory.empty(inputs.values.shape, inputs.values.dtype), _storage(options)
    tile_columns, work = _tiles(inputs, len(lanes.first), snapshot.NATIVE if codes is None else storage)
    x, flat_readings, per_slot = _tokens(inputs), _flat(readings), _PER_SLOT[options.rule]
    rounding = _ROUNDING.get(options.state_dtype)
    kernel = same_types(forward.sparse_delta_forward, table.dtype, rounding, per_slot, codes is None)

    def job(lo: int, hi: int) -> None:
        kernel(
            lo, hi, tile_columns, lanes.first, lanes.tokens, lanes.stride, row_start, table, *source, x, saved, codes,
            storage, flat_readings, per_slot, rounding,
        )  # fmt: skip

    pool.run(_jobs(len(lanes.first), table.shape[1], tile_columns), job, work)
    return readings
