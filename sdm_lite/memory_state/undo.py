"""Marks, and the log of what has changed since: what `rollback` takes back.

The log is a list of records, oldest first. After a call it is the list of rows that the call replaced (``changes`` of
cpu/overlay.py: lane, slot, old row): the old rows are kept, since a row older than the last mark is never written in
place. After a change of the sequences it is the whole index as it was. A record holds a reference to every row that it
names, so nothing is copied to roll back. Marks nest: each one knows how long the log was.
"""

from __future__ import annotations

import numpy as np

from ..cpu import overlay
from ..errors import ValueRangeError, message
from .index import ROW, Index
from .pool import RowPool


class Mark:
    """A moment of a state to which :meth:`MemoryState.rollback` can return; nothing in it is of use elsewhere."""

    def __init__(self, epoch: int, position: int, tokens: np.ndarray):
        self._epoch, self._position, self._tokens = epoch, position, tokens


class UndoLog:
    """The live marks of one state, and its log. The caller holds the pool's lock."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.records: list[np.ndarray | Index] = []

    @property
    def epoch(self) -> int:
        """The clock before which rows must not be written in place."""
        return self.marks[-1]._epoch if self.marks else 0

    def mark(self, pool: RowPool, tokens: np.ndarray) -> Mark:
        """Return a new mark, the innermost."""
        pool.clock += 1
        self.marks.append(Mark(pool.clock, len(self.records), tokens))
        return self.marks[-1]

    def place(self, op: str, mark: object) -> int:
        """Return a mark's place among the live ones, or raise."""
        for i, live in enumerate(self.marks):
            if live is mark:
                return i
        got = "a stale mark: released, rolled back past, or of another state" if isinstance(mark, Mark) else repr(mark)
        raise ValueRangeError(message(op, "mark", "a live mark of this state", f"{got:.80}", "take a new one: mark()"))

    def replaced(self, pool: RowPool, record: np.ndarray | Index) -> None:
        """Keep what was replaced for a rollback, or let go of it where there is no mark."""
        if self.marks:
            self.records.append(record)
        else:
            self._let_go(pool, record)

    def rollback(self, place: int, pool: RowPool, index: Index) -> Index:
        """Take back everything after a mark, which stays; return the index as it was."""
        mark = self.marks[place]
        for record in reversed(self.records[mark._position :]):
            if isinstance(record, Index):
                self._let_go(pool, index)
                index = record
            else:
                overlay.undo(index.table, record, pool.numbers)
        del self.records[mark._position :], self.marks[place + 1 :]
        return index

    def release(self, place: int, pool: RowPool) -> None:
        """Forget a mark and what only it needs; marks around it stay."""
        start, end = self._span(place)
        parted = [self._parted(place, record, pool) for record in self.records[start:end]]
        for gone, _ in parted:
            if gone is not None:
                self._let_go(pool, gone)
        self.records[start:end] = [stays for _, stays in parted if stays is not None]
        del self.marks[place]
        for later in self.marks[place:]:
            later._position -= sum(stays is None for _, stays in parted)

    def needed(self, place: int, pool: RowPool) -> int:
        """Return how many rows only a mark needs."""
        start, end = self._span(place)
        held = [np.empty(0, np.int32)]
        for record in self.records[start:end]:
            gone, _ = self._parted(place, record, pool)
            if gone is not None:
                pairs, column = _rows_of(gone)
                held.append(pairs[..., column].ravel())
        rows = np.concatenate(held)
        row, count = np.unique(rows[rows >= 0], return_counts=True)
        return int((pool.numbers.refs[row] == count).sum())

    def _span(self, place: int) -> tuple[int, int]:
        """Return where a mark's records begin and end; the outermost mark has all before the next."""
        end = self.marks[place + 1]._position if place + 1 < len(self.marks) else len(self.records)
        return self.marks[place]._position if place else 0, end

    def _parted(
        self, place: int, record: np.ndarray | Index, pool: RowPool
    ) -> tuple[np.ndarray | Index | None, np.ndarray | Index | None]:
        """Return the part of a record that goes when its mark goes, and the part that the mark before needs."""
        if place == 0:
            return record, None
        if isinstance(record, Index):
            return None, record
        # an old row that is younger than the mark before was itself a replacement since then: that record is enough
        old = record[:, overlay.OLD]
        young = (old >= 0) & (pool.numbers.stamp[np.maximum(old, 0)] >= self.marks[place - 1]._epoch)
        return record[young], np.ascontiguousarray(record[~young])

    def forget(self, pool: RowPool) -> None:
        """Let go of everything, when the state itself is gone: no lock needed."""
        for record in self.records:
            pool.drop(*_rows_of(record))

    @staticmethod
    def _let_go(pool: RowPool, record: np.ndarray | Index) -> None:
        pool.let_go(*_rows_of(record))


def _rows_of(record: np.ndarray | Index) -> tuple[np.ndarray, int]:
    """Return (pairs, column) of the rows that a record holds."""
    return (record.table, ROW) if isinstance(record, Index) else (record, overlay.OLD)
