"""The chunks of a stream: what a call holds of each, which tokens are paired, and what a chunk's reads found.

The chunks lie on the stream's own grid. A call gets, before its own tokens, the *past*: what earlier calls left
of the open chunk, and before that (pairs "carry") the last tokens of the chunk before. Tokens of P sequences that
share the fast weights are flat, sequence by sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .rooms import Lookup


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
    mse_to_keys: bool = False


class StreamCall(NamedTuple):
    """Past and new tokens of P sequences over one memory, in the compute dtype, C-contiguous."""

    queries: np.ndarray  # [P, X, H, 2h]
    values: np.ndarray  # [P, X, D]
    gates: np.ndarray  # [P, X]
    mask: np.ndarray  # [P, X] bool, True for a token that counts
    carried: int  # tokens of the chunk before, at the front
    fresh: int  # the first new token; those from `carried` to here are the open chunk's


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
