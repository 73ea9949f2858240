"""Marks, and the log of what has changed since: what `rollback` takes back.

The log is a list of records, oldest first. After a call it is the list of rows that the call replaced (``changes`` of
cpu/overlay.py: lane, slot, old row): the old rows are kept, since a row older than the last mark is never written in
place. After a change of the sequences it is the whole index as it was. A record holds a reference to every row that it
names, so nothing is copied to roll back. Marks nest: each one knows how long the log was.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..cpu import overlay
from ..errors import ValueRangeError, message
from .pool import RowPool

ROW = 1  # column of an index table that names the row


class Index(NamedTuple):
    """Which row holds a slot, per lane; as in cpu/overlay.py."""

    table: np.ndarray  # int32 [L, C, 2]
    filled: np.ndarray  # int64 [L]


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
        mark = self.marks.pop(place)
        end = self.marks[place]._position if place < len(self.marks) else len(self.records)
        if place == 0:
            for record in self.records[:end]:
                self._let_go(pool, record)
            del self.records[:end]
            for later in self.marks:
                later._position -= end
            return
        # an old row that is younger than the mark before was itself a replacement since then: that record is enough
        epoch = self.marks[place - 1]._epoch
        for i in range(mark._position, end):
            record = self.records[i]
            if not isinstance(record, Index):
                old = record[:, overlay.OLD]
                young = (old >= 0) & (pool.numbers.stamp[np.maximum(old, 0)] >= epoch)
                self._let_go(pool, record[young])
                self.records[i] = np.ascontiguousarray(record[~young])

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
