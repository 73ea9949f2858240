"""The write at a chunk's end, values and keys from the same entry weights, and its backward (docs/fwpkm.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import fwpkm_equations as eq
from .fwpkm_chunks import Chunk, Pairs, Segment, StreamCall, StreamOptions, pairs_of
from .row_table import RowTable


def write(
    segment: Segment, call: StreamCall, chunk: Chunk, readings: np.ndarray, table: RowTable, options, room
) -> np.ndarray:
    """Write a complete chunk into `table` and return the keys after it; both steps start from the entry weights."""
    pairs = pairs_of(segment, call.mask, options)
    if len(pairs.source):
        step = _value_step(segment, call, chunk, readings, pairs, options.value_rate, options.scale)
        counts = _counts(chunk, pairs)
        places, weights = chunk.places[pairs.source], chunk.weights[pairs.source]
        change = room.embedding_bag_backward(step.step, places, weights, len(chunk.rows))
        hit = np.unique(places)
        change /= counts[:, None]
        change += chunk.entry
        table.put(chunk.rows[hit], change[hit])
    if not len(pairs.members) or options.key_rate == 0:
        return chunk.keys
    moved = _key_step(segment, call, chunk, readings, pairs, options, room)
    columns = chunk.found.columns[moved.tokens]
    return room.key_step_forward(moved.rates, chunk.queries[moved.tokens], chunk.keys, columns)


def _value_step(
    segment: Segment, call: StreamCall, chunk: Chunk, readings: np.ndarray, pairs: Pairs, rate: float, scale: str
) -> eq.ValueStep:
    """Return the pairs' step at a rate."""
    factor = rate * eq.step_factor(chunk.weights[pairs.source], scale)
    error = segment.flat(call.values)[pairs.target] - readings[pairs.source]
    return eq.ValueStep(factor.astype(readings.dtype, copy=False), segment.flat(call.gates)[pairs.source], error)


def _counts(chunk: Chunk, pairs: Pairs) -> np.ndarray:
    """Return N_i, the reads of each of the chunk's rows (at least 1)."""
    counts = np.bincount(chunk.places[pairs.counted].ravel(), minlength=len(chunk.rows))
    return np.maximum(counts, 1).astype(chunk.weights.dtype)


class _KeyStep(NamedTuple):
    """K_j -= sum over `tokens` of rates_tj (q_t - K_j); with `mse_to_keys` also what its second part came from."""

    tokens: np.ndarray  # flat numbers
    rates: np.ndarray  # [n, H, 2, c]
    sources: np.ndarray  # of the paired tokens, their places in `tokens`
    memory: tuple[eq.ValueStep, np.ndarray] | None  # the step at rate 1, and dL/dw [pairs, H, k] of the values' loss


def _key_step(
    segment: Segment, call: StreamCall, chunk: Chunk, readings: np.ndarray | None, pairs: Pairs, options, room
) -> _KeyStep:
    """Return the key step; `readings` are needed where there are pairs."""
    sub_keys, members = chunk.keys.shape[2], len(pairs.members)
    tokens = pairs.counted if options.mse_to_keys else pairs.members
    columns, distances = chunk.found.columns[pairs.members], chunk.found.distances[pairs.members]
    rates = eq.key_rates(distances, columns, sub_keys, options.key_rate)
    if not options.mse_to_keys or readings is None or not len(pairs.source):
        return _KeyStep(tokens[:members], rates, tokens[:0], None)
    unscaled = _value_step(segment, call, chunk, readings, pairs, 1.0, options.scale)
    found = chunk.found.of(pairs.source)
    slopes = -room.embedding_bag_weights_backward(unscaled.step, chunk.entry, chunk.places[pairs.source])
    slopes = slopes.reshape(found.weights.shape)
    carried = np.zeros((len(tokens) - members, *rates.shape[1:]), rates.dtype)  # in no marginal
    rates, sources = np.concatenate([rates, carried]), np.searchsorted(tokens, pairs.source)
    rates[sources] += eq.memory_rates(slopes, found, sub_keys, options.key_rate)
    return _KeyStep(tokens, rates, sources, (unscaled, slopes))


