"""A call of Fast-weight Product Key Memory: reads chunk by chunk, writes at chunk ends, and the exact backward.

The chunks lie on the stream's own grid. A call gets, before its own tokens, the *past*: what earlier calls left
of the open chunk, and before that (pairs "carry") the last tokens of the chunk before. Every token is read with
its chunk's entry weights as soon as it arrives; when a chunk is complete its earlier tokens are read again (the
entry weights have not changed, so these are the same bits) and one write, of keys and values together, follows.

Tokens of P sequences that share the fast weights are flat, sequence by sequence. The table is never copied: the
call's own rows lie in a :class:`RowTable` over it. For the backward each chunk keeps the rows that its tokens
read, as they were at its entry, which are also the rows that its write changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import fwpkm_equations as eq
from .rooms import Lookup
from .row_table import RowTable


@dataclass(frozen=True)
class StreamOptions:
    """How a call is computed; the fields are those of :func:`sdm_lite.fwpkm`."""

    k: int = 8
    chunk: int = 512
    lookahead: int = 1
    pairs: str = "drop"
    scale: str = "norm"
    value_rate: float = 1.0
    key_rate: float = 1.0
    epsilon: float = 1e-3
    update: bool = True
    detach_every: int | None = None


class StreamCall(NamedTuple):
    """Past and new tokens of P sequences over one memory, in the compute dtype, C-contiguous."""

    queries: np.ndarray  # [P, X, H, 2h]
    values: np.ndarray  # [P, X, D]
    gates: np.ndarray  # [P, X]
    mask: np.ndarray  # [P, X] bool, True for a token that counts
    carried: int  # tokens of the chunk before, at the front
    fresh: int  # the first new token; those from `carried` to here are the open chunk's


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


class Segment(NamedTuple):
    """What a call holds of a chunk: tokens [start, stop), read from `read` on, and `carried` ones before."""

    start: int
    stop: int
    read: int
    carried: int
    complete: bool

    def flat(self, x: np.ndarray) -> np.ndarray:
        """Return x [P, X, ...] at the tokens read, [P n, ...], the carried ones after all others."""
        body = x[:, self.read : self.stop]
        body = np.ascontiguousarray(body).reshape(-1, *x.shape[2:])
        if not self.carried:
            return body
        carried = x[:, self.start - self.carried : self.start].reshape(-1, *x.shape[2:])
        return np.concatenate([body, carried])

    def add_to(self, total: np.ndarray, flat: np.ndarray) -> None:
        """Add flat [P n, ...] to total [P, X, ...]: the reverse of `flat`."""
        sequences, count = len(total), self.stop - self.read
        body = flat[: sequences * count].reshape(sequences, count, *total.shape[2:])
        total[:, self.read : self.stop] += body
        if self.carried:
            rest = flat[sequences * count :].reshape(sequences, self.carried, *total.shape[2:])
            total[:, self.start - self.carried : self.start] += rest


def segments(call: StreamCall, options: StreamOptions) -> list[Segment]:
    """Return the call's chunks in order; without `update`, one that never completes."""
    end = call.queries.shape[1]
    if not options.update:
        return [Segment(call.fresh, end, call.fresh, 0, False)] if end > call.fresh else []
    found = []
    for start in range(call.carried, end, options.chunk):
        stop = min(start + options.chunk, end)
        complete = stop - start == options.chunk
        carried = min(options.lookahead, start) if complete and options.pairs == "carry" else 0
        read = start if complete else max(start, call.fresh)
        if stop > max(start, call.fresh):
            found.append(Segment(start, stop, read, carried, complete))
    return found


class Pairs(NamedTuple):
    """Which tokens of a complete segment write: flat numbers as in `Segment.flat`."""

    source: np.ndarray  # queries
    target: np.ndarray  # whose values they are to return
    counted: np.ndarray  # tokens whose reads count in N
    members: np.ndarray  # valid tokens of the chunk: they make up the marginal


def pairs_of(segment: Segment, mask: np.ndarray, options: StreamOptions) -> Pairs:
    """Return the pairs (t, t + lookahead) of a complete segment; a masked token is in none of them."""
    sequences, size, ahead = len(mask), segment.stop - segment.start, options.lookahead
    first = np.arange(sequences)[:, None] * size
    source = first + np.arange(max(size - ahead, 0))
    target = source + ahead
    valid = segment.flat(mask)
    members = np.flatnonzero(valid[: sequences * size])
    late, towards = first[:, :0], np.arange(0)  # sources whose targets are the chunk's first tokens
    if options.pairs == "wrap" and ahead <= size:
        late, towards = first + np.arange(size - ahead, size), np.arange(ahead)
    elif segment.carried:
        # after a short chunk fewer than `ahead` are carried, and a target may lie beyond a short chunk
        number = np.arange(segment.carried)
        towards = ahead - segment.carried + number
        number, towards = number[towards < size], towards[towards < size]
        late = sequences * size + np.arange(sequences)[:, None] * segment.carried + number
    source = np.concatenate([source, late], axis=1).ravel()
    target = np.concatenate([target, first + towards], axis=1).ravel()
    both = valid[source] & valid[target]
    source, target = source[both], target[both]
    counted = np.concatenate([members, source[source >= sequences * size]])
    return Pairs(source, target, counted, members)


class Chunk(NamedTuple):
    """One segment's reads: tokens flat as in `Segment.flat`."""

    queries: np.ndarray
    weights: np.ndarray  # [n, H k]
    places: np.ndarray  # [n, H k], among the chunk's rows
    found: Lookup
    rows: np.ndarray
    entry: np.ndarray
    keys: np.ndarray


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
            keys = _write(segment, call, chunk, readings, after, options, room)
        if save:
            chunks.append(chunk)
    return retrieved, keys, after, _saved(chunks, keys, table, call, options) if save else None


