"""One memory of an :class:`sdm_lite.FwPKMState`: its fast weights, and the tokens that later writes need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .fwpkm_chunks import StreamCall, StreamOptions, pairs_of, segments
from .fwpkm_stream import stream_forward
from .row_table import RowTable


class Lane:
    """One memory and the sequences that share it. Its arrays are replaced, never written, so copies are cheap."""

    def __init__(self, keys: np.ndarray, table: RowTable):
        self.keys, self.table = keys, table
        self.pieces: list[StreamCall] = []  # the past: carried tokens, then the open chunk's, cut as they came
        self.carried = 0  # of the past, tokens of the chunk before
        self.filled = 0  # and tokens of the open chunk
        self.position = 0  # tokens that entered the stream

    def fork(self) -> Lane:
        """Return a lane with the same weights and past."""
        other = Lane(self.keys, self.table.fork())
        other.pieces, other.carried = list(self.pieces), self.carried
        other.filled, other.position = self.filled, self.position
        return other

    def batch(self) -> int | None:
        """Return the number of sequences that the past holds, None where there is no past."""
        return len(self.pieces[0].mask) if self.pieces else None

    def call(
        self, floats: list, mask: np.ndarray, options: StreamOptions, update: bool, concatenate: Callable[[list], Any]
    ) -> tuple[StreamCall, StreamOptions]:
        """Return the past and new tokens as one call, and its options.

        Where no chunk is completed the past is not needed: the new tokens are only read.
        """
        writes = update and self.filled + mask.shape[1] >= options.chunk
        options = StreamOptions(**{**vars(options), "update": writes})
        if not writes or not self.pieces:
            return StreamCall._make((*floats, mask, 0, 0)), options
        past = [np.concatenate([piece[i] for piece in self.pieces], axis=1) for i in range(4)]
        joined = [concatenate([old, new]) for old, new in zip(past, floats)]
        whole = np.concatenate([past[3], mask], axis=1)
        return StreamCall._make((*joined, whole, self.carried, self.carried + self.filled)), options

    def commit(
        self, options: StreamOptions, call: StreamCall, keys: np.ndarray, slots: np.ndarray, rows: np.ndarray
    ) -> None:
        """Take over what a call leaves: weights, and the tokens that later writes need."""
        tokens, new = call.mask.shape[1], call.mask.shape[1] - call.fresh
        self.position += new
        if self.filled + new < options.chunk:
            self.filled += new
            self.pieces = [*self.pieces, _tail(call, call.fresh, tokens)] if new else self.pieces
            return
        self.keys = keys
        if len(slots):
            self.table.put(slots, rows)
            self.table = self.table.settle()
        # without a past the call starts at the open chunk
        start = call.carried + (tokens - call.carried) // options.chunk * options.chunk
        self._close(call, start, tokens, options)

    def _close(self, call: StreamCall, start: int, tokens: int, options: StreamOptions) -> None:
        """Keep the tokens from `start` on as the open chunk's, and before them what pairs "carry" will read again."""
        self.carried = min(options.lookahead, start) if options.pairs == "carry" else 0
        self.filled = tokens - start
        self.pieces = [_tail(call, start - self.carried, tokens)] if self.carried + self.filled else []

    def flush(self, options: StreamOptions, room: Any) -> None:
        """Write the open chunk as it is and begin another; without a valid pair nothing is written."""
        if not self.filled:
            return
        past = [np.concatenate([piece[i] for piece in self.pieces], axis=1) for i in range(4)]
        call = StreamCall._make((*past, self.carried, self.carried))
        short = StreamOptions(**{**vars(options), "chunk": self.filled, "update": True})
        (segment,) = segments(call, short)
        if len(pairs_of(segment, call.mask, short).source):
            _, self.keys, table, _ = stream_forward(call, self.keys, self.table, short, room)
            self.table.put(*table.owned())
            self.table = self.table.settle()
        self._close(call, call.mask.shape[1], call.mask.shape[1], options)


def _tail(call: StreamCall, start: int, stop: int) -> StreamCall:
    """Return copies of some of a call's tokens: the caller may go on to change its arrays."""
    return StreamCall._make((*(np.array(x[:, start:stop]) for x in call[:4]), 0, 0))