@dataclass
class ChunkGradients:
    """One chunk's gradients, tokens flat as in `Segment.flat`: of the read those after it, to which the write adds."""

    queries: np.ndarray  # [n, H, 2h]
    values: np.ndarray  # [n, D]
    gates: np.ndarray  # [n]
    weights: np.ndarray  # [n, H k]
    distances: np.ndarray  # [n, H, 2, c]
    readings: np.ndarray  # [n, D]
    rows: np.ndarray  # [U, D], at the chunk's end until the write is undone
    keys: np.ndarray  # [H, 2, m, h], likewise

    @classmethod
    def zeros(cls, chunk: Chunk, readings: np.ndarray, rows: np.ndarray, keys: np.ndarray) -> ChunkGradients:
        """Return none yet, beside those of the readings, and of rows and keys after the chunk."""
        tokens, dtype = len(chunk.queries), chunk.weights.dtype
        shapes = chunk.queries.shape, readings.shape, (tokens,), chunk.weights.shape, chunk.found.distances.shape
        queries, values, gates, weights, distances = (np.zeros(shape, dtype) for shape in shapes)
        return cls(queries, values, gates, weights, distances, readings, rows, keys)


def write_backward(
    segment: Segment, call: StreamCall, chunk: Chunk, options: StreamOptions, room: Any, d: ChunkGradients
) -> None:
    """Bring the gradients over a complete chunk's write: those of keys and rows to its entry, the others added to."""
    pairs = pairs_of(segment, call.mask, options)
    readings, after = None, d.rows
    if len(pairs.source):
        readings = room.embedding_bag_forward(chunk.entry, chunk.places, chunk.weights)
        _value_write_backward(segment, call, chunk, readings, pairs, options, room, after, d)
    if len(pairs.members) and options.key_rate != 0:
        _key_write_backward(segment, call, chunk, readings, pairs, options, room, d)


def _value_write_backward(
    segment: Segment, call: StreamCall, chunk: Chunk, readings: np.ndarray, pairs: Pairs, options, room, drows, d
) -> None:
    """Add the value step. With G = drows, N the counts: dstep_t = sum_a (w_ta / N) G, dw_ta = <G / N, step_t>."""
    step = _value_step(segment, call, chunk, readings, pairs, options.value_rate, options.scale)
    places, weights = chunk.places[pairs.source], chunk.weights[pairs.source]
    shared = drows / _counts(chunk, pairs)[:, None]
    dstep = room.embedding_bag_forward(shared, places, weights)
    derror, of_gates, through_factor = eq.value_step_backward(step, dstep, weights, options.scale)
    d.readings[pairs.source] -= derror
    d.weights[pairs.source] += through_factor + room.embedding_bag_weights_backward(step.step, shared, places)
    d.values[pairs.target] += derror
    d.gates[pairs.source] += of_gates


def _key_write_backward(
    segment: Segment, call: StreamCall, chunk: Chunk, readings: np.ndarray | None, pairs: Pairs, options, room, d
) -> None:
    sub_keys, members = chunk.keys.shape[2], pairs.members
    step = _key_step(segment, call, chunk, readings, pairs, options, room)
    columns, distances = chunk.found.columns, chunk.found.distances
    drates, d.queries[step.tokens], d.keys = room.key_step_backward(
        d.keys, step.rates, chunk.queries[step.tokens], chunk.keys, columns[step.tokens]
    )
    d.distances[members] += eq.key_rates_backward(
        drates[: len(members)], distances[members], columns[members], sub_keys, options.key_rate
    )
    if step.memory is None:
        return
    unscaled, slopes = step.memory
    found, places = chunk.found.of(pairs.source), chunk.places[pairs.source]
    dslopes, dweights, ddistances = eq.memory_rates_backward(
        drates[step.sources], slopes, found, sub_keys, options.key_rate
    )
    # slopes = -<V[slot], step>
    back = -dslopes.reshape(places.shape)
    dstep = room.embedding_bag_forward(chunk.entry, places, back)
    weights = chunk.weights[pairs.source]
    derror, of_gates, through_factor = eq.value_step_backward(unscaled, dstep, weights, options.scale)
    d.rows = d.rows + room.embedding_bag_backward(unscaled.step, places, back, len(chunk.rows))
    d.readings[pairs.source] -= derror
    d.weights[pairs.source] += through_factor + dweights.reshape(places.shape)
    d.distances[pairs.source] += ddistances
    d.values[pairs.target] += derror
    d.gates[pairs.source] += of_gates