def _read(queries: np.ndarray, keys: np.ndarray, table: RowTable, options: StreamOptions, room: Any) -> Chunk:
    found = room.idw_product_key_topk_forward(queries, keys, options.k, options.epsilon)
    wide = (len(queries), keys.shape[0] * options.k)
    rows, places = room.number_slots(found.slots.reshape(wide), table.shape[0])
    return Chunk(queries, found.weights.reshape(wide), places, found, rows, table.gather(rows), keys)


def _write(
    segment: Segment, call: StreamCall, chunk: Chunk, readings: np.ndarray, table: RowTable, options, room
) -> np.ndarray:
    """Write a complete chunk into `table` and return the keys after it; both steps start from the entry weights."""
    pairs = pairs_of(segment, call.mask, options)
    if len(pairs.source):
        step, counts = _value_step(segment, call, chunk, readings, pairs, options)
        places, weights = chunk.places[pairs.source], chunk.weights[pairs.source]
        change = room.embedding_bag_backward(step.step, places, weights, len(chunk.rows))
        hit = np.unique(places)
        change /= counts[:, None]
        change += chunk.entry
        table.put(chunk.rows[hit], change[hit])
    if not len(pairs.members) or options.key_rate == 0:
        return chunk.keys
    columns, distances = chunk.found.columns[pairs.members], chunk.found.distances[pairs.members]
    rates = eq.key_rates(distances, columns, chunk.keys.shape[2], options.key_rate)
    return room.key_step_forward(rates, chunk.queries[pairs.members], chunk.keys, columns)


def _value_step(
    segment: Segment, call: StreamCall, chunk: Chunk, readings: np.ndarray, pairs: Pairs, options: StreamOptions
) -> tuple[eq.ValueStep, np.ndarray]:
    """Return the pairs' step and N_i, the reads of each of the chunk's rows (at least 1)."""
    counts = np.bincount(chunk.places[pairs.counted].ravel(), minlength=len(chunk.rows))
    factor = options.value_rate * eq.step_factor(chunk.weights[pairs.source], options.scale)
    error = segment.flat(call.values)[pairs.target] - readings[pairs.source]
    dtype = readings.dtype
    step = eq.ValueStep(factor.astype(dtype, copy=False), segment.flat(call.gates)[pairs.source], error)
    return step, np.maximum(counts, 1).astype(dtype)


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
    dweights = np.zeros(chunk.weights.shape, chunk.weights.dtype)
    ddistances = np.zeros(chunk.found.distances.shape, chunk.weights.dtype)
    dread = np.zeros(chunk.queries.shape, chunk.weights.dtype)
    if segment.complete:
        pairs = pairs_of(segment, call.mask, options)
        if len(pairs.source):
            of_values, of_gates = _value_write_backward(
                segment, call, chunk, pairs, options, room, dreadings, drows, dweights
            )
            segment.add_to(dvalues, of_values)
            segment.add_to(dgates, of_gates)
        if len(pairs.members) and options.key_rate != 0:
            members, sub_keys = pairs.members, chunk.keys.shape[2]
            columns, distances = chunk.found.columns[members], chunk.found.distances[members]
            rates = eq.key_rates(distances, columns, sub_keys, options.key_rate)
            drates, dread[members], dkeys = room.key_step_backward(
                dkeys, rates, chunk.queries[members], chunk.keys, columns
            )
            ddistances[members] = eq.key_rates_backward(drates, distances, columns, sub_keys, options.key_rate)
    dweights += room.embedding_bag_weights_backward(dreadings, chunk.entry, chunk.places)
    drows = drows + room.embedding_bag_backward(dreadings, chunk.places, chunk.weights, len(chunk.rows))
    ddistances += eq.distances_of_weights(dweights.reshape(chunk.found.weights.shape), chunk.found, chunk.keys.shape[2])
    of_reads, of_keys = room.distances_backward(ddistances, chunk.queries, chunk.keys, chunk.found.columns)
    segment.add_to(dqueries, dread + of_reads)
    return drows, dkeys + of_keys


def _value_write_backward(
    segment: Segment, call: StreamCall, chunk: Chunk, pairs: Pairs, options, room, dreadings, drows, dweights
) -> tuple[np.ndarray, np.ndarray]:
    """Return (dvalues, dgates), flat, of the value write; add its part to `dreadings` and `dweights` of the sources.

    With G = drows and N the counts: dstep_t = sum_a (w_ta / N) G,  dw_ta = <G / N, step_t>.
    """
    readings = room.embedding_bag_forward(chunk.entry, chunk.places, chunk.weights)
    step, counts = _value_step(segment, call, chunk, readings, pairs, options)
    places, weights = chunk.places[pairs.source], chunk.weights[pairs.source]
    shared = drows / counts[:, None]
    dstep = room.embedding_bag_forward(shared, places, weights)
    derror, of_gates, through_factor = eq.value_step_backward(step, dstep, weights, options.scale)
    dreadings[pairs.source] -= derror
    dweights[pairs.source] += through_factor + room.embedding_bag_weights_backward(step.step, shared, places)
    dvalues = np.zeros((len(chunk.queries), derror.shape[1]), derror.dtype)
    dgates = np.zeros(len(chunk.queries), derror.dtype)
    dvalues[pairs.target], dgates[pairs.source] = derror, of_gates
    return dvalues, dgates
