"""A call of Fast-weight Product Key Memory: reads chunk by chunk, writes at chunk ends, and the exact backward.

Every token is read with its chunk's entry weights as soon as it arrives; when a chunk is complete its earlier tokens
are read again (the entry weights have not changed, so these are the same bits) and one write, of keys and values
together, follows (:mod:`sdm_lite.fwpkm_writes`).

The table is never copied: the call's own rows lie in a :class:`RowTable` over it. For the backward each chunk keeps
the rows that its tokens read, as they were at its entry, which are also the rows that its write changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from . import fwpkm_equations as eq
from .fwpkm_chunks import Chunk, Segment, StreamCall, StreamOptions, segments
from .fwpkm_writes import ChunkGradients, write, write_backward
from .rooms import Lookup
from .row_table import RowTable


class StreamSaved(NamedTuple):
    """What the backward needs, chunk after chunk, R tokens read in all (those read twice count twice)."""

    weights: np.ndarray  # [R, H, k]
    places: np.ndarray  # int32 [R, H k]: of each slot among its chunk's rows
    columns: np.ndarray  # int32 [R, H, 2, c]
    distances: np.ndarray  # [R, H, 2, c]
    rows: np.ndarray  # int32 [U]: the chunks' slots
    row_start: np.ndarray  # int64 [chunks + 1]
    entry: np.ndarray  # [U, D]: the rows at their chunk's entry
    keys: np.ndarray  # [chunks, H, 2, m, h]: the keys at each chunk's entry


def stream_forward(
    call: StreamCall, keys: np.ndarray, table: RowTable, options: StreamOptions, room: Any, *, save: bool = False
) -> tuple[np.ndarray, np.ndarray, RowTable, StreamSaved | None]:
    """Return the new tokens' retrieved values, the keys and the table after the call, and what the backward needs.

    Parameters
    ----------
    call : StreamCall
    keys : array [H, 2, m, h]
        At the open chunk's entry; left as they are.
    table : RowTable [S, D]
        Left as it is.
    options : StreamOptions
    room : module
    save : bool

    Returns
    -------
    retrieved : array [P, T, D]
    keys : array [H, 2, m, h]
    table : RowTable
        Over the one given; owns the rows that were written.
    saved : StreamSaved or None
    """
    sequences, end = call.gates.shape
    retrieved = np.empty((sequences, end - call.fresh, table.shape[1]), table.dtype)
    after, chunks = RowTable(table), []
    for segment in segments(call, options):
        chunk = _read(segment.flat(call.queries), keys, after, options, room)
        readings = room.embedding_bag_forward(chunk.entry, chunk.places, chunk.weights)
        count = segment.stop - segment.read
        body = readings[: sequences * count].reshape(sequences, count, table.shape[1])
        new = max(call.fresh, segment.read)
        retrieved[:, new - call.fresh : segment.stop - call.fresh] = body[:, new - segment.read :]
        if segment.complete:
            keys = write(segment, call, chunk, readings, after, options, room)
        if save:
            chunks.append(chunk)
    return retrieved, keys, after, _saved(chunks, keys, table, call, options) if save else None


def _read(queries: np.ndarray, keys: np.ndarray, table: RowTable, options: StreamOptions, room: Any) -> Chunk:
    found = room.idw_product_key_topk_forward(queries, keys, options.k, options.epsilon)
    wide = (len(queries), keys.shape[0] * options.k)
    rows, places = room.number_slots(found.slots.reshape(wide), table.shape[0])
    return Chunk(queries, found.weights.reshape(wide), places, found, rows, table.gather(rows), keys)


def _saved(chunks: list[Chunk], keys: np.ndarray, table: RowTable, call: StreamCall, options) -> StreamSaved:
    heads, kept = keys.shape[0], min(options.k, keys.shape[2])
    nothing = {
        "weights": np.empty((0, heads, options.k), keys.dtype),
        "places": np.empty((0, heads * options.k), np.int32),
        "columns": np.empty((0, heads, 2, kept), np.int32),
        "distances": np.empty((0, heads, 2, kept), keys.dtype),
        "rows": np.empty(0, np.int32),
        "entry": np.empty((0, table.shape[1]), keys.dtype),
        "keys": np.empty((0, *keys.shape), keys.dtype),
    }
    found = {
        "weights": [c.found.weights for c in chunks],
        "places": [c.places for c in chunks],
        "columns": [c.found.columns for c in chunks],
        "distances": [c.found.distances for c in chunks],
        "rows": [c.rows for c in chunks],
        "entry": [c.entry for c in chunks],
        "keys": [c.keys[None] for c in chunks],
    }
    row_start = np.cumsum([0, *(len(c.rows) for c in chunks)], dtype=np.int64)
    joined = {name: np.concatenate(arrays) if arrays else nothing[name] for name, arrays in found.items()}
    return StreamSaved(row_start=row_start, **joined)


class StreamGradients(NamedTuple):
    """Gradients of a call; those of the past tokens are computed and dropped by the caller."""

    queries: np.ndarray  # [P, X, H, 2h]
    values: np.ndarray  # [P, X, D]
    gates: np.ndarray  # [P, X]
    keys: np.ndarray  # [H, 2, m, h], at the call's start
    rows: np.ndarray  # int32 [V], distinct: the slots of
    row_gradients: np.ndarray  # [V, D], of the table at the call's start; all other rows' are zero


def dense_rows(gradients: StreamGradients, num_slots: int) -> np.ndarray:
    """Return the gradient of the whole table, [num_slots, D]."""
    dense = np.zeros((num_slots, gradients.row_gradients.shape[1]), gradients.row_gradients.dtype)
    dense[gradients.rows] = gradients.row_gradients
    return dense


def stream_backward(
    call: StreamCall, options: StreamOptions, saved: StreamSaved, dretrieved: np.ndarray, room: Any
) -> StreamGradients:
    """Return the gradients of a call, chunk by chunk from the last, through reads and writes.

    One buffer [V, D] holds dL/dV of the rows that the call touched; what is saved is left as it is.
    """
    rows, union = np.unique(saved.rows, return_inverse=True)
    dtable = np.zeros((len(rows), saved.entry.shape[1]), saved.entry.dtype)
    dkeys = np.zeros(saved.keys.shape[1:], saved.keys.dtype)
    totals = tuple(np.zeros(x.shape, dtable.dtype) for x in call[:3])
    plan = segments(call, options)
    for number, (segment, chunk) in reversed(list(enumerate(zip(plan, _chunks(call, plan, saved), strict=True)))):
        mine = union.reshape(-1)[saved.row_start[number] : saved.row_start[number + 1]]
        if options.detach_every is not None and (number + 1) % options.detach_every == 0:
            dtable[:], dkeys = 0, np.zeros_like(dkeys)  # nothing flows back over this chunk's end
        dreadings = _upstream(segment, call, dretrieved)
        drows, dkeys = _chunk_backward(segment, call, chunk, options, room, dreadings, dtable[mine], dkeys, totals)
        dtable[mine] = drows
    return StreamGradients._make((*totals, dkeys, rows, dtable))


def _chunks(call: StreamCall, plan: list[Segment], saved: StreamSaved) -> Iterator[Chunk]:
    token = 0
    for number, segment in enumerate(plan):
        queries = segment.flat(call.queries)
        tokens, token = slice(token, token + len(queries)), token + len(queries)
        held = slice(saved.row_start[number], saved.row_start[number + 1])
        places, weights, rows = saved.places[tokens], saved.weights[tokens], saved.rows[held]
        slots = rows[places].reshape(weights.shape)
        found = Lookup(weights, slots, saved.columns[tokens], saved.distances[tokens])
        yield Chunk(queries, weights.reshape(places.shape), places, found, rows, saved.entry[held], saved.keys[number])


def _upstream(segment: Segment, call: StreamCall, dretrieved: np.ndarray) -> np.ndarray:
    """Return dL/dreadings of the segment's tokens; a token that only was read again has none of its own."""
    sequences, count = len(call.gates), segment.stop - segment.read
    new = max(call.fresh, segment.read)
    body = np.zeros((sequences, count, dretrieved.shape[2]), dretrieved.dtype)
    body[:, new - segment.read :] = dretrieved[:, new - call.fresh : segment.stop - call.fresh]
    carried = np.zeros((sequences * segment.carried, dretrieved.shape[2]), dretrieved.dtype)
    return np.concatenate([body.reshape(-1, dretrieved.shape[2]), carried])


def _chunk_backward(
    segment: Segment, call: StreamCall, chunk: Chunk, options: StreamOptions, room, dreadings, drows, dkeys, totals
) -> tuple[np.ndarray, np.ndarray]:
    """Add one chunk's gradients to `totals`; return those of its rows and keys at its entry, given those after it."""
    dqueries, dvalues, dgates = totals
    d = ChunkGradients.zeros(chunk, dreadings, drows, dkeys)
    if segment.complete:
        write_backward(segment, call, chunk, options, room, d)
        segment.add_to(dvalues, d.values)
        segment.add_to(dgates, d.gates)
    d.weights += room.embedding_bag_weights_backward(d.readings, chunk.entry, chunk.places)
    drows = d.rows + room.embedding_bag_backward(d.readings, chunk.places, chunk.weights, len(chunk.rows))
    of_weights = d.weights.reshape(chunk.found.weights.shape)
    d.distances += eq.distances_of_weights(of_weights, chunk.found, chunk.keys.shape[2])
    of_reads, of_keys = room.distances_backward(d.distances, chunk.queries, chunk.keys, chunk.found.columns)
    segment.add_to(dqueries, d.queries + of_reads)
    return drows, d.keys + of_keys
